"""The trace of one run: its events (`events`), and the chained file that holds them (`ledger`)."""

from __future__ import annotations

from entrenar_py.trace.averaging_events import Averaged
from entrenar_py.trace.device_events import Declined, Explained, Poisoned, Stepped
from entrenar_py.trace.events import (
    Admission,
    Attempt,
    Audit,
    Carried,
    E,
    End,
    Event,
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
    Selection,
    Shard,
    Start,
    Synchronised,
    Traffic,
    Update,
)
from entrenar_py.trace.ledger import VERSION, dump_events, dump_lines, load, load_events, save
from entrenar_py.trace.records import EVENTS
from entrenar_py.trace.run import Trace
from entrenar_py.trace.script_events import Declared, Drawn, Noticed
from entrenar_py.trace.service_events import Gap, Spike
from entrenar_py.trace.tensors import Sketch, TensorRecord, Tensors, record_sketch, record_tensor
from entrenar_py.trace.traits import Traits
from entrenar_py.trace.tuning_events import (
    Adapted,
    Encoded,
    Frozen,
    ReadBack,
    Taught,
    Weighed,
)

__all__ = [
    "EVENTS",
    "VERSION",
    "Adapted",
    "Admission",
    "Attempt",
    "Audit",
    "Averaged",
    "Carried",
    "Declared",
    "Declined",
    "Drawn",
    "E",
    "Encoded",
    "End",
    "Event",
    "Explained",
    "Frozen",
    "Gap",
    "Halt",
    "Held",
    "Injected",
    "Manifest",
    "Membership",
    "Memory",
    "Noticed",
    "Planted",
    "Poisoned",
    "Product",
    "ReadBack",
    "Reduced",
    "Refused",
    "Saved",
    "Selection",
    "Shard",
    "Sketch",
    "Spike",
    "Start",
    "Stepped",
    "Synchronised",
    "Taught",
    "TensorRecord",
    "Tensors",
    "Trace",
    "Traffic",
    "Traits",
    "Update",
    "Weighed",
    "dump_events",
    "dump_lines",
    "load",
    "load_events",
    "record_sketch",
    "record_tensor",
    "save",
]
