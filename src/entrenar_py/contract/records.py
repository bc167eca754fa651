"""The records of a contract: what its parts say, each with the place where it stands.

`extra` of a record is plain data: the keys of its mapping that nothing here reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from entrenar_py.contract.problems import Position, Problem

SEVERITIES = ("P0", "P1", "P2")
TOLERANCE_KINDS = ("bitwise", "exact", "absolute", "relative", "ulp", "steps", "bytes")
# Kinds that allow no difference: `tolerance: bitwise` says the same as 0 and the kind.
EQUALITY_KINDS = ("bitwise", "exact")


@dataclass(frozen=True, kw_only=True)
class Binding:
    """A binding of a statement: which check tries it and why, or why none does.

    `kind` and `item` name the statement (`test`, `FALSIFY-RING-004`), `position` is where the
    binding stands. `untried` is the reason why nothing is compared; empty where a check is bound.
    `systems` are those that the statement is about; empty means all. `departures` are what it puts
    in the place of what the contract says, in words (`severity P2 in place of P0`).
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

    `group` is the dotted path of the list it stands in (`data_parallel.weight_consistency`).
    `statement` is the clause's `invariant` text (or its postcondition, or description).
    `check` names the check that decides it; None binds by id. `scenarios` are the raw mappings of
    the clause, still to be expanded (`scenario.expand`); empty means the check's own. A proof
    obligation that counts as a clause has the group `proof_obligations` and its property as the
    name; its id is made of the property where it has none (`Obligation.id`). `binding` is None
    where no file of bindings says anything of it. `aliases` are other names that a gate has for it.
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
        """The id of the statement that the clause is, or is a part of."""
        return self.id if self.binding is None else self.binding.item

    @property
    def gate_names(self) -> tuple[str, ...]:
        """The names by which a gate may call the clause: its id, its name, or a group that it
        stands in: all beginnings of the dotted path, and its last part.
        """
        *above, last = self.group.split(".")
        groups = (last, *accumulate([*above, last], "{}.{}".format))
        return self.id, self.name, self.item, *self.aliases, *groups


@dataclass(frozen=True, kw_only=True)
class Equation:
    """A named formula and what its author claims of it; `position` is that of its name."""

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
    """Something that has to be proved: `property` in words, `formal` in symbols.

    `id` is the one in the file or, if `has_id` is false, one made of the property's first words.
    `applies_to` names an equation, or what kind of code it is about (`all`, `simd`). `lean` is what
    it says of a proof in Lean, as plain data.
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
    """A harness of the Kani model checker; `bound` is the text of its unwind bound."""

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
    """A written attempt to break something; `rule` is what the file says that it attacks.

    `target` is what that was resolved to: the id of a clause or of an obligation, the name of an
    equation, or "" where the rule is free text. `obligation` is the obligation that it names
    besides.
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
    """The contract's own bar, as it is written; `gates.demands` says what it asks for.

    `checks` and `required_tests` are names of clauses, groups or tests, `pass_criteria` is prose
    that may name clauses. `other_demands` ask for what no check measures (`min_coverage: 0.9`).
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

    `invariants` are its clauses: the mappings with an id and a statement, or, where it has none,
    its proof obligations; and whatever files of bindings make clauses of. `blocks` keeps every
    other part as plain data (equations, obligations and harnesses too, as they are written).
    `problems` are what there is to say about the file, none of it an error. `digest` is BLAKE3 of
    the file's bytes, 32 hex digits.
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
        """metadata.version, as text."""
        return str(self.metadata["version"])

    @property
    def warnings(self) -> tuple[str, ...]:
        """The lines `file:line:column: warning: ...`, in the order of the file."""
        return tuple(problem.line for problem in self.problems if problem.level == "warning")

    @property
    def notes(self) -> tuple[str, ...]:
        """The lines `file:line:column: note: ...`, in the order of the file."""
        return tuple(problem.line for problem in self.problems if problem.level == "note")
