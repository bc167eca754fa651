"""torch's `all_gather` with a backward pass, by gloo."""

from __future__ import annotations

from dataclasses import replace

from tests.field.recipe import Recipe, Trial, defect

_SHUFFLED = defect(
    clause="F-DP-005",
    verdict="inconclusive",
    words="no combination of the micro-batches' gradients",
    because="The backward pass of `all_gather` passes gradients to gloo in their "
    "memory order. So the gradient of a transposed tensor comes back with its "
    "elements in a different order, without a warning. The verdict is "
    "inconclusive since a loss over the whole batch may have different "
    "gradients on one worker.",
    reproduction="all_gather_transposed.py",
    known="https://github.com/pytorch/pytorch/issues/192920",
)
_LAUNCH = ("torchrun", "--standalone", "--nproc_per_node={world_size}")
_AUTO = Trial(
    name="auto",
    command=(*_LAUNCH, "gathered_features.py", "--batch", "{share:16}"),
    options=("--only", "F-DP-005,F-TI-001", "--steps", "4"),
    expected=(_SHUFFLED, replace(_SHUFFLED, clause="F-TI-001")),
)

RECIPES = (
    Recipe(
        name="torch-gather",
        title="torch.distributed.nn.functional.all_gather, gloo",
        driver="gathered_features.py",
        trials=(
            _AUTO,
            replace(
                _AUTO,
                name="auto, made contiguous",
                command=(*_AUTO.command, "--contiguous"),
                expected=(),
            ),
        ),
    ),
)
