"""The records of a contract: a frozen dataclass for each kind of part, with its place.

In all of them, `extra` has the keys of the part that no reader knows, as plain data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from entrenar_py.shared.config.problems import Position, Problem
from entrenar_py.shared.errors import UsageError

SEVERITIES = ("P0", "P1", "P2")
TOLERANCE_KINDS = ("bitwise", "exact", "absolute", "relative", "ulp", "steps", "bytes")
# Kinds that allow no difference: `tolerance: bitwise` means tolerance 0 of the kind bitwise.
EQUALITY_KINDS = ("bitwise", "exact")


@dataclass(frozen=True, kw_only=True)
class Binding:
    """The binding of one statement: the check that tests it, or the reason why none does.

    - `kind`, `item`: the kind and the id of the statement (`test`, `FALSIFY-RING-004`).
    - `position`: the place of the binding.
    - `untried`: the reason why nothing is compared, or "" if a check runs.
    - `systems`: the systems that the statement is about; empty for all systems.
    - `departures`: a description of each value that differs from the contract's value
      (`severity P2 in place of P0`).
    """

    kind: str
    item: str
    position: Position
    reason: str = ""
    untried: str = ""
    systems: tuple[str, ...] = ()
    departures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Invariant:
    """One clause of a contract.

    - `group`: the dotted path of its list (`data_parallel.weight_consistency`).
    - `statement`: the `invariant` text, or else the postcondition or description.
    - `check`: the name of the check that decides the clause; None means the check for its id.
    - `scenarios`: mappings for `scenario.expand`; empty means the check's own scenarios.
    - `binding`: None if no file of bindings names the clause.
    - `aliases`: other names that gates may use.

    A proof obligation that counts as a clause has the group `proof_obligations`, its property as
    `name`, and the obligation's id.
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
    extra: Mapping[str, Any] = field(default_factory=dict)
    binding: Binding | None = None
    aliases: tuple[str, ...] = ()

    @property
    def item(self) -> str:
        """The id of the statement that this clause was made from, whole or in part."""
        return self.id if self.binding is None else self.binding.item

    @property
    def gate_names(self) -> tuple[str, ...]:
        """The names that a gate may use for the clause: its id, name, statement's id and aliases.

        Its groups are names, too: each beginning of the dotted path, and its last part.
        """
        *above, last = self.group.split(".")
        groups = (last, *accumulate([*above, last], "{}.{}".format))
        return self.id, self.name, self.item, *self.aliases, *groups


@dataclass(frozen=True, kw_only=True)
class Equation:
    """A named formula with its author's claims. `position` is the place of its name."""

    name: str
    formula: str
    position: Position
    domain: str = ""
    codomain: str = ""
    invariants: tuple[str, ...] = ()
    preconditions: tuple[str, ...] = ()
    postconditions: tuple[str, ...] = ()
    reference: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Obligation:
    """A property to be proved: `property` in words, `formal` in symbols.

    If `has_id` is false, `id` was made from the first words of the property. `applies_to` names an
    equation or a kind of code (`all`, `simd`). `lean` is plain data about a proof in Lean.
    """

    id: str
    property: str
    position: Position
    has_id: bool = True
    type: str = ""
    formal: str = ""
    tolerance: float | None = None
    applies_to: str = ""
    equation: str = ""
    lean: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Harness:
    """A harness of the Kani model checker. `bound` is its unwind bound, as text."""

    id: str
    obligation: str
    position: Position
    property: str = ""
    bound: str = ""
    strategy: str = ""
    solver: str = ""
    harness: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FalsificationTest:
    """A written attempt to falsify a clause. `rule` says in the file what the test attacks.

    `target` is what `rule`, or else the key `obligation`, refers to: the id of a clause or
    obligation, or the name of an equation; "" if they refer to none.
    """

    id: str
    rule: str
    prediction: str
    position: Position
    test: str = ""
    if_fails: str = ""
    obligation: str = ""
    target: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The contract's own condition for a pass, as written. `gates.demands` finds its clauses.

    `checks` and `required_tests` are names of clauses, groups or tests. `pass_criteria` is prose
    that may name clauses. `other_demands` are demands that no check measures (`min_coverage: 0.9`).
    """

    id: str
    name: str
    description: str
    checks: tuple[str, ...]
    pass_criteria: str
    position: Position
    falsification: str = ""
    required_tests: tuple[str, ...] = ()
    other_demands: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Contract:
    """A loaded contract.

    - `invariants`: the clauses: the mappings with an id and a statement (if there are none, the
      proof obligations), and the statements that a file of bindings turns into clauses.
    - `blocks`: all other parts as plain data, including raw equations, obligations and harnesses.
    - `problems`: the warnings and notes on the file.
    - `digest`: BLAKE3 of the file's bytes, as 32 hex digits.
    """

    path: Path
    digest: str
    metadata: Mapping[str, Any]
    invariants: tuple[Invariant, ...]
    falsification_tests: tuple[FalsificationTest, ...] = ()
    equations: tuple[Equation, ...] = ()
    obligations: tuple[Obligation, ...] = ()
    harnesses: tuple[Harness, ...] = ()
    gate: Gate | None = None
    blocks: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    @property
    def name(self) -> str:
        """The file's name, e.g. `distributed-training-v1.yaml`."""
        return self.path.name

    @property
    def version(self) -> str:
        """`metadata.version` as text."""
        return str(self.metadata["version"])

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings as lines `file:line:column: warning: ...`, in the order of the file."""
        return tuple(problem.line for problem in self.problems if problem.level == "warning")

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes as lines `file:line:column: note: ...`, in the order of the file."""
        return tuple(problem.line for problem in self.problems if problem.level == "note")


def ids_of(contract: Contract) -> dict[str, None]:
    """Return the ids that select clauses. A statement's id selects all clauses made from it."""
    return {name: None for clause in contract.invariants for name in (clause.id, clause.item)}


def require_ids(
    wanted: Iterable[str], ids: Collection[str], where: str, *, field: str = ""
) -> None:
    """Raise UsageError about `field` for the first id in `wanted` that is not in `ids`.

    `where` says in the message what has the `ids`.
    """
    for clause in wanted:
        if clause not in ids:
            message = f"id {clause!r} is not in {where}: it has {', '.join(ids)}"
            raise UsageError(message, field=field)
