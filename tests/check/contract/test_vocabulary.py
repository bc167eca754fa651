"""Names from outside a contract that clauses use: checks, tolerance kinds, planted bugs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

import pytest

from entrenar_py.check import contract
from entrenar_py.check.contract import CheckTerms, Vocabulary, gates
from entrenar_py.shared.errors import ContractError
from tests.check.contract import known

SAME = CheckTerms(
    name="same_bits", id="F-1", tolerance_kinds=("bitwise", "exact"), takes_tolerance=False
)
EITHER = CheckTerms(
    name="either", id="F-3", tolerance_kinds=("relative", "absolute"), takes_tolerance=True
)
NEAR = CheckTerms(name="nearly", id="F-2", tolerance_kinds=("relative",), takes_tolerance=True)
HEAD = "metadata: {version: 1, references: [a paper]}\nqa_gate: {id: G}\nc:\n"


def _vocabulary(mutants: Collection[str] | None = ("ga-mean", "sum-not-mean")) -> Vocabulary:
    return Vocabulary(checks=(SAME, NEAR, EITHER), mutants=lambda: mutants)


def _warnings(
    tmp_path: Path, *clauses: str, vocabulary: Vocabulary | None = None
) -> tuple[str, ...]:
    """Return the warnings of a contract with `clauses` from line 4 on, without the file's name."""
    path = tmp_path / "c.yaml"
    path.write_text(HEAD + "".join(f"- {{{clause}}}\n" for clause in clauses))
    loaded = contract.load(path, vocabulary=vocabulary or _vocabulary())
    return tuple(line.removeprefix(f"{path}:") for line in loaded.warnings)


def _errors(tmp_path: Path, *clauses: str) -> list[str]:
    with pytest.raises(ContractError) as caught:
        _warnings(tmp_path, *clauses)
    return [line.removeprefix(f"{tmp_path / 'c.yaml'}:") for line in caught.value.problems]


def test_an_unknown_check_is_an_error_where_it_stands(tmp_path: Path) -> None:
    """The message has the nearest name, or once the whole list. The clause's id does not help."""
    found = _errors(tmp_path, "id: F-1, check: same_bit", "id: B, check: zz", "id: C, check: zzz")
    where = "(docs/contract-format.md has the list)"
    assert found == [
        f"4:20: error: clause F-1: check 'same_bit' is unknown; did you mean 'same_bits'? {where}",
        "5:18: error: clause B: check 'zz' is unknown; known are same_bits, nearly, either "
        + where,
        f"6:18: error: clause C: check 'zzz' is unknown {where}",
    ]


def test_a_clause_without_a_check_is_a_warning(tmp_path: Path) -> None:
    """It will be inconclusive. A clause whose id is that of a check is bound to it."""
    (warning,) = _warnings(tmp_path, "id: F-1", "id: F-9")
    assert warning.startswith("5:3: warning: clause F-9 has no check here and will be inconclusive")


def test_a_check_is_found_by_name_before_id(tmp_path: Path) -> None:
    """The tolerance is judged by the check that the clause names, as in the harness."""
    assert _warnings(tmp_path, "id: F-1, check: nearly, tolerance_kind: relative") == ()


@pytest.mark.parametrize(
    ("clause", "warning"),
    [
        ("check: nearly, tolerance: 0.01", None),
        ("check: nearly, tolerance: 0.01, tolerance_kind: relative", None),
        ("check: same_bits, tolerance: 0", None),
        ("check: same_bits, tolerance: 0, tolerance_kind: exact", None),
        ("check: same_bits, tolerance: bitwise", None),
        ("tolerance: 0.01, tolerance_kind: ulp, id: F-9", None),
        (
            "check: same_bits, tolerance: 0.01, tolerance_kind: relative",
            "4:62: warning: clause A: check same_bits has no tolerance_kind 'relative'; "
            "use bitwise or exact",
        ),
        (
            "check: nearly, tolerance: bitwise",
            "4:37: warning: clause A: check nearly has no tolerance_kind 'bitwise'; use relative",
        ),
        (
            "check: either, tolerance: 0.01",
            "4:37: warning: clause A: tolerance 0.01 has no effect without a kind; add "
            "tolerance_kind: relative or absolute",
        ),
        ("check: either, tolerance: 0.01, tolerance_kind: absolute", None),
        (
            "check: same_bits, tolerance: 0.01",
            "4:40: warning: clause A: tolerance 0.01 has no effect: check same_bits judges by "
            "bitwise or exact and allows no difference; use 0",
        ),
    ],
)
def test_a_tolerance_is_one_that_the_check_looks_at(
    tmp_path: Path, clause: str, warning: str | None
) -> None:
    """Another kind, or a difference if the check allows none, is a warning at the value."""
    given = clause if "id:" in clause else f"id: A, {clause}"
    found = _warnings(tmp_path, given)
    assert len(found) == (warning is not None)
    assert (warning or "") in "".join(found)


def test_an_unknown_mutant_is_an_error_where_it_stands(tmp_path: Path) -> None:
    """Each name has its own place, with the nearest name or the page with the list."""
    found = _errors(tmp_path, "id: F-1, mutants: [ga-mean, ga-men, zzz]", "id: F-2, mutants: zz")
    clause, page = "error: clause F-1: mutants:", "docs/kill-matrix.md has the list"
    assert found == [
        f"4:32: {clause} 'ga-men' is not a planted bug; did you mean 'ga-mean'?",
        f"4:40: {clause} 'zzz' is not a planted bug; {page}",
        f"5:22: error: clause F-2: mutants: 'zz' is not a planted bug; {page}",
    ]


def test_mutants_that_are_not_installed_are_not_judged(tmp_path: Path) -> None:
    """Without the catalogue any name is accepted."""
    vocabulary = _vocabulary(mutants=None)
    assert _warnings(tmp_path, "id: F-1, mutants: [anything]", vocabulary=vocabulary) == ()


def test_mutants_are_loaded_only_where_a_clause_names_one(tmp_path: Path) -> None:
    """Loading can be slow: for a contract without mutants it isn't done."""

    def loud() -> NoReturn:
        raise AssertionError

    assert _warnings(tmp_path, "id: F-1", vocabulary=Vocabulary(checks=(SAME,), mutants=loud)) == ()


def _gate_naming(tmp_path: Path, name: str) -> contract.Contract:
    path = tmp_path / "c.yaml"
    path.write_text(
        "metadata: {version: 1, references: [a paper]}\n"
        "c: [{id: A, name: replicas}]\ngroup: {inner: {most: [{id: B}]}}\n"
        "equations: {average: sum / n}\nproof_obligations: [{property: Sums commute}]\n"
        "falsification_tests: [{id: T, rule: replicas, prediction: p, if_fails: f}]\n"
        f"qa_gate: {{checks: [{name}]}}\n"
    )
    return contract.load(path, vocabulary=known.NOTHING)


@pytest.mark.parametrize(
    ("name", "clauses"),
    [
        *(("A", "A"), ("replicas", "A"), ("c", "A"), ("T", "A")),
        *(("group", "B"), ("group.inner", "B"), ("group.inner.most", "B"), ("most", "B")),
        *(("average", ""), ("Sums commute", "")),
    ],
)
def test_a_gate_names_what_the_contract_names(tmp_path: Path, name: str, clauses: str) -> None:
    """A gate finds clauses by id, name, group, last part of a group, and test."""
    loaded = _gate_naming(tmp_path, name)
    assert loaded.gate is not None
    asked = gates.demands(loaded)
    assert ("".join(asked.clauses), asked.unresolved) == (clauses, () if clauses else (name,))
    assert not any("qa_gate" in line for line in loaded.warnings)


def test_a_slip_in_a_gate_is_a_warning_and_a_sentence_a_note(tmp_path: Path) -> None:
    """Both leave the gate undecided; contracts of others have sentences among their checks."""
    slip = _gate_naming(tmp_path, "replica")
    assert slip.warnings[-1].endswith(
        ":7:20: warning: qa_gate: check 'replica' names no clause, so the gate can't pass; "
        "did you mean 'replicas'?"
    )
    sentence = _gate_naming(tmp_path, "all workers agree")
    assert not any("qa_gate" in line for line in sentence.warnings)
    assert sentence.notes[-1].endswith(
        ":7:10: note: qa_gate is undecided: no clause decides 'all workers agree'"
    )
