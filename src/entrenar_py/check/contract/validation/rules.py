"""All rules in one table, which validation, its reports and docs/contract-rules.md read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from entrenar_py.check.contract.validation import published
from entrenar_py.check.contract.validation.levels import Level
from entrenar_py.check.contract.validation.outline import KINDS, Outline
from entrenar_py.check.contract.validation.published import Breach
from entrenar_py.shared.errors import did_you_mean

# Sources of the published ids and levels.
_SCHEMA = (
    "https://github.com/paiml/provable-contracts/blob/main/"
    "crates/provable-contracts/src/schema/validator.rs"
)
_AUDIT = (
    "https://github.com/paiml/provable-contracts/blob/main/"
    "crates/provable-contracts/src/audit/mod.rs"
)
_LATER = (
    "https://github.com/paiml/aprender/blob/main/crates/aprender-contracts/src/schema/validator.rs"
)
_LINT = "https://github.com/paiml/aprender/blob/main/crates/aprender-contracts/src/lint/rules.rs"

UNREADABLE = "PV-VAL-001"
STALE = "PV-SUP-001"
OURS = "ENTRENAR-001"
NOTE = "ENTRENAR-002"


def _known_kind(contract: Outline) -> Iterator[Breach]:
    """ENTRENAR-001: `metadata.kind` is a kind that the format knows."""
    if contract.declared and contract.kind not in KINDS:
        hint = did_you_mean(contract.kind, KINDS)
        message = f"metadata.kind {contract.kind!r} is unknown: judged as a kernel; {hint}"
        at = contract.metadata.at("kind")
        yield Breach(at=at, item="metadata.kind", message=message)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule: its default `level`, its demand, its remedy, and `find`, which yields breaches.

    `published` is the address of the rule's source, "" for a rule of this project. A `fixed` rule
    has the same level in every project and can't be suppressed.
    """

    id: str
    level: Level
    demands: str
    remedy: str
    published: str = ""
    find: Callable[[Outline], Iterable[Breach]] = lambda contract: ()
    fixed: bool = False


_PROVES = published.filled(
    "kani_harnesses", "obligation", "name the proof obligation that it proves"
)
_ERROR, _WARNING, _INFO = Level.ERROR, Level.WARNING, Level.INFO

# The first seventeen rules, and those with PV, have the ids and levels published by others.
RULES: tuple[Rule, ...] = (
    Rule(
        id="SCHEMA-001",
        level=_ERROR,
        demands="`metadata.references` names what the contract rests on",
        remedy="Cite the paper, specification or contract that the clauses come from.",
        published=_SCHEMA,
        find=published.references,
    ),
    Rule(
        id="SCHEMA-002",
        level=_ERROR,
        demands="`metadata.version` is there",
        remedy='Give a version, such as "1.0.0".',
        published=_SCHEMA,
        find=published.version,
    ),
    Rule(
        id="SCHEMA-003",
        level=_ERROR,
        demands="a kernel's contract has at least one equation",
        remedy="Write down what the kernel computes, or say in metadata.kind what else it is.",
        published=_SCHEMA,
        find=published.some_equation,
    ),
    Rule(
        id="SCHEMA-004",
        level=_ERROR,
        demands="each equation has a `formula`",
        remedy="Write the formula down.",
        published=_SCHEMA,
        find=published.formulas,
    ),
    Rule(
        id="SCHEMA-005",
        level=_ERROR,
        demands="each proof obligation has a `property`",
        remedy="Say what must hold.",
        published=_SCHEMA,
        find=published.properties,
    ),
    Rule(
        id="SCHEMA-006",
        level=_WARNING,
        demands="no two proof obligations have the same `formal` predicate",
        remedy="Change one, or make one obligation of the two.",
        published=_SCHEMA,
        find=published.distinct("proof_obligations", "formal", "formal predicate"),
    ),
    Rule(
        id="SCHEMA-007",
        level=_ERROR,
        demands="no two falsification tests have the same `id`",
        remedy="Rename one.",
        published=_SCHEMA,
        find=published.distinct("falsification_tests", "id", "id"),
    ),
    Rule(
        id="SCHEMA-008",
        level=_ERROR,
        demands="each falsification test has a `prediction`",
        remedy="Say what is seen if the contract holds.",
        published=_SCHEMA,
        find=published.filled(
            "falsification_tests", "prediction", "say what is seen if the contract holds"
        ),
    ),
    Rule(
        id="SCHEMA-009",
        level=_WARNING,
        demands="each falsification test has `if_fails`",
        remedy="Say what a failure would mean.",
        published=_SCHEMA,
        find=published.filled("falsification_tests", "if_fails", "say what a failure would mean"),
    ),
    Rule(
        id="SCHEMA-010",
        level=_ERROR,
        demands="no two Kani harnesses have the same `id`",
        remedy="Rename one.",
        published=_SCHEMA,
        find=published.distinct("kani_harnesses", "id", "id"),
    ),
    Rule(
        id="SCHEMA-011",
        level=_ERROR,
        demands="each Kani harness names its `obligation`",
        remedy="Name the proof obligation that the harness proves.",
        published=_SCHEMA,
        find=_PROVES,
    ),
    Rule(
        id="SCHEMA-012",
        level=_WARNING,
        demands="each Kani harness has a `bound`",
        remedy="Give the number of times that loops are unwound.",
        published=_SCHEMA,
        find=published.filled(
            "kani_harnesses", "bound", "give the number of times that loops are unwound"
        ),
    ),
    Rule(
        id="SCHEMA-013",
        level=_WARNING,
        demands="a kernel's contract, or one of clauses, has a `qa_gate`",
        remedy="Say which checks must hold for a pass.",
        published=_SCHEMA,
        find=published.gate,
    ),
    Rule(
        id="PROVABILITY-001",
        level=_ERROR,
        demands="a kernel's contract has proof obligations, at least as many falsification tests, "
        "and Kani harnesses",
        remedy="Write what is missing, or say in metadata.kind what else the contract is.",
        published=_LATER,
        find=published.provability,
    ),
    Rule(
        id="AUDIT-001",
        level=_WARNING,
        demands="there is a falsification test",
        remedy="Write one: what nothing could refute says nothing.",
        published=_AUDIT,
        find=published.some_test,
    ),
    Rule(
        id="AUDIT-002",
        level=_ERROR,
        demands="each Kani harness can be traced to a proof obligation: `obligation` is not empty",
        remedy="Name the proof obligation that the harness proves.",
        published=_AUDIT,
        find=_PROVES,
    ),
    Rule(
        id="AUDIT-003",
        level=_WARNING,
        demands="where there are equations, proof obligations (or clauses) follow from them",
        remedy="Derive proof obligations from the equations.",
        published=_AUDIT,
        find=published.some_obligation,
    ),
    Rule(
        id=UNREADABLE,
        level=_ERROR,
        demands="the file can be read as a contract: YAML, and the shapes of the format",
        remedy="Correct the file; docs/contract-format.md has the format.",
        published=_LINT,
        fixed=True,
    ),
    Rule(
        id=STALE,
        level=_WARNING,
        demands="each suppression suppresses something, and its last day has not passed",
        remedy="Remove the suppression, or correct what it suppressed.",
        published=_LINT,
    ),
    Rule(
        id=OURS,
        level=_WARNING,
        demands="entrenar-check looks at all that the contract says, and can decide it",
        remedy="Correct the name, or say by which check the clause is decided.",
        find=_known_kind,
    ),
    Rule(
        id=NOTE,
        level=_INFO,
        demands="nothing: it says what entrenar-check makes of something that is right as it is",
        remedy="Nothing has to be done.",
    ),
)
BY_ID = {rule.id: rule for rule in RULES}
DEFAULTS = {rule.id: rule.level for rule in RULES}
FIXED = tuple(rule.id for rule in RULES if rule.fixed)
