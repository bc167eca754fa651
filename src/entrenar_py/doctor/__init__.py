"""What this machine has, and what of the shipped contracts can be exercised on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = "entrenar-doctor/1"


@dataclass(frozen=True, kw_only=True)
class Found:
    """One backend as `--backend` names it: it serves, or `reason` says why not.

    `facts` are what its library says of it: limits, features, memory in bytes.
    """

    name: str
    serves: bool
    device: str = ""
    software: bool = False
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Where a trainer can compute here: names of backends, and what limits it on one."""

    system: str
    backends: tuple[str, ...]
    limits: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How much of a clause's own scenarios can be exercised here.

    `can` of `planned` run on what they ask for; `lacking` says what the others, or parts of them,
    lack. `state` is yes, partly or no.
    """

    contract: str
    id: str
    name: str
    planned: int
    can: int
    lacking: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """In a word."""
        if not self.can:
            return "no"
        return "partly" if self.lacking or self.can < self.planned else "yes"


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All that was found; each version is text, `not installed` where there is none."""

    versions: dict[str, str]
    backends: Sequence[Found]
    trainers: Sequence[Trainer]
    clauses: Sequence[Reach]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        record = asdict(self)
        for clause, one in zip(record["clauses"], self.clauses, strict=True):
            clause["state"] = one.state
        return {"schema": SCHEMA, **record}
