"""Contracts as others publish them: each layout is read without losing anything.

The files in `layouts` were written for these tests, each in the layout of a published contract.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entrenar_py.check import contract
from entrenar_py.check.contract import Contract, gates
from entrenar_py.shared.config import composer
from entrenar_py.shared.config.composer import plain
from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.errors import ContractError
from tests.check.contract import known, published

LAYOUTS = Path(__file__).parent / "layouts"
HEAD = "metadata: {version: 1, references: [r]}\n"


def _layout(name: str) -> Contract:
    return contract.load(LAYOUTS / f"{name}.yaml", vocabulary=known.OURS)


def _notes(loaded: Contract) -> str:
    return "\n".join(loaded.notes)


def test_every_layout_loads_but_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    """The script `published` reports that all load but one, with the reason."""
    assert published.main([str(LAYOUTS)]) == 1
    *_, reason, summary = capsys.readouterr().out.splitlines()
    assert "registry.yaml:1:1: error: this is a registry of bindings" in reason
    assert summary == "8 of 9 load"


def test_a_rule_begins_with_an_id_or_is_a_name_or_is_free() -> None:
    """A rule's target is its leading id, or a name in any case; otherwise there is a note."""
    loaded = _layout("grouped-clauses-v1")
    assert [test.target for test in loaded.falsification_tests] == ["S-001", "S-002", ""]
    assert loaded.falsification_tests[2].rule == "Workers die in the middle of a sum"
    assert "named by the rule of TRY-003; it is kept as free text" in _notes(loaded)
    assert loaded.warnings == ()


@pytest.mark.parametrize(
    ("rule", "target"),
    [
        *(("A-1", "A-1"), ("A-1: sums", "A-1"), ("A-1, A-2", "A-1"), ("A-1.", "A-1")),
        *(("SUMS  AGREE", "A-1"), ("mean", "mean"), ("Laws hold", "PO-1"), ("PO-1 (law)", "PO-1")),
        *(("A-12", ""), ("A-1b", ""), ("on A-1", ""), ("A", ""), ("", "")),
    ],
)
def test_what_a_rule_means(tmp_path: Path, rule: str, target: str) -> None:
    """An id counts only as a whole word at the beginning of a rule."""
    loaded = known.load(
        tmp_path,
        f"{HEAD}c: [{{id: A-1, name: Sums agree, invariant: i}}]\nequations: {{mean: m}}\n"
        "proof_obligations: [{id: PO-1, property: Laws hold}]\n"
        f"falsification_tests: [{{id: T, rule: '{rule}', prediction: p, if_fails: f}}]\n",
    )
    assert loaded.falsification_tests[0].target == target


def test_a_rule_that_can_only_be_an_id_is_a_warning(tmp_path: Path) -> None:
    """An id that no clause has is a warning with the nearest id."""
    loaded = known.load(
        tmp_path,
        f"{HEAD}c: [{{id: F-DP-001, invariant: i}}]\n"
        "falsification_tests: [{id: T, rule: F-DP-01, prediction: p, if_fails: f}]\n",
    )
    assert "rule 'F-DP-01' names no clause; did you mean 'F-DP-001'?" in loaded.warnings[-1]


def test_steps_of_work_are_no_clauses() -> None:
    """Items with a status and without a statement are listed in a note and kept as data."""
    loaded = _layout("grouped-clauses-v1")
    assert [one.id for one in loaded.invariants] == ["S-001", "S-002", "D-001", "D-002"]
    assert "steps: STEP-1, STEP-2: no invariant" in _notes(loaded)
    assert loaded.blocks["steps"][1]["status"] == "planned"
    assert _layout("listed-obligations-v1").blocks["gap_register"][0]["id"] == "GAP-9"


@pytest.mark.parametrize(
    ("block", "item", "is_clause"),
    [
        ("c", "id: A", True),
        ("c", "id: A, description: d, reference: r", True),
        ("c", "id: A, name: n, status: done, files: [f]", False),
        ("c", "id: A, description: d, status: done", False),
        ("c", "id: A, description: d, status: done, invariant: i", True),
        ("c", "id: A, title: t, fix: f", False),
        ("c", "id: A, description: d, severity: P1, enforcement: e", True),
        ("c", "id: A, severity: high, status: open, mitigation: m", False),
        ("c", "id: A, description: d, falsification: f", True),
        ("c", "id: A, status: done, check: parity", True),
        ("obligations", "id: A, status: open, note: n", True),
        ("deep.invariants", "id: A, status: open, falsifier: f", True),
    ],
)
def test_what_makes_an_item_a_clause(
    tmp_path: Path, block: str, item: str, is_clause: bool
) -> None:
    """A statement, a severity or the name of its list does; a status or a title doesn't."""
    outer, _, inner = block.partition(".")
    text = f"{{{inner}: [{{{item}}}]}}" if inner else f"[{{{item}}}]"
    loaded = known.load(tmp_path, f"{HEAD}{outer}: {text}\n")
    assert [one.id for one in loaded.invariants] == ["A"] * is_clause
    assert ("not clauses" in _notes(loaded)) is not is_clause


def test_clauses_in_other_words() -> None:
    """Severities, flags and tolerances are read in the words of other tools."""
    agreement, order, mixed, memory = _layout("grouped-clauses-v1").invariants
    assert (agreement.critical, agreement.severity) == (True, "P0")
    assert (order.severity, order.tolerance, order.tolerance_kind) == ("P0", 1e-4, None)
    assert (mixed.tolerance, mixed.tolerance_kind) == (0.01, "relative")
    assert mixed.statement == "layout: equal on all devices; no copy"
    assert (memory.severity, memory.statement) == ("P1", "peak <= budget")
    critical, _ = _layout("validation-rules-v1").invariants
    assert (critical.severity, critical.critical) == ("P0", True)


def test_obligations_are_the_clauses_where_there_are_no_others() -> None:
    """An obligation without an id gets one from its first words, the second equal one with a
    number.
    """
    loaded = _layout("kernel-v1")
    first, second = loaded.invariants
    assert (first.id, second.id) == ("mean-lies-between-the", "mean-lies-between-the-2")
    assert first.name == "Mean lies between the extremes"
    assert first.statement == "min(x) <= m <= max(x)"
    assert (first.tolerance, first.position.line) == (1e-6, 13)
    assert [(one.id, one.has_id) for one in loaded.obligations] == [
        (first.id, False),
        (second.id, False),
    ]
    assert loaded.obligations[0].lean == {"theorem": "Mean.between", "status": "proved"}
    assert loaded.falsification_tests[0].target == first.id
    assert [one.id for one in _layout("listed-obligations-v1").invariants] == ["C-POOL-1"]


def test_equations_obligations_and_harnesses_have_places() -> None:
    """Each has the place that messages of bindings and rules refer to."""
    loaded = _layout("kernel-v1")
    (mean,), (harness,) = loaded.equations, loaded.harnesses
    assert (mean.name, mean.codomain, mean.position.line) == ("mean", "R", 7)
    assert mean.invariants == ("min(x) <= m <= max(x)",)
    assert (harness.obligation, harness.bound, harness.position.line) == ("MEAN-1", "8", 39)
    (listed,) = _layout("listed-equations-v1").equations
    assert (listed.name, listed.formula) == ("EQ-1", "decode . encode = id")
    (attack,) = _layout("listed-equations-v1").falsification_tests
    stated, _ = _layout("listed-equations-v1").obligations
    assert stated.property == "Nothing is lost"
    assert (attack.rule, attack.obligation, attack.target) == ("", "OB-1", "OB-1")


def test_invariants_by_name_are_clauses() -> None:
    """The name under `invariants` is the clause's id."""
    shape, finite = _layout("named-invariants-v1").invariants
    assert (shape.id, shape.statement) == ("same_shape", "len(y) == len(x)")
    assert (finite.group, finite.extra) == ("invariants", {})
    assert shape.extra == {"note": "always"}


def test_a_contract_without_metadata_has_it_at_the_top() -> None:
    """The version is read from the top level; pre- and postconditions and statements are found."""
    loaded = _layout("flat-v1")
    (clause,) = loaded.invariants
    assert loaded.version == "1.0.0"
    assert clause.precondition == "workers >= 2; All workers have the same layers"
    assert (clause.postcondition, clause.statement) == (
        "Workers equal the first one",
        "borrows: disjoint",
    )


@pytest.mark.parametrize(
    ("layout", "clauses", "unresolved"),
    [
        ("grouped-clauses-v1", ("S-001", "S-002", "D-001"), ()),
        (
            "kernel-v1",
            ("mean-lies-between-the",),
            ("empty_input", "TRY-M-002", "Kani harnesses (pass_criteria)"),
        ),
        (
            "thresholds-v1",
            (),
            (
                "required test test_fresh",
                *("min_coverage: 0.90", "max_complexity: 10", "coverage_threshold: 0.8"),
            ),
        ),
        ("flat-v1", (), ("validation", "falsification")),
        ("named-invariants-v1", ("same_shape",), ()),
        ("validation-rules-v1", (), ()),
    ],
)
def test_what_a_gate_asks_for(
    layout: str, clauses: tuple[str, ...], unresolved: tuple[str, ...]
) -> None:
    """Clauses are found by group, by words and by the criteria; other demands are unresolved."""
    asked = gates.demands(_layout(layout))
    assert (asked.clauses, asked.unresolved) == (clauses, unresolved)


@pytest.mark.parametrize(
    ("checks", "criteria", "clauses", "unresolved"),
    [
        ("", "F-A-001..003 pass", "F-A-001 F-A-002", "F-A-003"),
        ("", "F-A-002 to F-A-001", "F-A-001", "F-A-002 to F-A-001"),  # backwards: of none
        ("", "F-A-001 - F-A-002", "F-A-001 F-A-002", ""),
        ("", "F-A-001, 002 and 003", "F-A-001 F-A-002", "F-A-003"),
        ("", "F-A-001, 100% of 002", "F-A-001", ""),
        ("", "all P0 and P1 hold", "F-A-001 F-A-002", ""),
        ("", "F-A-001-002, GH-1-2", "F-A-001", "F-A-001-002"),  # a range, or no id of these
        ("", "every P1 holds", "F-A-002", ""),
        ("", "each clause holds", "F-A-001 F-A-002", ""),
        ("", "all 2 clauses hold", "F-A-001 F-A-002", ""),
        ("", "F-A-001…2 and GH-9, SHA-256", "F-A-001 F-A-002", ""),
        ("", "all P0 hold", "F-A-001", ""),
        ("", "prose", "F-A-001", ""),  # as without criteria: what is P0
        ("F-A-002", "prose", "F-A-002", ""),
        ("F-A-002", "F-A-001 passes", "F-A-002 F-A-001", ""),
        ("shared words", "F-A-001..002", "F-A-001 F-A-002", "shared words"),  # of both: of neither
        ("shared first", "F-A-001..002", "F-A-001 F-A-002", ""),
        ("shared first", "F-A-002", "F-A-002", "shared first"),  # not among the criteria's
        ("t_rule", "", "F-A-002", ""),
        ("", "T-1 passes", "F-A-002", ""),
        ("", "F-A-1..999999", "", "more than 1000 ids"),
    ],
)
def test_what_criteria_name(
    tmp_path: Path, checks: str, criteria: str, clauses: str, unresolved: str
) -> None:
    """Ids, ranges, severities and tests are found; the id of something else, an issue, demands
    nothing.
    """
    loaded = known.load(
        tmp_path,
        f"{HEAD}c: [{{id: F-A-001, name: first, severity: P0, description: shared words}},"
        " {id: F-A-002, name: second, description: shared words}]\n"
        "falsification_tests: [{id: T-1, rule: F-A-002 (t rule), prediction: p, if_fails: f},"
        " {id: T-2, rule: t rule, obligation: F-A-002, prediction: p, if_fails: f}]\n"
        f"qa_gate: {{checks: [{checks}], pass_criteria: '{criteria}'}}\n",
    )
    asked = gates.demands(loaded)
    if unresolved.startswith("more"):
        assert asked.unresolved[0] == unresolved
    else:
        assert (" ".join(asked.clauses), " ".join(asked.unresolved)) == (clauses, unresolved)


@pytest.mark.parametrize("path", sorted(LAYOUTS.glob("*-v1.yaml")), ids=lambda path: path.stem)
def test_nothing_is_dropped(path: Path) -> None:
    """Every text of the file is in the records, in the data kept with them, or in both."""
    root = composer.compose(path.read_bytes(), str(path), Problems())
    assert root is not None
    loaded = contract.load(path, vocabulary=known.OURS)
    records = (
        *(loaded.invariants, loaded.falsification_tests, loaded.equations, loaded.obligations),
        *(loaded.harnesses, loaded.gate, loaded.metadata, loaded.blocks),
    )
    kept = "\n".join(_texts([vars(one) if hasattr(one, "__dict__") else one for one in records]))
    read = {"P0", "P1", "ERROR", "WARNING", "CRITICAL", "true", "1%", "1e-4"}
    for text in _texts(plain(root)):
        assert text.strip() in kept or text in read


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for part in value.values() for text in _texts(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in _texts(part)]
    if hasattr(value, "__dict__"):
        return _texts(vars(value))
    return [str(value)]


def test_a_required_test_may_name_a_clause(tmp_path: Path) -> None:
    """A required test resolves to a clause as a check does; other demands stay unresolved."""
    loaded = known.load(
        tmp_path,
        f"{HEAD}proof_obligations: [{{property: Sums agree}}, {{property: Sums are finite}}]\n"
        "qa_gate: {required_tests: [sums_agree, sums_are_fast], min_coverage: 1}\n",
    )
    asked = gates.demands(loaded)
    assert asked.clauses == ("sums-agree",)
    assert asked.unresolved == ("required test sums_are_fast", "min_coverage: 1")


def test_a_sentence_with_a_colon_is_a_sentence(tmp_path: Path) -> None:
    """YAML reads it as a mapping. In a list of ids it stays an error."""
    loaded = known.load(tmp_path, f"{HEAD}c: [{{id: A, invariants: [so it is: a = b, and: c]}}]\n")
    assert loaded.invariants[0].statement == "so it is: a = b; and: c"
    with pytest.raises(ContractError, match="mutants is text or a list of texts"):
        known.load(tmp_path, f"{HEAD}c: [{{id: A, mutants: [so it is: a = b]}}]\n")


def test_what_is_no_contract_is_refused(tmp_path: Path) -> None:
    """A mapping that has neither metadata nor a version is an error."""
    with pytest.raises(ContractError, match="no metadata"):
        known.load(tmp_path, "services: {web: {image: x}}\n")


def test_notes_stay_notes_under_strict() -> None:
    """A contract of others without errors and warnings loads under strict."""
    path = LAYOUTS / "kernel-v1.yaml"
    assert contract.load(path, vocabulary=known.OURS, strict=True).notes
