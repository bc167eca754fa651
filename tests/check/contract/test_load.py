"""The contract loader on valid files: shipped contracts, and contracts written by others."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py.check import contract
from entrenar_py.check.contract import layout
from entrenar_py.shared import package_data, scenario
from entrenar_py.shared.errors import ContractError
from tests.check.contract import known

DATA = Path(__file__).parent / "data"
FOREIGN = DATA / "foreign-trainer-v1.yaml"
OURS = ("distributed-training-v1.yaml", "training-integrity-v1.yaml")
HEAD = "metadata: {version: 1, references: [a paper]}\n"


@pytest.mark.parametrize("name", OURS)
def test_our_contracts_load_under_strict(name: str) -> None:
    """Shipped contracts load without an error or a warning."""
    loaded = contract.load(package_data.contract_path(name), vocabulary=known.OURS, strict=True)
    assert loaded.warnings == ()
    assert loaded.version == "1.0.0"
    assert loaded.name == name
    assert loaded.gate is not None


def test_our_contracts_hold_the_seventeen_clauses() -> None:
    """Nine and eight clauses, each bound to a check of its own; all but one have scenarios."""
    loaded = [
        contract.load(package_data.contract_path(name), vocabulary=known.OURS) for name in OURS
    ]
    assert [len(one.invariants) for one in loaded] == [9, 8]
    clauses = [clause for one in loaded for clause in one.invariants]
    assert len({clause.check for clause in clauses}) == 17
    assert all(clause.tolerance_kind and clause.statement and clause.group for clause in clauses)
    assert [clause.id for clause in clauses if not clause.scenarios] == ["F-DP-004"]  # many
    for clause in clauses:
        for entry in clause.scenarios:
            assert list(scenario.expand(entry))


def test_a_foreign_contract_is_read_wherever_its_clauses_stand() -> None:
    """Clauses at any depth are found with group, text numbers and list texts."""
    loaded = contract.load(FOREIGN, vocabulary=known.OURS)
    groups = {clause.id: clause.group for clause in loaded.invariants}
    assert groups == {
        "F-DP-001": "data_parallel.weight_consistency",
        "F-DP-002": "data_parallel.weight_consistency",
        "F-DP-005": "data_parallel.loss.nested",
        "F-NET-001": "network",
    }
    first, second, parity, heartbeat = loaded.invariants
    assert first.critical
    assert first.tolerance == 0.0
    assert first.precondition == "all workers connected; same initial weights"
    assert (second.tolerance, second.tolerance_kind, second.severity) == (None, None, "P0")
    assert parity.tolerance == 0.01
    assert heartbeat.statement == "A silent worker is dropped after the timeout"
    assert str(heartbeat.position) == f"{FOREIGN}:40:5"


def test_a_foreign_contract_loses_nothing() -> None:
    """Free blocks, equations and harnesses are kept; version and date stay text as written."""
    loaded = contract.load(FOREIGN, vocabulary=known.OURS)
    assert loaded.version == "1.10"
    assert loaded.metadata["created"] == "2025-11-30"
    assert loaded.metadata["owner"] == "training-team"
    assert loaded.blocks["data_parallel"] == {
        "overview": "Gradients are averaged by a coordinator."
    }
    assert "network" not in loaded.blocks
    assert loaded.blocks["simulation"]["bandwidth_gbps"] == 10
    assert loaded.blocks["kani_harnesses"][0]["harness"] == "verify_allreduce"
    assert loaded.blocks["equations"]["loss_scale"] == "L = sum(L_i) / N"
    assert loaded.falsification_tests[0].test.startswith("#[test]")


def test_a_foreign_contract_lists_its_warnings_in_order() -> None:
    """Missing and uncovered parts are warnings, unread keys are notes, each with its place."""
    loaded = contract.load(FOREIGN, vocabulary=known.OURS)
    expected = [
        ("9:16: note", "softmax-kernel-v1"),
        ("11:3: note", "metadata: not read, but kept as data: owner"),
        ("30:7: note", "clauses: not read, but kept as data: owner"),
        ("40:5: warning", "F-NET-001 has no check"),
        ("78:5: warning", "FALSIFY-DP-003: if_fails is missing"),
        ("97:1: note", "no clause is in simulation"),
        ("102:3: note", "no clause decides 'loss_scale', 'every worker agrees after 10 steps'"),
    ]
    found = [one.line.removeprefix(f"{FOREIGN}:") for one in loaded.problems]
    assert [": ".join(line.split(": ")[:2]) for line in found] == [place for place, _ in expected]
    for line, (_, part) in zip(found, expected, strict=True):
        assert part in line
    with pytest.raises(ContractError) as caught:
        contract.load(FOREIGN, vocabulary=known.OURS, strict=True)
    errors = [warning.replace(": warning: ", ": error: ", 1) for warning in loaded.warnings]
    assert caught.value.problems == errors


def test_nothing_in_a_contract_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code in `test` fields has no effect."""
    monkeypatch.chdir(tmp_path)
    contract.load(FOREIGN, vocabulary=known.OURS)
    assert list(tmp_path.iterdir()) == []


def test_the_digest_names_the_bytes(tmp_path: Path) -> None:
    """One more byte changes the digest of 32 hex digits."""
    first, second = known.load(tmp_path, HEAD), known.load(tmp_path, HEAD + "\n")
    assert len(first.digest) == len(second.digest) == 32
    assert first.digest != second.digest


@pytest.mark.parametrize("word", ["bitwise", "exact"])
def test_a_word_for_equality_is_a_tolerance(tmp_path: Path, word: str) -> None:
    """`tolerance: bitwise` is read as 0 of that kind."""
    (clause,) = known.load(tmp_path, HEAD + f"c: [{{id: A, tolerance: {word}}}]").invariants
    assert (clause.tolerance, clause.tolerance_kind) == (0.0, word)


def test_a_word_for_equality_may_not_contradict_its_kind(tmp_path: Path) -> None:
    """`tolerance: exact` with another `tolerance_kind` is an error."""
    with pytest.raises(ContractError, match="tolerance is a finite number"):
        known.load(tmp_path, HEAD + "c: [{id: A, tolerance: exact, tolerance_kind: ulp}]")


def test_a_clause_falls_back_to_what_it_has(tmp_path: Path) -> None:
    """The name defaults to the id, the statement to the postcondition, the severity to P1."""
    text = HEAD + "c: [{id: 7, postcondition: holds, tolerance: , critical: }]"
    (clause,) = known.load(tmp_path, text).invariants
    assert (clause.id, clause.name, clause.statement) == ("7", "7", "holds")
    assert (clause.severity, clause.tolerance, clause.critical) == ("P1", None, False)


def test_clauses_inside_an_unknown_key_of_a_clause_are_found(tmp_path: Path) -> None:
    """Such a key is not listed as unread; other unknown keys are."""
    text = HEAD + "c: [{id: A, invariant: a, parts: [{id: B}], more: [1]}]\nfree: [[], [1]]"
    loaded = known.load(tmp_path, text)
    assert [(one.id, one.group) for one in loaded.invariants] == [("A", "c"), ("B", "c.parts")]
    assert [line for line in loaded.notes if "not read" in line] == [
        f"{loaded.path}:2:45: note: clauses: not read, but kept as data: more"
    ]
    assert loaded.invariants[0].extra == {"more": [1]}
    assert loaded.blocks == {"free": [[], [1]]}


def test_a_mapping_without_id_among_clauses_is_listed_and_kept(tmp_path: Path) -> None:
    """It is not a clause, and stays in the contract as data."""
    loaded = known.load(tmp_path, HEAD + "c: [{id: A}, {name: lost}]")
    assert any("has no id" in line for line in loaded.warnings)
    assert loaded.blocks == {"c": [{"name": "lost"}]}


def test_what_is_missing_around_clauses_is_a_warning(tmp_path: Path) -> None:
    """A missing gate, a P0 clause without a test, and a clause without a check are warnings."""
    loaded = known.load(tmp_path, HEAD + "c: [{id: A, severity: P0}]")
    assert any("no qa_gate" in line for line in loaded.warnings)
    assert any("A is P0, but no falsification test" in line for line in loaded.warnings)
    assert any("A has no check here and will be inconclusive" in line for line in loaded.notes)


def test_the_reference_of_the_layout_names_every_key() -> None:
    """docs/contract-format.md lists every key of the layout."""
    page = (Path(__file__).parents[3] / "docs" / "contract-format.md").read_text()
    for keys in (
        *(layout.RESERVED, layout.METADATA_KEYS, layout.CLAUSE_KEYS),
        *(layout.EQUATION_KEYS, layout.OBLIGATION_KEYS),
        *(layout.TEST_KEYS, layout.GATE_KEYS),
        *(contract.SEVERITIES, contract.TOLERANCE_KINDS),
    ):
        assert [key for key in keys if f"`{key}`" not in page] == []
