"""The records of a contract: what its parts say, each with the place where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from entrenar_py.contract.problems import Position

SEVERITIES = ("P0", "P1", "P2")
TOLERANCE_KINDS = ("bitwise", "exact", "absolute", "relative", "ulp", "steps", "bytes")
# Kinds that allow no difference: `tolerance: bitwise` says the same as 0 and the kind.
EQUALITY_KINDS = ("bitwise", "exact")


@dataclass(frozen=True, kw_only=True)
class Invariant:
    """One clause of a contract.

    `group` is the dotted path of the list it stands in (`data_parallel.weight_consistency`).
    `statement` is the clause's `invariant` text (or its postcondition, or description).
    `check` names the check that decides it; None binds by id. `scenarios` are the raw mappings of
    the clause, still to be expanded (`scenario.expand`); empty means the check's own.
    """

    id: str
    name: str
    statement: str
    position: Position
    group: str = ""
    description: str = ""
    severity: str = "P1"
    critical: bool = False
    precondition: str = ""
    postcondition: str = ""
    tolerance: float | None = None
    tolerance_kind: str | None = None
    reference: str = ""
    check: str | None = None
    scenarios: tuple[Mapping[str, Any], ...] = ()
    mutants: tuple[str, ...] = ()

    @property
    def gate_names(self) -> tuple[str, ...]:
        """How a gate may call the clause: by id, by name, or by a group that it stands in: all
        beginnings of the dotted path, and its last part.
        """
        *above, last = self.group.split(".")
        return self.id, self.name, last, *accumulate([*above, last], "{}.{}".format)


@dataclass(frozen=True, kw_only=True)
class FalsificationTest:
    """A written attempt to break a clause: `rule` is the id (or name) of the clause it attacks."""

    id: str
    rule: str
    prediction: str
    position: Position
    test: str = ""
    if_fails: str = ""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The contract's own bar: `checks` name the clauses that must hold (`Invariant.gate_names`).

    Where a test was named, the rule of that test stands. Without names the gate demands every
    clause that is P0 or critical.
    """

    id: str
    name: str
    description: str
    checks: tuple[str, ...]
    pass_criteria: str
    position: Position
    falsification: str = ""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """A loaded contract.

    `blocks` keeps every other part (equations, proof obligations, harnesses, free extra blocks) as
    plain data. `warnings` are lines `file:line:column: warning: ...`; `digest` is BLAKE3 of the
    file's bytes, 32 hex digits.
    """

    path: Path
    digest: str
    metadata: Mapping[str, Any]
    invariants: tuple[Invariant, ...]
    falsification_tests: tuple[FalsificationTest, ...] = ()
    gate: Gate | None = None
    blocks: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file's name, e.g. `distributed-training-v1.yaml`."""
        return self.path.name

    @property
    def version(self) -> str:
        """metadata.version, as text."""
        return str(self.metadata["version"])
