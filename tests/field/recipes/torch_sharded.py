"""pytorch/examples: FSDP2, and tensor and sequence parallelism by DTensor."""

from __future__ import annotations

from dataclasses import replace

from tests.field.recipe import Edit, Expected, Recipe, Trial, by_design, defect, on_gpus, undeclared
from tests.field.recipes.torch_ddp_tutorial import COMMIT, EXAMPLES
from tests.field.usual import STEPS_AT_NAN

_LAUNCH = ("torchrun", "--standalone", "--nproc_per_node={world_size}")
_ON_CPU = (Edit("log_utils.py", "return has_gpu and gpu_count >= min_gpus", instead="return True"),)


_NOT_CLEARED = defect(
    clause="F-TI-001",
    words="not cleared since step 0",
    because="The loop never calls `zero_grad`, so each step applies the sum of all "
    "gradients so far.",
    reproduction="gradients_pile_up.py",
    known="https://github.com/pytorch/examples/pull/1424",
)
_NEEDS_TWO = by_design(
    clause="F-DP-002",
    words="AssertionError: TP examples require even number of GPUs",
    because="The script insists on an even number of workers, so there is no run on one.",
)
_TP = (
    STEPS_AT_NAN,
    _NOT_CLEARED,
    _NEEDS_TWO,
    replace(_NEEDS_TWO, clause="F-DP-005"),
    replace(_NEEDS_TWO, clause="F-TI-005"),
)
_SP = (
    STEPS_AT_NAN,
    _NOT_CLEARED,
    undeclared(
        clause="F-DP-002",
        words="share the work on a batch and are given different rows in step 0",
        because="Each rank draws its own rows, and only `obs.samples` can show whether "
        "they are parts of one batch. Also, the script sets no seed, so two runs "
        "draw different inputs.",
    ),
)


def _on_cpu(file: str) -> tuple[Edit, ...]:
    line = "device_type = torch.accelerator.current_accelerator().type"
    return (*_ON_CPU, Edit(file, line, instead="device_type = 'cpu'"))


def _parallel(name: str, title: str, file: str, expected: tuple[Expected, ...]) -> Recipe:
    auto = Trial(
        name="auto",
        command=(*_LAUNCH, file),
        edits=_on_cpu(file),
        options=("--steps", "4"),
        expected=expected,
    )
    return Recipe(
        name=name,
        title=title,
        repository=EXAMPLES,
        commit=COMMIT,
        folder="distributed/tensor_parallelism",
        trials=(auto, on_gpus(auto, 2)),
    )


_FSDP2 = Trial(
    name="auto",
    command=(*_LAUNCH, "example.py"),
    edits=(
        Edit("example.py", "return has_gpu and gpu_count >= min_gpus", instead="return True"),
        Edit(
            "example.py",
            "torch.distributed.init_process_group(backend=backend, device_id=device)",
            instead="torch.distributed.init_process_group(backend=backend)",
        ),
    ),
    # The others would compare what the memory happened to hold.
    options=("--steps", "4", "--only", "F-DP-002,F-DP-003,F-TI-005"),
    expected=(
        replace(
            STEPS_AT_NAN,
            verdict="falsified",
            because="With these uninitialised weights, gradients are not finite in the first "
            "step, and neither `clip_grad_norm_` nor the optimizer stops.",
        ),
        defect(
            clause="F-DP-002",
            words="are given the same rows in every step",
            because="All ranks set the same seed, and then each draws its batch. So all ranks "
            "train on the same samples, and several GPUs learn what one would.",
            reproduction="same_data_by_one_seed.py",
        ),
        defect(
            clause="F-TI-005",
            words="weights are not finite from step 0 on",
            because="`to_empty` allocates memory without initialising it, and then "
            "`Transformer.reset_parameters` omits the layers. In this run new memory "
            "is filled with large numbers; NaN and zeros were also seen in it.",
            reproduction="fsdp2_uninitialised.py",
        ),
    ),
)
# What the memory of a GPU holds is nobody's to fill: there F-TI-005 depends on it, too.
_FSDP2_ON_GPUS = on_gpus(
    _FSDP2,
    2,
    options=("--steps", "4", "--only", "F-DP-002,F-DP-003"),
    expected=tuple(one for one in _FSDP2.expected if one.clause != "F-TI-005"),
)
RECIPES = (
    Recipe(
        name="torch-fsdp2",
        title="FSDP2",
        repository=EXAMPLES,
        commit=COMMIT,
        folder="distributed/FSDP2",
        # glibc fills new memory with 2.7e23, so that each run finds the same in it.
        environment={"MALLOC_PERTURB_": "153", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"},
        trials=(_FSDP2, _FSDP2_ON_GPUS),
    ),
    _parallel("torch-tp", "tensor parallelism", "tensor_parallel_example.py", _TP),
    _parallel("torch-sp", "sequence parallelism", "sequence_parallel_example.py", _SP),
)
