"""karpathy/nanoGPT: `train.py` by its README's command for a CPU, with two ranks."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from pathlib import Path

from tests.field.recipe import Edit, Recipe, Trial, by_design, defect, of_tokens, on_gpus
from tests.field.usual import STEPS_AT_NAN

# With torchrun the script insists on GPUs.
_ON_CPU = (
    Edit("train.py", "device = f'cuda:{ddp_local_rank}'", instead="device = 'cpu'"),
    Edit("train.py", "torch.cuda.set_device(device)", instead="pass"),
    Edit(
        "train.py", "model = DDP(model, device_ids=[ddp_local_rank])", instead="model = DDP(model)"
    ),
)
_COMMAND = (
    *("torchrun", "--standalone", "--nproc_per_node={world_size}", "train.py"),
    *("config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--backend=gloo"),
    *("--eval_iters=1", "--log_interval=1", "--block_size=16", "--batch_size=4", "--dropout=0.0"),
    *("--n_layer=2", "--n_head=2", "--n_embd=16", "--gradient_accumulation_steps=2"),
    "--warmup_iters=2",
)
# A checkpoint at the begin of each iteration but the first; the script makes max_iters + 1 of them.
_RESUMED = " ".join(
    (
        *_COMMAND,
        *("--max_iters={steps}", "--eval_interval=1", "--always_save_checkpoint=True"),
        *("--out_dir={workdir}", "--init_from=$(test -e {workdir}/ckpt.pt && echo resume"),
        "|| echo scratch)",
    )
)
_LINE = (
    Edit(
        "train.py",
        "ix = torch.randint(len(data) - block_size, (batch_size,))",
        add="get_batch.ids = ix.tolist()",
    ),
    Edit(
        "train.py",
        "raw_model = model.module if ddp else model # unwrap DDP container if needed",
        add="import entrenar_py\n"
        "tied = (('transformer.wte.weight', 'lm_head.weight'),)\n"
        "obs = entrenar_py.observe(\n"
        "    model, optimizer, step=iter_num, frozen=(), tied=tied, clip_norm=grad_clip\n"
        ")\n"
        "ids = get_batch.ids",
    ),
    Edit(
        "train.py",
        "loss = loss / gradient_accumulation_steps # scale the loss to account for "
        "gradient accumulation",
        add="obs.samples(ids, replacement=True)\n"
        "obs.loss(loss * gradient_accumulation_steps, Y.numel())",
    ),
    Edit("train.py", "X, Y = get_batch('train')", add="ids = get_batch.ids"),
)
_SEEDED_BY_RANK = by_design(
    clause="F-DP-005",
    words="workers: draw each batch for all workers",
    because="Each rank draws positions in the text with its own seed, so one worker "
    "draws different ones.",
)
_DATA_OVER = defect(
    clause="F-TI-003",
    verdict="inconclusive",
    words="(those of step 0 again)",
    because="`init_from=resume` sets the initial seed again, and the checkpoint has no generator's "
    "state. So each resumed run trains on the first batches again, in the same order. The verdict "
    "is inconclusive since batches are drawn with replacement, so others might be intended.",
    reproduction="nanogpt_data_over.py",
    known="https://github.com/karpathy/nanoGPT/issues/467",
)


def tokens(folder: Path) -> None:
    """Write what data/shakespeare_char/prepare.py makes: tokens of 16 bits, and the alphabet."""
    import numpy as np

    alphabet = "\n abcdefghijklmnopqrstuvwxyz"
    drawn = random.Random(0).choices(range(len(alphabet)), k=3000)
    home = folder / "data/shakespeare_char"
    np.array(drawn[:2500], dtype=np.uint16).tofile(home / "train.bin")
    np.array(drawn[2500:], dtype=np.uint16).tofile(home / "val.bin")
    itos = dict(enumerate(alphabet))
    meta = {"vocab_size": len(alphabet), "itos": itos, "stoi": {c: i for i, c in itos.items()}}
    (home / "meta.pkl").write_bytes(pickle.dumps(meta))


_BEGUN_ANEW = replace(
    _DATA_OVER,
    verdict="falsified",
    words="the data starts over",
    because="`init_from=resume` sets the initial seed again, and the checkpoint has no generator's "
    "state. So each resumed run trains on the first batches again, in the same order.",
)
_SAVED = ("--eval_interval=2", "--always_save_checkpoint=True", "{resume:--init_from=resume}")
_AUTO = Trial(
    name="auto",
    command=(*_COMMAND, *_SAVED),
    edits=_ON_CPU,
    options=("--steps", "4"),
    expected=(STEPS_AT_NAN, _BEGUN_ANEW),
)
_BY_THE_LINE = Trial(
    name="line",
    command=("sh", "-c", _RESUMED),
    edits=(*_ON_CPU, *_LINE),
    options=("--steps", "4"),
    expected=(
        STEPS_AT_NAN,
        _SEEDED_BY_RANK,
        replace(_SEEDED_BY_RANK, clause="F-TI-001"),
        _DATA_OVER,
    ),
)

RECIPES = (
    Recipe(
        name="nanogpt",
        title="nanoGPT, train.py",
        repository="karpathy/nanoGPT",
        commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        data=tokens,
        trials=(
            *(_AUTO, _BY_THE_LINE, of_tokens(_AUTO)),
            *(on_gpus(_AUTO, 2), on_gpus(_BY_THE_LINE, 2, edits=_LINE)),
        ),
    ),
)
