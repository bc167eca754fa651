"""The records of `entrenar doctor`: this machine's parts, and the clauses that it can exercise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from entrenar_py.compute.machine import Found

SCHEMA = "entrenar-doctor/1"


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A trainer, the backends on which it can compute here, and its limits there."""

    system: str
    backends: tuple[str, ...]
    limits: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The number of a clause's own scenarios that can be exercised here.

    `can` of the `planned` scenarios can run, some though something is missing. `lacking` lists
    all that this machine lacks for the planned scenarios. `state` is yes, partly or no.
    """

    contract: str
    id: str
    name: str
    planned: int
    can: int
    lacking: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """The reach in one word."""
        if not self.can:
            return "no"
        return "partly" if self.lacking or self.can < self.planned else "yes"


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The result of an examination; `versions` has a text even for a library that is missing."""

    versions: dict[str, str]
    backends: Sequence[Found]
    trainers: Sequence[Trainer]
    clauses: Sequence[Reach]

    def to_dict(self) -> dict[str, Any]:
        """Return the examination as JSON can hold it."""
        record = asdict(self)
        for clause, one in zip(record["clauses"], self.clauses, strict=True):
            clause["state"] = one.state
        return {"schema": SCHEMA, **record}
