"""The record of one rank: what its script called, in order, each with the script's own line.

A file has JSON lines: a header, the events, and at its end a line that says that the process ended.
Parameters have numbers, and events name sets of them by ranges ("0-11,14"). A file may come from
anywhere, so each line is checked when it is read.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from entrenar_py.shared.codec import Schema
from entrenar_py.shared.errors import TraceError, UsageError
from entrenar_py.shared.untrusted import files, json_text

FORMAT, VERSION = "entrenar-anatomy", 1
SUFFIX = ".anatomy.jsonl"
EVENTS_MAX = 200_000  # of one rank
NUMBERS_MAX = 2**20
_LINE_BYTES_MAX = 2**20


def ranges(numbers: Iterable[int]) -> str:
    """Return the text of a set of numbers: "0-3,7"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{low}-{high}" if low < high else str(low) for low, high in spans)


def numbers(text: str) -> frozenset[int]:
    """Return the numbers in a text of ranges. Raises ValueError for a different text."""
    members: set[int] = set()
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        span = range(int(low), int(high or low) + 1)
        if not 0 <= span.start < span.stop <= NUMBERS_MAX:
            raise ValueError(f"{part!r}: use ascending ranges of numbers below {NUMBERS_MAX}")
        members.update(span)
    return frozenset(members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One call. `file` and `line` are the innermost line of the script that was running."""

    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(Event):
    """A parameter is known as `number` from here on. `shared` marks one that is tied."""

    number: int
    name: str
    shape: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBegun(Event):
    """A loader is iterated for the `number`-th time, from 0; `epoch` is its sampler's, or -1."""

    loader: int
    number: int
    sampler: str
    epoch: int = -1
    shuffles: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassEnded(Event):
    """A loader has no more batches after `batches` of them."""

    loader: int
    number: int
    batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn(Event):
    """A loader handed out a batch: its samples as drawn (the first ones), their number, shapes."""

    loader: int
    number: int
    samples: tuple[int, ...] = ()
    num_samples: int = -1
    shapes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Event):
    """An outermost module was called.

    - `module`: its number, and `kind` its classes; `inner`: the number of a module it wraps, or -1.
    - `training`, `grad`: its mode, and whether gradients were recorded.
    - `outputs_grad`: whether an output requires a gradient.
    - `inputs`, `digest`: shapes and digest of its tensors, those by keyword last; "" without any.
    - `generator`: digest of the random numbers' state before; `draws`: whether it has changed.
    - `modal`: it has active dropout or batch norm; `was_inner`: the script has a wrapper of it.
    - `stirred`: frozen modules in training mode with buffers that this call moved.
    - `changed`: the number of its buffers that this call changed.
    """

    module: int
    kind: str
    inner: int = -1
    training: bool
    grad: bool
    outputs_grad: bool = False
    autocast: str = ""
    trainable: int = 0
    frozen: int = 0
    inputs: str = ""
    digest: str = ""
    generator: str = ""
    draws: bool = False
    modal: bool = False
    was_inner: bool = False
    stirred: tuple[str, ...] = ()
    changed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Event):
    """`backward` was called on a tensor.

    - `shape`, `value`, `node`: the tensor, its value, and its function in autograd's graph.
    - `mean`: the value is a plain mean, as the graph shows; None if the graph doesn't show it.
    - `touched`: parameters with gradients that the pass changed, and the `norm` of these.
    - `carried`: those that still had the gradients of an earlier step.
    - `again`: a pass began at the same tensor before.
    - `reduced`: ranks exchanged tensors within the pass.
    - `gathered`: tensors that require a gradient were gathered before without one.
    - `changed_root`: it was computed from a loss that ranks had reduced in place.
    """

    shape: str
    value: float | None = None
    node: str = ""
    mean: bool | None = None
    touched: str = ""
    norm: float = 0.0
    carried: str = ""
    again: bool = False
    autocast: bool = False
    reduced: bool = False
    gathered: bool = False
    changed_root: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(Event):
    """Ranks exchanged tensors, in `calls` calls.

    - `operation`, `reduction`: `all_reduce` and `SUM`; `by`: "script", or a library.
    - `size`: the number of ranks of the group; `tensor_bytes`: of this rank's tensors.
    - `contents`: "gradients", "parameters", "buffers" or "other"; `touched`: the parameters.
    """

    operation: str
    reduction: str = ""
    by: str = "script"
    size: int = 1
    tensor_bytes: int = 0
    calls: int = 1
    contents: str = "other"
    touched: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared(Event):
    """`zero_grad` was called for `touched`; `present` of these had gradients that are not zero."""

    owner: str
    touched: str = ""
    present: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped(Event):
    """Gradients were clipped to the norm `most`.

    `given` parameters were passed, `touched` of these have gradients. `present` is the number of
    known parameters with gradients. `scaled`: the loss was scaled, and nothing was unscaled since.
    `pieces`: `before` and `after` are norms of this rank's pieces of sharded gradients.
    """

    most: float
    given: int
    touched: str = ""
    present: int = 0
    before: float = 0.0
    after: float = 0.0
    scaled: bool = False
    pieces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped(Event):
    """An optimizer stepped.

    - `optimizer`: its number, and `kind` its class; `torchs`: that class is one of torch's.
    - `held`: its parameters that require a gradient or have one; `graded`: those with one.
    - `moved`: the number of parameters that the step changed; `weights`: a digest of all after it.
    - `stale`: those with a gradient that an earlier step has applied.
    - `edited`: those that were changed since its last step.
    - `norm`: of the gradients; `rates`: the learning rate of each group.
    - `ratio`: the norm of reduced gradients, divided by that after the script reduced them.
    - `scaler`: a `GradScaler` called it; `scaled`: a loss was scaled, and nothing unscaled since.
    """

    optimizer: int
    kind: str
    torchs: bool = False
    held: str = ""
    graded: str = ""
    moved: int = 0
    weights: str = ""
    stale: str = ""
    edited: str = ""
    rates: tuple[float, ...] = ()
    norm: float = 0.0
    ratio: float | None = None
    scaler: bool = False
    scaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled(Event):
    """A schedule stepped: its number and class, its optimizer, and the rates before and after."""

    schedule: int
    kind: str
    optimizer: int
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Called(Event):
    """Any other call, with a `detail`: a file, an epoch, a scale.

    `what` is built, scale, unscale, skip, update, set_epoch, save, load, restore, average or join.
    `number` is the optimizer's, if there is one. `exchanges` is how often this rank has taken part
    in a collective so far.
    """

    what: str
    detail: str = ""
    number: int = -1
    exchanges: int = 0


KINDS: dict[str, type[Event]] = {
    "named": Named,
    "pass": PassBegun,
    "end": PassEnded,
    "draw": Drawn,
    "forward": Forward,
    "backward": Backward,
    "collective": Collective,
    "clear": Cleared,
    "clip": Clipped,
    "step": Stepped,
    "schedule": Scheduled,
    "call": Called,
}
_NAMES = {kind: name for name, kind in KINDS.items()}
_SCHEMAS: dict[str, Schema[Any]] = {
    name: Schema(kind, sparse=True, what=name) for name, kind in KINDS.items()
}
_RANGES = ("touched", "carried", "held", "graded", "stale", "edited")

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True, kw_only=True)
class Record:
    """The events of one rank. `problem` says why they end early; "" if they don't."""

    rank: int
    world_size: int
    events: tuple[Event, ...]
    problem: str = ""

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def header(*, rank: int, world_size: int, pid: int) -> str:
    """Return the first line of a file."""
    header = {"format": FORMAT, "version": VERSION, "rank": rank, "world_size": world_size}
    return json.dumps({**header, "pid": pid})


def line_of(event: Event) -> str:
    """Return the line of an event."""
    name = _NAMES[type(event)]
    return json.dumps({"event": name, **_SCHEMAS[name].dump(event)})


def closing(problem: str) -> str:
    """Return the last line of a file."""
    return json.dumps({"closed": True, "problem": problem})


def load(folder: Path) -> dict[int, Record]:
    """Return the records in `folder` by rank; of two processes of one rank the later file counts.

    Raises TraceError for a file that is no such record.
    """
    records: dict[int, Record] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns):
        record = _load(path)
        records[record.rank] = record
    return dict(sorted(records.items()))


def _load(path: Path) -> Record:
    try:
        with files.open_file(path) as file:
            lines = files.lines(file, bytes_max=_LINE_BYTES_MAX)
            first = json_text.load(next(lines, b"{}"))
            return _read(first, [*_parsed(lines)])
    except (OSError, ValueError, UsageError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: no record of a rank's calls ({error}); run again") from error


def _parsed(lines: Iterator[bytes]) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(lines):
        if number >= EVENTS_MAX:
            raise ValueError(f"more than {EVENTS_MAX} events")
        if not line.endswith(b"\n"):
            return  # the process died while it wrote this line
        yield json_text.load(line)


def _read(first: Mapping[str, Any], lines: list[Mapping[str, Any]]) -> Record:
    if first.get("format") != FORMAT or first.get("version") != VERSION:
        raise ValueError(f"its first line is {reprlib.repr(first)}")
    rank, world_size = int(first["rank"]), int(first["world_size"])
    events, problem = [], "its process ended without its exit handlers"
    for line in lines:
        if "closed" in line:
            problem = str(line["problem"])
            break
        fields = {**line}
        event = _SCHEMAS[str(fields.pop("event"))].load(fields)
        for name in _RANGES:
            numbers(getattr(event, name, ""))
        events.append(event)
    return Record(rank=rank, world_size=world_size, events=tuple(events), problem=problem)
