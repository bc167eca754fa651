"""Measurements of a reduction whose terms are known (workload `vectors`): error and traffic."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from entrenar_py.shared import trace
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.arithmetic.workload import GivenVectors
from entrenar_py.train.wire_io.endpoints import CoordinatorEnd, Meter, WorkerEnd
from entrenar_py.train.wire_io.peer_ends import MeshEnd

PIECE = 2**20  # elements that are recomputed at a time
UNIT_ROUNDOFF = 2.0**-24


def reduced(
    step: int, rank: int, mean: Array, model: GivenVectors, ids: sharding.Ids
) -> trace.Reduced:
    """Return how far the `mean` on `rank` is from the mean of samples `ids` in float64.

    `error` is the largest absolute difference. `roundings` is the largest difference relative to
    the mean of the terms' absolute values, in units of 2^-24, and `element` the index where it is.
    See docs/numerics.md.
    """
    vectors = [model.pieces(sample) for sample in ids]
    weight = float(model.weight(ids))
    worst, place, error = -1.0, 0, 0.0
    for start in range(0, mean.size, PIECE):
        part = mean[start : start + PIECE].astype(np.float64)
        exact, size = np.zeros(part.size), np.zeros(part.size)  # float64
        for vector in vectors:
            term = vector(part.size)
            exact += term
            size += np.abs(term)
        with np.errstate(invalid="ignore", divide="ignore"):
            gap = np.abs(part * weight - exact)
            off = np.where(gap == 0, 0.0, gap / (size * UNIT_ROUNDOFF))
        off[np.isnan(off)] = np.inf  # the mean is NaN
        error = max(error, float(np.nan_to_num(gap, nan=np.inf).max()) / weight)
        if off.max() > worst:
            worst, place = float(off.max()), start + int(off.argmax())
    return trace.Reduced(
        step=step,
        rank=rank,
        num_elements=mean.size,
        roundings=worst,
        element=place,
        error=error,
    )


def traffic(end: CoordinatorEnd | WorkerEnd, rank: int | None) -> Iterator[trace.Traffic]:
    """Yield the traffic of `rank` (None: of the coordinator), by direction and message."""
    yield from _rows(end.meter, rank, "coordinator" if rank is not None else "worker")
    if isinstance(end, MeshEnd):
        yield from _rows(end.links_meter, rank, "worker")


def _rows(meter: Meter, rank: int | None, peer: str) -> Iterator[trace.Traffic]:
    for direction, counts in (("sent", meter.sent), ("got", meter.got)):
        for message, count in counts.items():
            yield trace.Traffic(
                rank=rank,
                peer=peer,
                direction=direction,
                message=message,
                messages=count.messages,
                payload_bytes=count.payload_bytes,
                bytes=count.bytes,
            )
