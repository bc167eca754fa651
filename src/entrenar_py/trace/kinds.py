"""Every kind of event there is, by the name that it has in a file."""

from __future__ import annotations

from entrenar_py.trace.device_events import Declined, Explained, Poisoned, Stepped
from entrenar_py.trace.events import (
    Admission,
    Attempt,
    Audit,
    Carried,
    End,
    Event,
    Gap,
    Halt,
    Held,
    Injected,
    Manifest,
    Membership,
    Memory,
    Planted,
    Product,
    Reduced,
    Refused,
    Saved,
    Shard,
    Start,
    Synchronised,
    Traffic,
    Update,
)

EVENTS: dict[str, type[Event]] = {
    event.kind: event
    for event in (
        *(
            Start,
            Shard,
            Update,
            Synchronised,
            Membership,
            Injected,
            Audit,
            Planted,
            Halt,
            Saved,
            Gap,
        ),
        *(Manifest, Attempt, Product, Memory, Held, Carried, Refused, Admission),
        *(Reduced, Traffic, Stepped, Explained, Poisoned, Declined, End),
    )
}
