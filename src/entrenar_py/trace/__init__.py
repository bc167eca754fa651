"""What one run did: its events (`events`), and the chained file they are kept in (`ledger`)."""

from __future__ import annotations

from entrenar_py.trace.events import (
    EVENTS,
    Attempt,
    E,
    End,
    Event,
    Halt,
    Injected,
    Manifest,
    Membership,
    Memory,
    Planted,
    Product,
    Saved,
    Shard,
    Start,
    TensorRecord,
    Tensors,
    Trace,
    Update,
    record_tensor,
)
from entrenar_py.trace.ledger import VERSION, dump_lines, load, save

__all__ = [
    "EVENTS",
    "VERSION",
    "Attempt",
    "E",
    "End",
    "Event",
    "Halt",
    "Injected",
    "Manifest",
    "Membership",
    "Memory",
    "Planted",
    "Product",
    "Saved",
    "Shard",
    "Start",
    "TensorRecord",
    "Tensors",
    "Trace",
    "Update",
    "dump_lines",
    "load",
    "record_tensor",
    "save",
]
