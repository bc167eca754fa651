"""Sparse gradients under torch's DistributedDataParallel."""

from __future__ import annotations

from tests.field.recipe import Recipe, Trial, defect
from tests.field.usual import STEPS_AT_NAN

_LAUNCH = ("torchrun", "--standalone", "--nproc_per_node={world_size}")
_IN_PLACE = tuple(
    defect(
        clause=clause,
        words="half as large",
        because="The gradient of `Embedding(sparse=True)` shares its memory with that of "
        "the layer's output. DistributedDataParallel divides it in place by the "
        "number of ranks. If the output was added to that of an `EmbeddingBag`, "
        "the bag's gradient is computed next from the same memory. So it is "
        "divided twice, without a warning.",
        reproduction="ddp_sparse_in_place.py",
    )
    for clause in ("F-DP-005", "F-TI-001")
)

RECIPES = (
    Recipe(
        name="torch-sparse-ddp",
        title="DistributedDataParallel, tables with sparse gradients",
        driver="sparse_ddp.py",
        trials=(
            Trial(
                name="auto",
                command=(*_LAUNCH, "sparse_ddp.py", "--batch", "{share:16}"),
                expected=(*_IN_PLACE, STEPS_AT_NAN),
            ),
        ),
    ),
)
