"""huggingface/picotron: `train.py` on its template configuration, made tiny, with two ranks."""

from __future__ import annotations

import random
from pathlib import Path

from tests.field.recipe import Edit, Recipe, Trial, default, defect
from tests.field.usual import STEPS_AT_NAN

# `use_cpu` is an option of the configuration, and this line was forgotten.
_ON_CPU = (
    Edit(
        "picotron/utils.py",
        "param_counts = torch.tensor(local_num_params, device='cuda')",
        instead="param_counts = torch.tensor(local_num_params)",
    ),
)
_COMMAND = ("python", "picotron_launch.py", "{world_size}", "{steps}", "{workdir}")


def llama(folder: Path) -> None:
    """Write a tiny Llama with tokenizer, and stories, where picotron looks for downloads.

    flash_attn is imported in any case, and called on GPUs only: empty modules stand for it.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [f"w{index}" for index in range(63)]
    vocabulary = {word: index for index, word in enumerate(("<unk>", *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.save_pretrained(folder / "tiny-llama")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config.save_pretrained(folder / "tiny-llama")
    config.save_pretrained(folder / "hf_model/tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder / "hf_model_safetensors")
    drawn = random.Random(0)
    stories = [" ".join(drawn.choices(words, k=drawn.randint(10, 60))) for _ in range(120)]
    (folder / "tiny-stories").mkdir()
    Dataset.from_dict({"text": stories}).to_parquet(folder / "tiny-stories/train.parquet")
    for path, name in (
        ("flash_attn_interface", "flash_attn_func"),
        ("layers/rotary", "apply_rotary_emb"),
        ("ops/triton/layer_norm", "layer_norm_fn"),
    ):
        file = folder / "flash_attn" / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{name} = None\n")


_STARTS_OVER = defect(
    clause="F-TI-003",
    words="the data starts over",
    because="A checkpoint has weights, optimizer state and counters, but not the "
    "position in the data. After a resume, training begins with the first "
    "batch again.",
    reproduction="picotron_resume.py",
)
_PADDED = default(
    clause="F-DP-002",
    words="samples drawn again in epoch 0 by rank 1: [0]",
    because="The stories make an odd number of blocks, which two ranks can't share evenly. torch's "
    "`DistributedSampler` gives the last rank the first block again, by default.",
    reproduction="distributed_sampler_pads.py",
)
RECIPES = (
    Recipe(
        name="picotron",
        title="picotron, data parallel",
        repository="huggingface/picotron",
        commit="59714b1bf25541dbeb6f5a721ed15f6d0768e786",
        driver="picotron_launch.py",
        needs=("transformers", "datasets", "wandb"),
        environment={"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": "datasets-cache"},
        data=llama,
        trials=(
            Trial(
                name="auto",
                command=(*_COMMAND, "{share:8}", "1"),
                edits=_ON_CPU,
                options=("--steps", "6"),
                expected=(STEPS_AT_NAN, _STARTS_OVER, _PADDED),
            ),
            Trial(
                name="auto, micro-batches",
                command=(*_COMMAND, "{share:8}", "{accumulation}"),
                edits=_ON_CPU,
                options=("--only", "F-DP-001,F-DP-002,F-DP-005,F-TI-001", "--steps", "4"),
                expected=(_PADDED,),
            ),
        ),
    ),
)
