"""Recognises a run that went on from the weights that another run had reached."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from entrenar_py.shared.trace import End, Start, Tensors, Trace, Update

_Key = frozenset[tuple[str, str]]  # names and digests of all weights that a rank holds


@dataclass
class Beginnings:
    """The weights with which runs began, and those that each reached, with run and step."""

    _begun: set[_Key] = field(default_factory=set)
    _reached: dict[_Key, tuple[str, int]] = field(default_factory=dict)

    def seen(self, name: str, trace: Trace) -> Trace:
        """Return `trace`, changed to `failed` if its run began where an earlier run had been.

        Then it found a checkpoint that the other had left, and can't be compared with any run.
        """
        known = [self._reached[key] for key in _first_weights(trace) if key in self._reached]
        found = [place for place in known if place[0] != name]
        self._see(name, trace)
        if not found:
            return trace
        other, step = found[0]
        reason = (
            f"it began with the weights that {other} had after step {step}: it found a checkpoint "
            "that this run had left. Write checkpoints below the folder that the command runs in, "
            "or below {workdir}"
        )
        return replace(trace, events=(*trace.events[:-1], End(status="failed", reason=reason)))

    def _see(self, name: str, trace: Trace) -> None:
        self._begun.update(_first_weights(trace))
        for update in trace.of(Update):
            self._reached.setdefault(_key(update.weights), (name, update.step))
        for key in self._begun.intersection(self._reached):
            del self._reached[key]  # a run whose weights stay, or come back


def first_step(trace: Trace) -> int:
    """Return the number of steps that were made before the run, as its first start says."""
    return min((start.step for start in trace.of(Start)), default=0)


def _first_weights(trace: Trace) -> list[_Key]:
    """Return for each rank the weights with which it began."""
    first: dict[int, Start] = {}
    for start in trace.of(Start):
        first.setdefault(start.rank, start)
    return [_key(start.weights) for start in first.values() if start.weights]


def _key(weights: Tensors) -> _Key:
    return frozenset((name, record.digest) for name, record in weights.items())
