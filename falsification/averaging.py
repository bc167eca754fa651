"""Bugs in the averages for workers of the original system, and in the reading of its frames."""

from __future__ import annotations

from collections.abc import Sequence

from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic.reduction import Vector, weighted_mean
from entrenar_py.train.upstream import frames
from entrenar_py.train.upstream.averager import Averager, AveragingWorker
from entrenar_py.train.upstream.frames import Decoder, Part, Upload, part_of
from entrenar_py.train.upstream.server import AveragingEnd
from entrenar_py.train.wire.effects import Effect, Peer

MACHINE = "entrenar_py.train.upstream"
END = "entrenar_py.train.upstream.server"
_average = AveragingEnd._average
_drop = Averager._drop
_end_length, _is_due = Decoder._end_length, AveragingWorker.is_due
_ALLOCATED_BYTES_MAX = 2**26


def unweighted(vectors: Sequence[Vector], weights: Sequence[int]) -> Vector:
    """Averages over workers instead of samples."""
    return weighted_mean(vectors, [1] * len(weights))


def as_they_came(self: AveragingEnd, step: int, part: Part, weights: tuple[int, ...]) -> None:
    """Adds gradients in the order in which they arrived."""
    came = list(self._kept[part])
    self._kept[part] = dict(enumerate(self._kept[part].values()))
    _average(self, step, part, tuple(weights[shard] for shard in came))


def of_any_step(self: AveragingWorker, upload: Upload, step: int) -> bool:
    """Takes a gradient of an earlier step for the worker's shard of this one."""
    late = upload.step < step and self.shard is not None and part_of(upload) not in self.extents
    return late or _is_due(self, upload, step)


def all_finite(vector: Vector) -> int | None:
    """Finds every gradient finite."""
    return None


def shard_lost(self: Averager, peer: Peer, reason: str, now: float) -> list[Effect]:
    """Does not assign the shard of a worker that died to another one."""
    worker = self.peers[peer]
    if worker.shard is not None:
        for part in set(worker.extents) - self._requested:
            del self._weights[part][worker.shard]
        worker.extents.clear()
        worker.shard = None
    return _drop(self, peer, reason, now)


def wrapped(self: Decoder, head_end: int, count: int) -> str:
    """Computes the bytes of a vector in 64 bits: 2^62 floats take none."""
    num_bytes = frames.FLOAT_BYTES * count % 2**64
    due = head_end + num_bytes + frames.LAYOUTS[self._kind].rest.size
    return "" if due == self._length else "another length"


def set_aside_first(self: Decoder) -> None:
    """Allocates a frame's length (here: at most 64 MiB) before it compares it with the cap."""
    (length,) = frames.LENGTH.unpack(self._head)
    claimed = bytearray(min(length, _ALLOCATED_BYTES_MAX))
    _end_length(self)
    del claimed


_WIRE = Scenario(system="wire", workload="linear", world_size=1, seed=0)
AVERAGING = Scenario(
    system="averaging",
    workload="linear",
    world_size=3,
    num_shards=3,
    seed=0,
    num_samples=23,
    batch_size=10,
    num_steps=4,
)

VARIANTS = (
    Variant(
        name="average-unweighted",
        summary="an average over workers without the weights of their samples",
        source="the original system (an average of means)",
        plants={f"{END}.weighted_mean": unweighted},
        scenario=AVERAGING,
        invariants=("F-WP-007",),
        place={"step": 0, "tensor": "in order"},
    ),
    Variant(
        name="averaged-as-they-came",
        summary="gradients are added in the order in which they arrive",
        source="classic (an all-reduce of the first to arrive)",
        plants={f"{END}.AveragingEnd._average": as_they_came},
        scenario=AVERAGING,
        invariants=("F-WP-007",),
        place={"step": 0, "tensor": "backwards"},
    ),
    Variant(
        name="late-gradient-averaged",
        summary="a gradient that arrives again after its step counts in the next step",
        source="classic (a stale gradient)",
        plants={f"{MACHINE}.averager.AveragingWorker.is_due": of_any_step},
        scenario=AVERAGING,
        invariants=("F-WP-007",),
        place={"step": 1, "tensor": "every message comes twice"},
    ),
    Variant(
        name="nan-averaged",
        summary="gradients are not tested for NaN before they are averaged",
        source="classic (NaN spreads to all workers)",
        plants={f"{END}.first_not_finite": all_finite},
        scenario=AVERAGING,
        invariants=("F-WP-007",),
        place={"step": 1, "tensor": "a NaN"},
    ),
    Variant(
        name="shard-lost-in-averaging",
        summary="the shard of a worker that dies is never assigned again",
        source="the original system (a read of a dead worker fails the step)",
        plants={f"{MACHINE}.averager.Averager._drop": shard_lost},
        scenario=AVERAGING,
        invariants=("F-WP-007",),
        place={"step": 1, "tensor": "a worker dies"},
    ),
    Variant(
        name="original-count-wraps",
        summary="the bytes of a vector are computed in 64 bits, where 2^62 floats take none",
        source="the original system (length checked after a multiplication that wraps)",
        plants={f"{MACHINE}.frames.Decoder._unfit": wrapped},
        scenario=_WIRE,
        invariants=("F-WP-002",),
        place={"tensor": "original: 2^62 gradients"},
    ),
    Variant(
        name="original-length-uncapped",
        summary="memory is allocated for a frame's length before it is compared with the cap",
        source="classic (length checked after allocation)",
        plants={f"{MACHINE}.frames.Decoder._end_length": set_aside_first},
        scenario=_WIRE,
        invariants=("F-WP-003",),
        place={"tensor": "original: a frame of 4 GiB"},
    ),
)
