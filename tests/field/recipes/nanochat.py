"""karpathy/nanochat: `scripts.base_train`, on the CPU as runs/runcpu.sh, and on GPUs."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.field.recipe import Recipe, Trial, by_design, default, defect, of_tokens, on_gpus
from tests.field.usual import STEPS_AT_NAN

_COMMAND = (
    *("torchrun", "--standalone", "--nproc_per_node={world_size}", "-m", "scripts.base_train"),
    *("--depth=2", "--aspect-ratio=16", "--head-dim=16", "--window-pattern=L"),
    *("--max-seq-len=32", "--device-batch-size=4", "--total-batch-size=256"),
    *("--eval-every=-1", "--core-metric-every=-1", "--sample-every=-1", "--num-iterations={steps}"),
    *("--save-every=2", "{resume:--resume-from-step=2}"),
)


def corpus(folder: Path) -> None:
    """Write shards of random words, and train the tokenizer on them, as the README says."""
    import pyarrow
    from pyarrow import parquet

    home = folder / "base/base_data_climbmix"
    home.mkdir(parents=True)
    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcdefghij", k=drawn.randint(2, 6))) for _ in range(80)]
    for shard in range(3):
        texts = [" ".join(drawn.choices(words, k=drawn.randint(5, 40))) for _ in range(4000)]
        table = pyarrow.table({"text": texts})
        parquet.write_table(table, home / f"shard_{shard:05d}.parquet", row_group_size=500)
    options = ("--max-chars=200000", "--vocab-size=320")
    subprocess.run(
        [sys.executable, "-m", "scripts.tok_train", *options],
        cwd=folder,
        env={"NANOCHAT_BASE_DIR": "base"},
        check=True,
        capture_output=True,
    )


_APART = defect(
    clause="F-DP-001",
    words="each rank applied the gradient of its own samples alone",
    because="Under torchrun on CPUs the script creates no process group, but still "
    "divides data and accumulation by the number of ranks. So two separate "
    "trainings run, each on half of every batch, and only the first one's "
    "weights are saved, without a warning.",
    reproduction="nanochat_cpu_ranks.py",
    known="https://github.com/karpathy/nanochat/pull/256",
)
_OTHER_SAMPLES = by_design(
    clause="F-DP-002",
    words="rows in step 0 with 1 workers than",
    because="Each rank packs its own documents into rows, so the rows depend on the "
    "number of ranks.",
)
_REDUCED_INSIDE = by_design(
    clause="F-DP-005",
    words="reduces them itself",
    because="The optimizer gets each rank's own gradient, and takes the mean over "
    "ranks in its step. This mean can't be observed, and the rule of the step "
    "(Muon) is not one that entrenar-check knows.",
)
_RESUMED = default(
    clause="F-TI-003",
    words="samples are drawn",
    because="The saved state of the loader has its position in the shards, but not the "
    "documents that wait in it for a row with enough space. Its own "
    "description says that a resume is approximate.",
    reproduction="nanochat_resumes_other_rows.py",
)
_ON_CPUS = (
    _APART,
    replace(_APART, clause="F-TI-002"),
    replace(_APART, clause="F-DP-005", words="averaged gradient is not the single device's"),
    replace(_APART, clause="F-TI-001", words="averaged gradient is not the single device's"),
    _OTHER_SAMPLES,
    STEPS_AT_NAN,
    _RESUMED,
)
_ON_GPUS = (
    _OTHER_SAMPLES,
    _REDUCED_INSIDE,
    replace(_REDUCED_INSIDE, clause="F-TI-001"),
    STEPS_AT_NAN,
    _RESUMED,
)
_AUTO = Trial(name="auto", command=_COMMAND, options=("--steps", "4"), expected=_ON_CPUS)

RECIPES = (
    Recipe(
        name="nanochat",
        title="nanochat, scripts.base_train",
        repository="karpathy/nanochat",
        commit="92d63d4e8bb4df75c3b71618f31ddde2378b2bcd",
        needs=("rustbpe", "tiktoken", "pyarrow", "filelock", "requests", "wandb"),
        environment={"NANOCHAT_BASE_DIR": "base", "TORCHDYNAMO_DISABLE": "1"},
        data=corpus,
        trials=(_AUTO, of_tokens(_AUTO), on_gpus(_AUTO, 2, expected=_ON_GPUS)),
    ),
)
