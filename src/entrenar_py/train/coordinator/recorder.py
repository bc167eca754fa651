"""The record of one run: its tensors, the workers' events, and the accuracy of reductions.

A tensor is recorded by a digest, or by its values if the plan says so. Digests of large tensors are
computed in several threads, each tensor in one thread, so the digests don't depend on the number of
threads. Events from workers are untrusted: each message may carry only certain types of events,
which must have the worker's own rank and the message's step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.shared import patience, process, trace
from entrenar_py.shared.errors import ProtocolError, TraceError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.train.arithmetic import reduction, sharding
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.arithmetic.workload import GivenVectors
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import (
    Applied,
    Computed,
    Loaded,
    Message,
    NonFinite,
    Summed,
)
from entrenar_py.train.wire_io.endpoints import CoordinatorEnd, Meter, WorkerEnd
from entrenar_py.train.wire_io.peer_ends import MeshEnd

_ALONE = 2**22  # up to this many bytes, one thread is as fast
_THREADS_MAX = 4


class Recorder:
    """The growing trace of one run of `plan`."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.plan = plan
        self._values = plan.detail == "values"
        self._events: list[trace.Event] = []

    def emit(self, event: trace.Event) -> None:
        """Keep `event`, and count it as progress."""
        self._events.append(event)
        patience.mark()

    def record(self, events: Iterable[trace.Event]) -> None:
        """Keep `events`."""
        for event in events:
            self.emit(event)

    def tensors(self, arrays: Mapping[str, NDArray[Any]]) -> trace.Tensors:
        """Return records of the current values of `arrays`, which must be C-contiguous."""
        records: dict[str, trace.TensorRecord] = {}

        def of(names: Sequence[str]) -> None:
            for name in names:
                records[name] = trace.record_tensor(arrays[name], values=self._values)

        names = list(arrays)
        if sum(array.nbytes for array in arrays.values()) < _ALONE:
            of(names)
        else:
            reduction.share_out(names, of, threads_max=_THREADS_MAX)
        return {name: records[name] for name in names}

    def slices(self, vector: NDArray[np.float32], parts: Mapping[str, slice]) -> trace.Tensors:
        """Return records of the named `parts` of a flat vector."""
        return self.tensors({name: vector[part] for name, part in parts.items()})

    def of(self, kind: type[trace.E]) -> list[trace.E]:
        """Return the events of type `kind` kept so far."""
        return [event for event in self._events if isinstance(event, kind)]

    def drain(self) -> list[trace.Event]:
        """Return the events kept so far, and drop them."""
        events = list(self._events)
        self._events.clear()
        return events

    def finish(self, *, promises: Iterable[str] = (), status: str, reason: str = "") -> trace.Trace:
        """Return the trace, which ends with an End event."""
        self.emit(trace.End(status=status, reason=reason))
        return trace.Trace.of_plan(
            self.plan,
            environment=process.environment(),
            promises=tuple(promises),
            events=tuple(self._events),
        )


# The types of events that each message may carry.
_RECORDS: dict[type[Message], tuple[type[trace.Event], ...]] = {
    Loaded: (trace.Attempt, trace.Start),
    Computed: (trace.Shard, trace.Injected),
    Summed: (trace.Shard, trace.Injected),
    NonFinite: (trace.Shard, trace.Injected),
    Applied: (trace.Update, trace.Reduced),
}


def events_in(rank: int, message: Message, payload: Buffer) -> list[trace.Event]:
    """Return the events in `payload`; raise ProtocolError for an unexpected rank, step or type."""
    try:
        events = trace.load_events(bytes(payload))
    except TraceError as error:
        raise ProtocolError(f"{type(message).__name__}: {error}") from error
    step = getattr(message, "step", None)
    for event in events:
        if not isinstance(event, _RECORDS[type(message)]):
            raise ProtocolError(f"{type(message).__name__} with an event {event.kind}")
        if isinstance(event, trace.Attempt):
            continue  # an Attempt has neither rank nor step
        place = (getattr(event, "rank", None), getattr(event, "step", None))
        if place != (rank, step):
            raise ProtocolError(
                f"{type(message).__name__} of rank {rank} in step {step} has an event of "
                "another rank"
            )
    return events


class Deliveries:
    """Events from workers, held until their delivery is complete; then `recorder` keeps them.

    If a delivery never completes, only its injected faults are recorded.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._read: tuple[Message, Buffer, list[trace.Event]] | None = None  # last
        self._events: dict[int, list[trace.Event]] = {}  # by rank

    def read(self, rank: int, message: Message, payload: Buffer) -> list[trace.Event]:
        """Return the events in `payload`; a payload that was just parsed is not parsed again.

        Raises ProtocolError as `events_in` does.
        """
        read = self._read
        if read is None or read[0] is not message or read[1] is not payload:
            self._read = read = message, payload, events_in(rank, message, payload)
        return read[2]

    def keep(self, rank: int, events: Iterable[trace.Event]) -> None:
        """Keep `events` until the delivery of `rank` is complete."""
        self._events.setdefault(rank, []).extend(events)

    def deliver(self, rank: int) -> None:
        """Record the events of the delivery that `rank` has completed."""
        self._recorder.record(self._events.pop(rank, []))

    def forget(self, rank: int) -> None:
        """Record the faults in the unfinished delivery of `rank`, which has left."""
        self._recorder.record(injected(self._events.pop(rank, [])))

    def clear(self) -> None:
        """Forget all unfinished deliveries: a step begins or restarts."""
        self._events.clear()


def injected(events: Iterable[trace.Event]) -> list[trace.Event]:
    """Return the Injected events; they are recorded even for results that are never used."""
    return [event for event in events if isinstance(event, trace.Injected)]


def update_in(events: Iterable[trace.Event]) -> trace.Update | None:
    """Return the first Update in `events` with a finite loss, or None if there is none."""
    updates = (one for one in events if isinstance(one, trace.Update))
    return next((u for u in updates if u.loss is not None and math.isfinite(u.loss)), None)


PIECE = 2**20  # elements recomputed at a time
UNIT_ROUNDOFF = 2.0**-24


def reduced(
    step: int, rank: int, mean: Array, model: GivenVectors, ids: sharding.Ids
) -> trace.Reduced:
    """Return the error of the `mean` on `rank`, compared with the float64 mean of samples `ids`.

    `error` is the largest absolute difference. `roundings` is the largest difference relative to
    the mean of the terms' absolute values, in units of 2^-24, and `element` is its index. See
    docs/numerics.md.
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
    """Yield the traffic of `rank` (None for the coordinator), by direction and message."""
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
