"""Lightning-AI/litgpt: `litgpt finetune_lora`, `finetune_full` and `pretrain`, with two ranks."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path

from tests.field.recipe import Edit, Recipe, Trial, by_design, defect, of_tokens, undeclared
from tests.field.usual import IN_PIECES, SAVES_LATER, STEPS_AT_NAN

_WORDS = ("ask", "answer", "what", "is", "the", "sum", "of", "two", "red", "green", "dog", "cat")
_TINY = {"n_layer": 2, "n_head": 2, "n_embd": 16, "intermediate_size": 32, "block_size": 64}
_FINETUNE = (
    *("checkpoints/tiny/pythia", "--devices={world_size}", "--precision=32-true", "--seed=0"),
    *("--data=JSON", "--data.json_path=data", "--data.num_workers=0"),
    *("--train.global_batch_size=8", "--train.micro_batch_size=2", "--train.epochs=3"),
    *("--train.lr_warmup_steps=1", "--eval.max_new_tokens=2", "--eval.interval=100"),
)


def checkpoint(folder: Path) -> None:
    """Write a tiny Pythia with its tokenizer, as `litgpt download` does, and instructions."""
    import torch
    import yaml
    from tokenizers import Tokenizer, models, pre_tokenizers

    sys.path.insert(0, str(folder))
    from litgpt.model import GPT, Config

    vocabulary = {word: at for at, word in enumerate(["<pad>", "<unk>", "<eos>", *_WORDS])}
    home = folder / "checkpoints/tiny/pythia"
    home.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(home / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (home / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    size = {"padded_vocab_size": len(vocabulary), "vocab_size": len(vocabulary)}
    config = Config.from_name("pythia-14m", **_TINY, **size)
    torch.manual_seed(0)
    torch.save(GPT(config).state_dict(), home / "lit_model.pth")
    (home / "model_config.yaml").write_text(yaml.dump(asdict(config)), encoding="utf-8")
    drawn = random.Random(0)
    rows = [
        {
            "instruction": " ".join(drawn.choices(_WORDS, k=3)),
            "output": " ".join(drawn.choices(_WORDS, k=drawn.randint(3, 8))),
        }
        for _ in range(40)
    ]
    data = folder / "data"
    data.mkdir()
    (data / "train.json").write_text(json.dumps(rows[:32]), encoding="utf-8")
    (data / "val.json").write_text(json.dumps(rows[32:]), encoding="utf-8")


_USUAL = (STEPS_AT_NAN, SAVES_LATER)
_NOT_RESTARTED = undeclared(
    clause="F-DP-006",
    words="the launcher restarted no worker",
    because="litgpt starts its own ranks, and never restarts one. Only you can say "
    "that this is intended: `--exclude F-DP-006`.",
)
_OTHER_ADAPTERS = tuple(
    by_design(
        clause=clause,
        words="the run on 1 worker (_forward_module.transformer.h.0.attn.qkv.lora_A)",
        because="Adapters are initialised after they were sharded, so their first weights "
        "differ between two devices and one.",
    )
    for clause in ("F-DP-005", "F-TI-001")
)
_LORA = Trial(
    name="auto, finetune_lora",
    command=("python", "-m", "litgpt", "finetune_lora", *_FINETUNE, "--lora_dropout=0.0"),
    options=("--steps", "4"),
    expected=(*_USUAL, _NOT_RESTARTED, *_OTHER_ADAPTERS),
)
# FullyShardedDataParallel, which litgpt takes for two devices, runs on GPUs only.
_ON_CPU = Edit(
    "litgpt/finetune/full.py",
    "fabric = L.Fabric(devices=devices, num_nodes=num_nodes, strategy=strategy, "
    "precision=precision, loggers=logger)",
    instead="fabric = L.Fabric(devices=devices, num_nodes=num_nodes, strategy='ddp', "
    "precision=precision, loggers=logger)",
)
# One device and two draw the same samples in a step only if nothing shuffles them.
_IN_ORDER = (
    _ON_CPU,
    Edit("litgpt/data/json_data.py", "shuffle=True,", instead="shuffle=False,"),
    Edit(
        "litgpt/finetune/full.py",
        'max_steps = train.max_steps or float("inf")',
        add="import entrenar_py\n"
        "obs = entrenar_py.observe(\n"
        "    model, optimizer.optimizer, sampler=train_dataloader, frozen=()\n"
        ")",
    ),
    Edit(
        "litgpt/finetune/full.py",
        "loss = chunked_cross_entropy(logits[..., :-1, :], targets[..., 1:])",
        add="obs.loss(loss, (targets[..., 1:] != -100).sum())",
    ),
)
_MEAN_OF_MEANS = tuple(
    defect(
        clause=clause,
        words=words,
        because="The loss of each micro-batch is divided by its own number of tokens, then by the "
        "number of micro-batches. So tokens of short samples count more than those of long ones, "
        "and what is learned depends on the sizes of micro-batches and on the number of devices.",
        reproduction="litgpt_mean_of_means.py",
        known="https://github.com/Lightning-AI/pytorch-lightning/issues/20350",
    )
    for clause, words in (
        ("F-DP-005", "averaged gradient is not the single device's"),
        ("F-TI-001", "which could mean: a mean of means"),
    )
)
_UNEVEN = replace(_MEAN_OF_MEANS[0], clause="F-LM-005", words="each loss is the mean over its own")
_FULL = Trial(
    name="line, finetune_full, in order",
    command=(
        *("python", "-m", "litgpt", "finetune_full", *_FINETUNE),
        *("--train.max_steps={steps}", "--train.save_interval=2", "--resume=auto"),
    ),
    edits=_IN_ORDER,
    options=("--steps", "4"),
    expected=(STEPS_AT_NAN, _NOT_RESTARTED, *_MEAN_OF_MEANS),
)
_TO_THE_END = Trial(
    name="auto, finetune_lora to the end",
    command=(*_LORA.command, "--train.epochs=1"),
    options=("--steps", "100", "--only", "F-DP-001", "--deadline", "240"),
    contracts=("distributed-training-v1.yaml",),
    expected=(
        defect(
            clause="F-DP-001",
            verdict="inconclusive",
            words="not finished after 240 s: steps made: rank 0 4",
            because="After the last epoch only rank 0 generates an example. The model is "
            "sharded, so all ranks would have to take part, but the others continue "
            "and count tokens. So each training on several devices that ends by its "
            "epochs or its time limit hangs after the last step, before it has saved "
            "anything.",
            reproduction="litgpt_example_on_one_rank.py",
            known="https://github.com/Lightning-AI/litgpt/pull/2213",
        ),
    ),
)

RECIPES = (
    Recipe(
        name="litgpt",
        title="LitGPT",
        repository="Lightning-AI/litgpt",
        commit="26857050fe3ff627cd714fe92f5838f51a3d5efa",
        needs=("lightning", "jsonargparse", "tokenizers"),
        data=checkpoint,
        trials=(
            _LORA,
            _TO_THE_END,
            _FULL,
            of_tokens(_LORA, *IN_PIECES, _UNEVEN),
            of_tokens(_FULL, _UNEVEN),
        ),
    ),
)
