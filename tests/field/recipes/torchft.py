"""pytorch/torchft: `train_ddp.py`, with its lighthouse and two replica groups of one process."""

from __future__ import annotations

from tests.field.recipe import Edit, Recipe, Trial, default, defect, undeclared
from tests.field.usual import STEPS_AT_NAN

_COMMAND = ("python", "torchft_launch.py", "{world_size}", "{steps}")
_SMALL = (
    # In place of a download, and of a layer of 1 GB that is to slow it down.
    Edit(
        "train_ddp.py",
        "trainset = torchvision.datasets.CIFAR10(",
        instead="trainset = torchvision.datasets.FakeData(",
    ),
    Edit(
        "train_ddp.py",
        'root="./cifar", train=True, download=True, transform=transform',
        instead="size=1024, image_size=(3, 32, 32), num_classes=10, transform=transform",
    ),
    Edit(
        "train_ddp.py",
        "if manager.current_step() >= 10000:",
        instead='if manager.current_step() >= int(os.environ["STEPS"]):',
    ),
    Edit("train_ddp.py", "target_size = 1_000_000_000", instead="target_size = 1_000"),
)

_SEED = Edit(
    "train_ddp.py",
    'NUM_REPLICA_GROUPS = int(os.environ.get("NUM_REPLICA_GROUPS", 2))',
    add="torch.manual_seed(0)",
)
_BEGINS_APART = tuple(
    default(
        clause=clause,
        words=words,
        because="The script sets no seed. By default (`init_sync`) each replica group "
        "begins with its own weights, computes a gradient with them, and gets the "
        "weights of one group in step 0.",
        reproduction="torchft_first_step.py",
        known="https://github.com/meta-pytorch/torchft/pull/112",
    )
    for clause, words in (
        ("F-DP-001", "hold different weights"),
        ("F-TI-005", "rank 1 starts from"),
        ("F-DP-005", "weights before the first step are not the single device's"),
        ("F-TI-001", "weights before the first step are not the single device's"),
    )
)
_HALF_A_STEP = tuple(
    defect(
        clause=clause,
        words="averaged gradient is not the single device's",
        because="In step 0 a group that gets its weights from another adds zeros instead "
        "of its gradient, but is counted in the mean. With two groups the gradient "
        "is half of one group's, and the other's samples are lost. From step 1 on "
        "it is the mean of both.",
        reproduction="torchft_first_step.py",
        known="https://github.com/meta-pytorch/torchft/pull/112",
    )
    for clause in ("F-DP-005", "F-TI-001")
)
_SAME_ORDER = defect(
    clause="F-TI-005",
    words="epoch 1 visits its samples in the order of epoch 0",
    because="The script shuffles with a sampler, but never calls its `set_epoch`.",
    reproduction="torchft_same_order.py",
)
_OTHER_SAMPLES = undeclared(
    clause="F-DP-006",
    words="the script seeds nothing",
    because="The script sets no seed, so samples after a kill may differ by chance. "
    "Here it is not chance: the step in which a group is killed is not made, "
    "the other group continues with its next samples, and the restarted group "
    "begins its data again.",
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
                expected=(*_BEGINS_APART, STEPS_AT_NAN, _OTHER_SAMPLES),
            ),
            # With the same weights in all groups, what comes after them shows.
            Trial(
                name="auto, seeded",
                command=(*_COMMAND, "train_ddp.py"),
                edits=(*_SMALL, _SEED),
                options=("--steps", "4", "--only", "F-DP-005,F-TI-001,F-TI-005"),
                expected=(*_HALF_A_STEP, _SAME_ORDER),
            ),
        ),
    ),
)
