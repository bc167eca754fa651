"""What can be made to go wrong in a run, as plain records inside a scenario.

Says what and where; the system that runs the scenario makes it happen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from entrenar_py.errors import UsageError, did_you_mean

# kind -> what it does. One table: the docs, the validation and the systems read it.
# `rank` and `shard` narrow a planted value to shards of theirs; without either it strikes them all.
KINDS: dict[str, str] = {
    "non_finite_gradient": "one element of a shard's gradient becomes `value` (nan, inf, -inf)",
    "non_finite_loss": "a shard's loss becomes `value` (nan, inf, -inf), its gradient stays",
    "huge_gradient": "one element of a shard's per-sample gradients becomes `value`, finite",
    "leave": "worker `rank` dies while it computes step `step`; its shards go to the others",
    "join": "worker `rank` comes (back) before step `step` with the full state",
    "kill": "worker `rank` is killed (SIGKILL) at message `at` of step `step`",
    "freeze": "worker `rank` is stopped (SIGSTOP) for `seconds` at message `at` of step `step`",
    "cut": "the connection of worker `rank` breaks in the middle of message `at` of step `step`",
    "half_open": "from message `at` of step `step` on nothing passes, and nobody is told",
    "delay": "message `at` of step `step` takes `seconds` longer, and what follows it, too",
    "duplicate": "message `at` of step `step` is sent twice",
    "reorder": "message `at` of step `step` is sent after the one that follows it",
    "truncate": "the second half of message `at` of step `step` is lost",
    "flip": "one bit of message `at` of step `step` is flipped",
    "restart": "the coordinator dies at message `at` of step `step`; another takes its checkpoint",
    "absent": "backend `backend` is not there",
    "init_error": "backend `backend` fails when it is opened",
    "out_of_memory": "backend `backend` runs out of memory while computing",
    "non_finite_output": "backend `backend` returns a result with a NaN in it",
}

# kind -> what it can't do without: a fault that lacks it would silently never happen.
NEEDED: dict[str, tuple[str, ...]] = {
    "non_finite_gradient": ("step", "value"),
    "non_finite_loss": ("step", "value"),
    "huge_gradient": ("step", "value"),
    "leave": ("step", "rank"),
    "join": ("step", "rank"),
    "kill": ("step", "rank", "at"),
    "freeze": ("step", "rank", "at", "seconds"),
    "cut": ("step", "rank", "at"),
    "half_open": ("step", "rank", "at"),
    "delay": ("step", "rank", "at", "seconds"),
    "duplicate": ("step", "rank", "at"),
    "reorder": ("step", "rank", "at"),
    "truncate": ("step", "rank", "at"),
    "flip": ("step", "rank", "at"),
    "restart": ("step", "at"),
    "absent": ("backend",),
    "init_error": ("backend",),
    "out_of_memory": ("backend",),
    "non_finite_output": ("backend",),
}

# kind -> what it may name beside that; `tensor` and `element` are the first ones where left out.
OPTIONAL: dict[str, tuple[str, ...]] = {
    "non_finite_gradient": ("rank", "shard", "tensor", "element"),
    "non_finite_loss": ("rank", "shard"),
    "huge_gradient": ("rank", "shard", "tensor", "element"),
    "non_finite_output": ("element",),
}


# What befalls a worker or a message on its way, in systems whose workers talk.
ON_THE_WAY = (
    *("kill", "freeze", "cut", "half_open"),
    *("delay", "duplicate", "reorder", "truncate", "flip"),
)
# The messages of a step at which that can be (protocol.messages).
PLACES = ("Assign", "TreeNode", "Computed", "Average", "Staged", "Commit", "Applied")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One planned fault. `step` counts from 0; `value` is text ("nan") so that JSON can hold it.

    Raises UsageError for an unknown kind, a field of the wrong type, one that its kind lacks, or
    one that its kind would not look at.
    """

    kind: str
    step: int | None = None
    rank: int | None = None
    shard: int | None = None
    tensor: str | None = None
    element: int | None = None
    value: str | None = None
    backend: str | None = None
    at: str | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in tuple(KINDS):
            raise UsageError(f"fault kind={self.kind!r}: {did_you_mean(self.kind, KINDS)}")
        for name in ("step", "rank", "shard", "element"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 0):
                self._refuse(name, "use a whole number >= 0")
        for name in ("tensor", "value", "backend", "at"):
            if not isinstance(getattr(self, name), str | None):
                self._refuse(name, "use text, in quotes")
        if self.at not in (None, *PLACES):
            self._refuse("at", f"use one of {', '.join(PLACES)}")
        if self.seconds is not None and not _is_duration(self.seconds):
            self._refuse("seconds", "use a number > 0")
        self._check_fields()
        self._check_value()

    def _check_fields(self) -> None:
        needed = NEEDED[self.kind]
        taken = (*needed, *OPTIONAL.get(self.kind, ()))
        for name in self.__dataclass_fields__:
            if name not in ("kind", *taken) and getattr(self, name) is not None:
                self._refuse(name, f"this kind takes none; it takes {', '.join(taken)}")
        for name in needed:
            if getattr(self, name) is None:
                self._refuse(name, f"{self.kind} needs {' and '.join(needed)}")

    def _check_value(self) -> None:
        if self.value is None:
            return
        finite = self.kind == "huge_gradient"
        try:
            fits = math.isfinite(float(self.value)) == finite
        except ValueError:
            fits = False
        if not fits:
            self._refuse("value", "use a finite number" if finite else "use nan, inf or -inf")

    def _refuse(self, name: str, advice: str) -> NoReturn:
        raise UsageError(f"fault {self.kind} {name}={getattr(self, name)!r}: {advice}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready mapping of the fields that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Fault:
        """The fault `record` describes; UsageError names an unknown key."""
        if not isinstance(record, Mapping):
            raise UsageError(f"fault {record!r}: use a mapping with a kind")
        unknown = sorted(set(record) - set(cls.__dataclass_fields__), key=str)
        if unknown:
            hint = did_you_mean(unknown[0], cls.__dataclass_fields__)
            raise UsageError(f"fault key={unknown[0]!r}: {hint}")
        if "kind" not in record:
            raise UsageError(f"fault without kind: allowed kinds are {', '.join(KINDS)}")
        return cls(**record)


def _is_duration(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf  # type: ignore[operator]
