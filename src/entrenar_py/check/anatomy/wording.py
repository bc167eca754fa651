"""An event in words: what is done, which is compared between steps and ranks, and with what values.

The values (losses, norms, samples) differ in each step, and are shown without being compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath

from entrenar_py.check.anatomy import record
from entrenar_py.check.anatomy.record import Event, numbers
from entrenar_py.shared import wording

_NAMES_MAX = 2
_SAMPLES_MAX = 4
_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))


class Words:
    """Describes the events of a record with these names of parameters, and those trained."""

    def __init__(self, names: Mapping[int, str], trained: frozenset[int]) -> None:
        self.names, self._trained = names, trained

    def what(self, event: Event) -> str:
        """Return what an event does; "" for an event that is not shown."""
        tell: Callable[[Words, Event], str] | None = _TOLD.get(type(event))
        return "" if tell is None else tell(self, event)

    def share(self, ranges: str, noun: str) -> str:
        """Return how many of the trained parameters are in a set: "3 of 4 gradients, not a.b"."""
        members = numbers(ranges)
        whole = self._trained | members
        missing = sorted(whole - members)
        text = f"{len(members):,} of {len(whole):,} {noun}"
        if 0 < len(missing) <= _NAMES_MAX and members:
            text += f", not {self.named(missing)}"
        elif 0 < len(members) <= _NAMES_MAX and missing:
            text += f": {self.named(sorted(members))}"
        return text

    def named(self, found: list[int], *, most: int = _NAMES_MAX) -> str:
        """Return the names of parameters."""
        return wording.listed([self.names.get(n, f"parameter {n}") for n in found], most=most)


def values(event: Event) -> str:
    """Return the values of an event; "" if it has none."""
    if isinstance(event, record.PassBegun):
        epoch = f", epoch {event.epoch}" if event.epoch >= 0 else ""
        return f"loader {event.loader}, pass {event.number}{epoch}"
    if isinstance(event, record.PassEnded):
        return f"loader {event.loader}, {event.batches} batches"
    if isinstance(event, record.Drawn):
        samples = wording.listed(event.samples, most=_SAMPLES_MAX)
        return f"loader {event.loader}: {samples}" if samples else f"loader {event.loader}"
    if isinstance(event, record.Cleared):
        return f"{event.present:,} of {len(numbers(event.touched)):,} gradients"
    if isinstance(event, record.Backward) and event.value is not None:
        return f"{event.value:.5g}"
    if isinstance(event, record.Clipped):
        norm = "norm of its pieces" if event.pieces else "norm"
        return f"{norm} {event.before:.4g} -> {event.after:.4g}"
    if isinstance(event, record.Stepped):
        return f"lr {_rates(event.rates)}"
    if isinstance(event, record.Scheduled):
        return f"lr {_rates(event.before)} -> {_rates(event.after)}"
    if isinstance(event, record.Called) and event.what in ("scale", "update", "set_epoch"):
        return event.detail
    return ""


def size(number: float, unit: str = "") -> str:
    """Return a number of elements or bytes: "124 M", "1.5 kB"."""
    for least, name in _UNITS:
        if number >= least:
            name = "G" if unit and name == "B" else name
            return f"{number / least:.3g} {name}{unit}"
    return f"{number:g}{f' {unit}' if unit else ''}"


def place(event: Event) -> str:
    """Return the line of an event without its folder: "train.py:12"."""
    return f"{PurePath(event.file).name}:{event.line}" if event.file else ""


def _rates(rates: tuple[float, ...]) -> str:
    return wording.listed([f"{one:.4g}" for one in dict.fromkeys(rates)], most=2)


def _pass(_: Words, event: record.PassBegun) -> str:
    return f"a pass over a loader begins: {event.sampler}"


def _end(_: Words, event: record.PassEnded) -> str:
    return "the pass over a loader ends"


def _draw(_: Words, event: record.Drawn) -> str:
    known = event.num_samples >= 0
    number = wording.counted(event.num_samples, "sample") if known else "a batch"
    return f"draw {number}: {event.shapes}" if event.shapes else f"draw {number}"


def _forward(_: Words, event: record.Forward) -> str:
    facts = [
        "train" if event.training else "eval",
        "" if event.grad else "no gradients",
        f"autocast {event.autocast}" if event.autocast else "",
        f"{size(event.trainable)} trainable" if event.trainable else "",
        f"{size(event.frozen)} frozen" if event.frozen else "",
        f"{wording.counted(event.changed, 'buffer')} changed" if event.changed else "",
        event.inputs,
    ]
    return f"forward {event.kind}: {', '.join(filter(None, facts))}"


def _backward(words: Words, event: record.Backward) -> str:
    root = f"{event.node} {event.shape if event.shape != '[]' else ''}".strip()
    share = words.share(event.touched, "gradients")
    kept = wording.counted(len(numbers(event.carried)), "earlier gradient")
    carried = f", on top of {kept}" if event.carried else ""
    within = " under autocast" if event.autocast else ""
    return f"backward from {root}{within}: adds to {share}{carried}"


def _collective(words: Words, event: record.Collective) -> str:
    if event.operation == "rebuild_buckets":  # once in a run of DistributedDataParallel
        return ""
    calls = f"{event.calls} x " if event.calls > 1 else ""
    name = " ".join(filter(None, (event.operation.replace("_", "-"), event.reduction)))
    count = len(numbers(event.touched))
    contents = "other tensors" if event.contents == "other" else event.contents
    contents += f" of {wording.counted(count, 'parameter')}" if count else ""
    by = "" if event.by == "script" else f", by {event.by}"
    if event.by == "other code" and not event.touched:  # it was noticed later
        by += " before this line"
    sizes = f" {size(event.tensor_bytes, 'B')} of {contents}" if event.tensor_bytes else ""
    return f"{calls}{name}{sizes}, {wording.counted(event.size, 'rank')}{by}"


def _clear(_: Words, event: record.Cleared) -> str:
    return f"{event.owner}.zero_grad"


def _clip(_: Words, event: record.Clipped) -> str:
    share = f"{len(numbers(event.touched)):,} of {event.present:,} gradients"
    return f"clip {share} to {event.most:g}{', still scaled' if event.scaled else ''}"


def _step(words: Words, event: record.Stepped) -> str:
    count = len(numbers(event.held))
    facts = [
        f"{event.moved:,} of {count:,} parameters moved",
        f"{count - len(numbers(event.graded)):,} without a gradient",
        f"{len(numbers(event.stale)):,} with an earlier gradient",
        f"{len(numbers(event.edited)):,} changed since the last step",
    ]
    shown = [facts[0], *(fact for fact in facts[1:] if not fact.startswith("0 "))]
    by = " by GradScaler" if event.scaler else ""
    return f"{event.kind}.step{by}: {', '.join(shown)}"


def _schedule(_: Words, event: record.Scheduled) -> str:
    return f"{event.kind}.step"


def _call(_: Words, event: record.Called) -> str:
    return _CALLS.get(event.what, "")


_CALLS = {
    "scale": "GradScaler.scale",
    "unscale": "GradScaler.unscale_",
    "skip": "GradScaler skips the step",
    "update": "GradScaler.update",
    "set_epoch": "set_epoch",
    "save": "save a file",
    "load": "load a file",
    "restore": "load_state_dict",
    "average": "update averaged weights",
}
_TOLD: dict[type[Event], Callable[[Words, Event], str]] = {
    record.PassBegun: _pass,  # type: ignore[dict-item]
    record.PassEnded: _end,  # type: ignore[dict-item]
    record.Drawn: _draw,  # type: ignore[dict-item]
    record.Forward: _forward,  # type: ignore[dict-item]
    record.Backward: _backward,  # type: ignore[dict-item]
    record.Collective: _collective,  # type: ignore[dict-item]
    record.Cleared: _clear,  # type: ignore[dict-item]
    record.Clipped: _clip,  # type: ignore[dict-item]
    record.Stepped: _step,  # type: ignore[dict-item]
    record.Scheduled: _schedule,  # type: ignore[dict-item]
    record.Called: _call,  # type: ignore[dict-item]
}
