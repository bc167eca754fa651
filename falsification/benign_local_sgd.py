"""Correct variants of local SGD's outer step: no check may report any of these."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from entrenar_py.shared.mutants import Variant
from entrenar_py.systems.torch import local_sgd
from entrenar_py.systems.torch.local_sgd import Worker

from .local_sgd import LOCAL, local

_average, _outer_step = local_sgd.average, local_sgd.outer_step


def inner_weights(worker: Worker) -> list[Tensor]:
    """Returns this worker's weights, for `from_mean_weights`, not their difference."""
    return [one.detach() for one in worker.trained.values()]


def from_mean_weights(worker: Worker, mean: Sequence[Tensor]) -> None:
    """Steps by the difference from the mean weights, which equals the mean difference."""
    pairs = zip(worker.outer.values(), mean, strict=True)
    _outer_step(worker, [outer - one for outer, one in pairs])


def one_by_one(tensors: Sequence[Tensor], worker: Worker) -> list[Tensor] | None:
    """Averages each tensor by its own all-reduce."""
    found = []
    for one in tensors:
        mean = _average([one], worker)
        if mean is None:
            return None
        found += mean
    return found


_TRIED = ("F-LS-001", "F-LS-002", "F-LS-003", "F-LS-005", "F-LS-006", "F-LS-007")

VARIANTS = (
    Variant(
        name="weights-averaged",
        summary="weights are averaged instead of their differences; the run is stopped in a round",
        plants={
            f"{LOCAL}.pseudo_gradient": inner_weights,
            f"{LOCAL}.outer_step": from_mean_weights,
        },
        scenario=local(stops=(3,)),
        tried=(*_TRIED, "F-LS-008"),
    ),
    Variant(
        name="rounds-in-buckets",
        summary="each tensor is averaged by a separate all-reduce; rounds of three steps",
        plants={f"{LOCAL}.average": one_by_one},
        scenario=local(
            options={"inner_steps": 3, "outer_learning_rate": 0.5}, accumulation=2, clip_norm=0.05
        ),
        tried=_TRIED,
    ),
)
