"""Each published rule: a contract that breaks it, at its place, and one that keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py.check.contract.rules import NOTE, OURS, RULES, UNREADABLE
from tests.check.contract.validation.written import CLAUSES, KERNEL, judged, written

HARNESSES = KERNEL[KERNEL.index("kani_harnesses:") : KERNEL.index("qa_gate:")]
OBLIGATIONS = KERNEL[KERNEL.index("proof_obligations:") : KERNEL.index("falsification_tests:")]
TESTS = KERNEL[KERNEL.index("falsification_tests:") : KERNEL.index("kani_harnesses:")]
EQUATIONS = KERNEL[KERNEL.index("equations:") : KERNEL.index("proof_obligations:")]
GATE = KERNEL[KERNEL.index("qa_gate:") :]

# Rule, a text in KERNEL and its replacement, and the places (line, item) of the rule's findings.
BREAKS = [
    ("SCHEMA-001", "[a paper]", "[]", [(4, "metadata.references")]),
    ("SCHEMA-001", "  references: [a paper]\n", "", [(2, "metadata.references")]),
    ("SCHEMA-002", '"1.0.0"', '""', [(2, "metadata.version")]),
    ("SCHEMA-002", '  version: "1.0.0"\n', "", [(2, "metadata.version")]),
    ("SCHEMA-003", EQUATIONS, "equations: {}\n", [(5, "equations")]),
    ("SCHEMA-003", EQUATIONS, "", [(1, "equations")]),
    ("SCHEMA-004", "s(x)_i = exp(x_i) / sum exp(x_j)", '""', [(7, "equations.softmax.formula")]),
    ("SCHEMA-004", " s(x + c) = s(x)\n", "\n", [(8, "equations.shift")]),
    ("SCHEMA-005", "it sums to one, formal", "'', formal", [(10, "proof_obligations[0].property")]),
    ("SCHEMA-006", "sum s = 1", "s(x + c) = s(x)", [(11, "proof_obligations[1].formal")]),
    ("SCHEMA-007", "FALSIFY-2", "FALSIFY-1", [(14, "falsification_tests.FALSIFY-1.id")]),
    ("SCHEMA-008", "1 within eps", "' '", [(13, "falsification_tests.FALSIFY-1.prediction")]),
    ("SCHEMA-009", ", if_fails: no division", "", [(13, "falsification_tests.FALSIFY-1.if_fails")]),
    ("SCHEMA-010", "KANI-2", "KANI-1", [(17, "kani_harnesses.KANI-1.id")]),
    (
        "SCHEMA-011",
        "it sums to one, bound",
        "'', bound",
        [(16, "kani_harnesses.KANI-1.obligation")],
    ),
    ("SCHEMA-012", "one, bound: 8", "one", [(16, "kani_harnesses.KANI-1.bound")]),
    ("SCHEMA-013", GATE, "", [(1, "qa_gate")]),
    ("SCHEMA-013", GATE, "qa_gate:\n", [(18, "qa_gate")]),
    ("PROVABILITY-001", HARNESSES, "", [(1, "kani_harnesses")]),
    ("PROVABILITY-001", OBLIGATIONS, "", [(1, "proof_obligations")]),
    (
        "PROVABILITY-001",
        TESTS,
        "",
        [
            (1, "falsification_tests"),
            (1, "falsification_tests"),
        ],  # none, and fewer than obligations
    ),
    ("AUDIT-001", TESTS, "falsification_tests: []\n", [(12, "falsification_tests")]),
    ("AUDIT-002", "it sums to one, bound", "'', bound", [(16, "kani_harnesses.KANI-1.obligation")]),
    ("AUDIT-003", OBLIGATIONS, "", [(1, "proof_obligations")]),
]


def test_what_keeps_every_rule(tmp_path: Path) -> None:
    """No published rule finds anything in a complete contract of a kernel, or of clauses."""
    for text, kind in ((KERNEL, "kernel"), (CLAUSES, "clauses")):
        found = judged(written(tmp_path, text))
        assert found.kind == kind
        assert {finding.rule.id for finding in found.findings} <= {OURS, NOTE}


@pytest.mark.parametrize(("rule", "old", "new", "places"), BREAKS)
def test_what_breaks_a_rule(
    tmp_path: Path, rule: str, old: str, new: str, places: list[tuple[int, str]]
) -> None:
    """The breach is found at its place with the rule's level, and the message says what to do."""
    assert KERNEL.count(old) == 1
    found = judged(written(tmp_path, KERNEL.replace(old, new)))
    own = [finding for finding in found.findings if finding.rule.id == rule]
    assert [(one.at.line, one.item) for one in own] == places
    assert all(one.level is one.rule.level and ";" in one.message for one in own)


def test_every_published_rule_is_broken_here() -> None:
    """Every published rule has a test in which it is broken."""
    own = {UNREADABLE, OURS, NOTE}
    assert {rule for rule, *_ in BREAKS} == {rule.id for rule in RULES} - own


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("registry: true", set()),
        ("kind: training-loop", set()),
        ("kind: kernel", {"SCHEMA-003", "SCHEMA-013", "PROVABILITY-001"}),
        ("kind: competitive-parity", {"SCHEMA-003", "SCHEMA-013", "PROVABILITY-001"}),
        ("author: somebody", {"SCHEMA-003", "SCHEMA-013", "PROVABILITY-001"}),
        ("kind: kernal", {"SCHEMA-003", "SCHEMA-013", "PROVABILITY-001", OURS}),
    ],
)
def test_kinds(tmp_path: Path, kind: str, broken: set[str]) -> None:
    """Only kernel contracts need equations, gate and proofs; the message names the default kind."""
    text = KERNEL.replace("  description: what a softmax is\n", f"  {kind}\n")
    for part in (EQUATIONS, HARNESSES, GATE):
        text = text.replace(part, "")
    found = judged(written(tmp_path, text))
    told = [one for one in found.findings if one.rule.level != "info"]
    published = {one.rule.id for one in told if "has no check" not in one.message}
    assert broken <= published <= broken | {OURS, UNREADABLE}
    default = [one for one in told if "metadata.kind is not given" in one.message]
    assert bool(default) == (kind == "author: somebody")


def test_names_of_later_versions(tmp_path: Path) -> None:
    """A list of equations and the later names of keys are read like the earlier ones."""
    text = KERNEL.replace(
        EQUATIONS, "equations:\n  - {id: softmax, formula: s(x)}\n  - {id: shift}\n"
    )
    for old, new in (
        ("property:", "statement:"),
        ("prediction:", "expected:"),
        ("if_fails:", "fails_if:"),
        ("formal:", "verification:"),
    ):
        text = text.replace(old, new)
    found = judged(written(tmp_path, text)).findings
    places = [(one.rule.id, one.item) for one in found if one.rule.id.startswith("SCHEMA")]
    assert places == [("SCHEMA-004", "equations.shift.formula")]
