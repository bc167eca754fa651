"""Reads, in the payloads of a worker's messages, the events that the worker recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable

from entrenar_py.shared import trace
from entrenar_py.shared.errors import ProtocolError, TraceError
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import (
    Applied,
    Computed,
    Loaded,
    Message,
    NonFinite,
    Summed,
)

# The kinds of events that each message may carry.
_RECORDS: dict[type[Message], tuple[type[trace.Event], ...]] = {
    Loaded: (trace.Attempt, trace.Start),
    Computed: (trace.Shard, trace.Injected),
    Summed: (trace.Shard, trace.Injected),
    NonFinite: (trace.Shard, trace.Injected),
    Applied: (trace.Update, trace.Reduced),
}


def read(rank: int, message: Message, payload: Buffer) -> list[trace.Event]:
    """Return the events in `payload`; raise ProtocolError for an unexpected rank, step or kind."""
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
                f"{type(message).__name__} of rank {rank} in step {step} has an event of another"
            )
    return events


def update_in(events: Iterable[trace.Event]) -> trace.Update | None:
    """Return the first Update in `events` with a finite loss, or None if there is none."""
    updates = (one for one in events if isinstance(one, trace.Update))
    return next((u for u in updates if u.loss is not None and math.isfinite(u.loss)), None)
