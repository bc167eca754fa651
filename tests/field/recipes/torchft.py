"""pytorch/torchft: `train_ddp.py`, with its lighthouse and two replica groups of one process."""

from __future__ import annotations

from dataclasses import replace

from tests.field.recipe import Edit, Expected, Kind, Recipe, Trial
from tests.field.usual import STEPS_AT_NAN, UNSEEDED

_COMMAND = ("python", "torchft_launch.py", "{world_size}", "{steps}")
_SMALL = (
    # In place of a download, and of a layer of 1 GB that is to slow it down.
    Edit(
        file="train_ddp.py",
        line="trainset = torchvision.datasets.CIFAR10(",
        instead="trainset = torchvision.datasets.FakeData(",
    ),
    Edit(
        file="train_ddp.py",
        line='root="./cifar", train=True, download=True, transform=transform',
        instead="size=1024, image_size=(3, 32, 32), num_classes=10, transform=transform",
    ),
    Edit(
        file="train_ddp.py",
        line="if manager.current_step() >= 10000:",
        instead='if manager.current_step() >= int(os.environ["STEPS"]):',
    ),
    Edit(
        file="train_ddp.py",
        line="target_size = 1_000_000_000",
        instead="target_size = 1_000",
    ),
)

_BEGINS_APART = tuple(
    Expected(
        clause=clause,
        verdict="falsified",
        kind=Kind.DEFAULT,
        words=words,
        because="The script sets no seed. By default (`init_sync`) each replica group begins with "
        "weights of its own, computes a gradient of them, and gets those of one group in step 0.",
        reproduction="torchft_first_step.py",
        known="https://github.com/meta-pytorch/torchft/pull/112",
    )
    for clause, words in (
        ("F-DP-001", "hold different weights"),
        ("F-TI-005", "starts from other weights than rank 0"),
    )
)
_HALF_A_STEP = Expected(
    clause="F-TI-001",
    verdict="inconclusive",
    kind=Kind.DEFECT,
    words="that of rank 0's own samples alone",
    because="In step 0 a group that gets its weights from another adds zeros in place of its "
    "gradient, but counts in the mean. With two groups the gradient is half of one group's, and "
    "the other's samples are lost.",
    reproduction="torchft_first_step.py",
    known="https://github.com/meta-pytorch/torchft/pull/112",
)
_NOT_SEEDED = Expected(
    clause="F-DP-005",
    verdict="inconclusive",
    kind=Kind.UNDECLARED,
    words="two plain runs of the command differ",
    because="The script sets no seed.",
)
RECIPES = (
    Recipe(
        name="torchft",
        title="torchft, train_ddp.py",
        repository="pytorch/torchft",
        commit="73dafea422116b2a713542719c8454efe5444c6c",
        paths=("train_ddp.py",),
        driver="torchft_launch.py",
        # For slow machines, which take longer to come back than the script waits.
        environment={"TORCHFT_QUORUM_TIMEOUT_SEC": "200", "TORCHFT_TIMEOUT_SEC": "200"},
        needs=("torchft-nightly", "torchvision", "torchdata"),
        trials=(
            Trial(
                name="auto",
                command=(*_COMMAND, "train_ddp.py"),
                edits=_SMALL,
                options=("--steps", "4"),
                expected=(
                    *_BEGINS_APART,
                    STEPS_AT_NAN,
                    _NOT_SEEDED,
                    _HALF_A_STEP,
                    UNSEEDED,
                    replace(UNSEEDED, clause="F-DP-006", words="begin with other weights"),
                ),
            ),
        ),
    ),
)
