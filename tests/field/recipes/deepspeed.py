"""DeepSpeed's engine at stages 0 to 3 of ZeRO, by a short driver as its documentation has it."""

from __future__ import annotations

from tests.field.recipe import Expected, Recipe, Trial, default
from tests.field.usual import STEPS_AT_NAN

_NO_RATE = default(
    clause="F-TI-004",
    verdict="inconclusive",
    words="with a rate above 0",
    because="DeepSpeed's WarmupLR gives the first two of the four steps the rate 0.",
    reproduction="deepspeed_warmup_begins_twice.py",
    known="https://github.com/deepspeedai/DeepSpeed/pull/5287",
)


def _command(stage: int, *options: str) -> tuple[str, ...]:
    launcher = ("torchrun", "--standalone", "--nproc_per_node={world_size}")
    return (*launcher, "deepspeed_zero.py", "--stage", str(stage), *options)


def _zero(stage: int, expected: tuple[Expected, ...], *more: Trial) -> Recipe:
    return Recipe(
        name=f"deepspeed-zero-{stage}",
        title=f"DeepSpeed's engine, ZeRO stage {stage}",
        driver="deepspeed_zero.py",
        needs=("deepspeed",),
        environment={"DS_ACCELERATOR": "cpu"},
        trials=(
            Trial(
                name="auto",
                command=_command(stage, "--dir", "out"),
                options=("--steps", "4"),
                expected=expected,
            ),
            *more,
        ),
    )


_DATA_OVER = default(
    clause="F-TI-003",
    words="the data starts over",
    because="DeepSpeed's checkpoints don't store the position of the DataLoader that "
    "`initialize` returns. So a resumed epoch begins again.",
    reproduction="deepspeed_resumes_data_over.py",
)
_RATE_AHEAD = default(
    clause="F-TI-003",
    words="learning rate, 0.005 and not 0",
    because="WarmupLR gives the first two steps the learning rate 0. A run that is "
    "resumed after the first step continues with the rate of the third.",
    reproduction="deepspeed_warmup_begins_twice.py",
    known="https://github.com/deepspeedai/DeepSpeed/pull/5287",
)
_SAME_ORDER = default(
    clause="F-TI-005",
    words="epoch 1 visits its samples in the order of epoch 0",
    because="DeepSpeed's loader creates a DistributedSampler, but leaves the call of "
    "`set_epoch` to the script: without it every epoch has the same order.",
    reproduction="deepspeed_same_order.py",
    known="https://github.com/deepspeedai/DeepSpeed/issues/1106",
)
_RESUMED = Trial(
    name="auto, resumed within an epoch",
    command=_command(0, "--steps", "{steps}", "--dir", "{workdir}"),
    options=("--only", "F-TI-003"),
    contracts=("training-integrity-v1.yaml",),
    expected=(_DATA_OVER,),
)
RECIPES = (
    _zero(0, (STEPS_AT_NAN, _NO_RATE, _RATE_AHEAD, _SAME_ORDER), _RESUMED),
    *(_zero(stage, (_NO_RATE, _RATE_AHEAD, _SAME_ORDER)) for stage in (1, 2, 3)),
)
