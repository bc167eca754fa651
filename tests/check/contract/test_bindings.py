"""Files of bindings: the clauses they make of a contract's statements, and their errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py.check import clauses as checks
from entrenar_py.check import contract
from entrenar_py.check.contract import CheckTerms, Contract, Vocabulary, bindings, suggestions
from entrenar_py.check.harness import plan
from entrenar_py.shared import package_data
from entrenar_py.shared.errors import ContractError

SAME = CheckTerms(
    name="same_bits",
    id="F-1",
    tolerance_kinds=("bitwise", "exact"),
    takes_tolerance=False,
    decides="all workers hold the same bits",
    spoken_of="identical output",
)
NEAR = CheckTerms(
    name="nearly", id="F-2", tolerance_kinds=("relative", "absolute"), takes_tolerance=True
)
DATA = Path(__file__).parent / "data"
TERMS = Vocabulary(checks=(SAME, NEAR), mutants=lambda: ("ga-mean",))

CONTRACT = """\
metadata: {version: 1, references: [a paper]}
equations:
  mean:
    formula: m = sum / n
proof_obligations:
  - property: "All workers, identical output"
    formal: r(i) == r(j)
    tolerance: 1.0e-6
  - {property: fast, formal: t < 1 s}
falsification_tests:
  - id: T-1
    rule: mean
    prediction: output is the mean
    if_fails: a division is missing
qa_gate: {id: G, checks: [T-1]}
"""
WITH_CLAUSES = CONTRACT + "c:\n- {id: F-2, invariant: near, tolerance: 3}\n- {id: X}\n"
HEAD = "entrenar_bindings: 1\ncontract: c.yaml\nbindings:\n"
OF_TEST = "- {test: T-1, check: nearly, tolerance: 0.1, tolerance_kind: absolute, reason: so}\n"


def _load(folder: Path, bindings: str, *, text: str = CONTRACT, head: str = HEAD) -> Contract:
    """Load the contract with `bindings`, which begin on line 4."""
    (folder / "c.yaml").write_text(text)
    (folder / "b.yaml").write_text(head + bindings)
    return contract.load(folder / "c.yaml", vocabulary=TERMS, bind=[folder / "b.yaml"])


def _errors(folder: Path, bindings: str, *, head: str = HEAD) -> list[str]:
    """Return the errors, without the file's name."""
    with pytest.raises(ContractError) as caught:
        _load(folder, bindings, head=head)
    return [line.removeprefix(f"{folder / 'b.yaml'}:") for line in caught.value.problems]


def _warnings(loaded: Contract) -> list[str]:
    return [line for line in loaded.warnings if "bind" in line]


def test_a_bound_statement_is_a_clause_of_its_own(tmp_path: Path) -> None:
    """Its id, place and words are the contract's; check, tolerance and reason the binding's."""
    loaded = _load(tmp_path, OF_TEST)
    clause = next(one for one in loaded.invariants if one.id == "T-1")
    assert (clause.name, clause.statement) == ("mean", "mean; output is the mean")
    assert clause.position.line == 11
    assert (clause.check, clause.tolerance, clause.tolerance_kind) == ("nearly", 0.1, "absolute")
    assert clause.binding is not None
    assert (clause.binding.kind, clause.binding.reason) == ("test", "so")
    assert str(clause.binding.position) == f"{tmp_path / 'b.yaml'}:4:3"


def test_what_nothing_tries_is_a_clause_too_and_says_how_to_bind_it(tmp_path: Path) -> None:
    """A contract without clauses has its obligations as clauses, or else its tests."""
    (tmp_path / "c.yaml").write_text(CONTRACT)
    loaded = contract.load(tmp_path / "c.yaml", vocabulary=TERMS)
    assert [one.id for one in loaded.invariants] == ["all-workers-identical-output", "fast"]
    for one in loaded.invariants:
        assert checks.bind(one) is None
        finding = plan.Task(invariant=one, check=None).untried()
        assert "--suggest drafts a binding for it (docs/bindings.md)" in finding.reason
    head, _, rest = CONTRACT.partition("proof_obligations:")
    (tmp_path / "c.yaml").write_text(f"{head}falsification_tests:{rest.split('_tests:')[1]}")
    loaded = contract.load(tmp_path / "c.yaml", vocabulary=TERMS)
    assert [one.id for one in loaded.invariants] == ["T-1"]


def test_beside_clauses_a_test_is_none_unless_it_is_bound(tmp_path: Path) -> None:
    """In a contract with clauses, a falsification test becomes a clause only by a binding."""
    (tmp_path / "c.yaml").write_text(WITH_CLAUSES)
    loaded = contract.load(tmp_path / "c.yaml", vocabulary=TERMS)
    assert [one.id for one in loaded.invariants] == ["F-2", "X"]
    bound = _load(tmp_path, OF_TEST, text=WITH_CLAUSES).invariants
    assert [one.id for one in bound] == ["F-2", "X", "T-1"]


def test_a_statement_is_bound_in_parts(tmp_path: Path) -> None:
    """Each part has its own id; the gate and --only select all parts by the statement's id."""
    loaded = _load(
        tmp_path,
        "- {test: T-1, part: first, check: same_bits, reason: so}\n"
        "- {test: T-1, part: second, not_tried: nobody knows how}\n",
    )
    first, second = loaded.invariants[-2:]
    assert (first.id, second.id) == ("T-1:first", "T-1:second")
    assert len(plan.select(loaded, only=["T-1"])) == 2
    assert len(plan.select(loaded, only=["T-1:second"])) == 1
    assert all("T-1" in one.gate_names for one in (first, second))
    untried = plan.Task(invariant=second, check=None).untried()
    assert untried.reason == "nothing was compared: nobody knows how"


def test_a_clause_is_bound_otherwise_than_by_its_id(tmp_path: Path) -> None:
    """The binding fills in what the clause leaves open; no warning of a missing check remains."""
    loaded = _load(
        tmp_path,
        "- {clause: F-2, check: nearly, tolerance_kind: absolute, reason: so}\n"
        "- {clause: X, check: same_bits, severity: P0, gate_names: [other], reason: so}\n",
        text=WITH_CLAUSES,
    )
    assert [(c.id, c.check, c.tolerance, c.severity) for c in loaded.invariants] == [
        ("F-2", "nearly", 3.0, "P1"),
        ("X", "same_bits", None, "P0"),
    ]
    assert "other" in loaded.invariants[1].gate_names
    assert not [line for line in loaded.warnings if "has no check" in line]


def test_what_a_binding_demands_less_is_told(tmp_path: Path) -> None:
    """A milder severity, another check and a wider tolerance are warnings."""
    loaded = _load(
        tmp_path,
        "- {clause: F-2, check: same_bits, severity: P2, reason: so}\n"
        "- {clause: X, check: nearly, tolerance: 9, tolerance_kind: absolute, severity: P1,"
        " reason: so}\n",
        text=CONTRACT
        + "c:\n- {id: F-2, invariant: near, severity: P0, check: nearly}\n"
        + "- {id: X, invariant: x, severity: P1, tolerance: 3, tolerance_kind: relative}\n",
    )
    lower, wider = (one.binding for one in loaded.invariants[-2:])
    assert lower is not None
    assert lower.departures == (
        "severity P2 instead of the clause's P0",
        "check same_bits instead of the clause's nearly",
    )
    assert wider is not None
    assert wider.departures == (
        "tolerance_kind absolute instead of the clause's relative",
        "tolerance 9 is wider than the 3 of the clause",
    )
    told = [line for line in loaded.warnings if "binding of" in line]
    assert {line.split("warning: ")[1] for line in told} == {
        f"binding of {clause}: {one}"
        for clause, made in (("F-2", lower), ("X", wider))
        for one in made.departures
    }


def test_an_edited_sentence_makes_its_binding_stale(tmp_path: Path) -> None:
    """A binding holds the digest of its statement; a statement that was edited is not tried."""
    bindings = '- {obligation: fast, statement: "574edaa3", check: same_bits, reason: so}\n'
    assert not _warnings(_load(tmp_path, bindings))
    broken_over_lines = CONTRACT.replace("t < 1 s", "t <\n   1 s")
    assert not _warnings(_load(tmp_path, bindings, text=broken_over_lines))
    edited = _load(tmp_path, bindings, text=CONTRACT.replace("t < 1 s", "t < 2 s"))
    (warning,) = _warnings(edited)
    assert (
        ":4:33: warning: binding of fast: its binding was made for a different wording" in warning
    )
    clause = next(one for one in edited.invariants if one.name == "fast")
    assert checks.bind(clause) is None
    assert (
        "different wording (574edaa3, now "
        in plan.Task(invariant=clause, check=None).untried().reason
    )


def test_what_is_wrong_is_said_where_it_stands(tmp_path: Path) -> None:
    """Each error has its place and the nearest known name, as data/bindings-errors.txt lists."""
    for example in (DATA / "bindings-errors.txt").read_text().split("\n\n"):
        bindings, error = example.rstrip("\n").split("\n=> ")
        assert _errors(tmp_path, bindings)[0] == error


def test_a_file_of_bindings_is_for_one_contract_and_says_that_it_is_one(tmp_path: Path) -> None:
    """A wrong contract's name is refused, and so is a registry of functions or a contract."""
    found = _errors(tmp_path, OF_TEST, head=HEAD.replace("c.yaml", "d.yaml"))
    assert found == [
        "2:11: error: bindings: contract='d': the file was read for 'c'; correct the name"
    ]
    (error,) = _errors(tmp_path, OF_TEST, head="version: 1\ncontract: c\nbindings:\n")
    assert "no key entrenar_bindings: 1, so this is not a file of bindings" in error
    with pytest.raises(ContractError, match="these are bindings, not a contract; give them with"):
        contract.load(Path(_written(tmp_path / "x.yaml", HEAD + OF_TEST)), vocabulary=TERMS)
    with pytest.raises(ContractError, match=r"gone\.yaml:1:1: error: can't be read"):
        contract.load(tmp_path / "c.yaml", vocabulary=TERMS, bind=[tmp_path / "gone.yaml"])


def _written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_the_file_beside_the_contract_is_found_and_one_that_is_given_wins(tmp_path: Path) -> None:
    """The given file wins for each statement that it binds; the others keep their binding."""
    both = "- {test: T-1, not_tried: a}\n- {obligation: fast, not_tried: b}\n"
    (tmp_path / "c.bindings.yaml").write_text(HEAD + both)
    loaded = _load(tmp_path, OF_TEST)
    said = {c.id: c.binding.untried for c in loaded.invariants if c.binding is not None}
    assert (said["T-1"], said["fast"]) == ("", "b")


def test_shipped_bindings_are_for_the_contract_that_they_were_written_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contract with the same file name gets them only if one of its statements is the same."""
    bindings = (
        '- {obligation: fast, statement: "574edaa3", not_tried: b}\n- {test: X, not_tried: x}\n'
    )
    (tmp_path / "package_data.yaml").write_text(HEAD + bindings)
    monkeypatch.setattr(package_data, "bindings", lambda stem: tmp_path / "package_data.yaml")
    (tmp_path / "c.yaml").write_text(CONTRACT)
    loaded = contract.load(tmp_path / "c.yaml", vocabulary=TERMS)
    assert [c.id for c in loaded.invariants if c.binding and c.binding.position] == ["fast"]
    (tmp_path / "c.yaml").write_text(CONTRACT.replace("t < 1 s", "t < 2 s"))
    other = contract.load(tmp_path / "c.yaml", vocabulary=TERMS)
    assert not [c.id for c in other.invariants if c.binding and c.binding.position]
    assert not _warnings(other)


def test_a_draft_is_refused_until_its_guesses_are_read_and_loads_after(tmp_path: Path) -> None:
    """The draft loads only after the `guess` lines are removed."""
    loaded = _load(tmp_path, OF_TEST)
    draft = suggestions.draft(loaded, TERMS.checks or ())
    assert "T-1" not in draft, "what is bound already needs no guess"
    body = draft.partition("bindings:\n")[2]
    errors = _errors(tmp_path, body)
    assert len(errors) == 3
    assert all("is still a guess" in error for error in errors)
    read = "".join(line + "\n" for line in body.splitlines() if "guess:" not in line)
    clauses = {one.id: one for one in _load(tmp_path, read).invariants}
    assert clauses["all-workers-identical-output"].check == "same_bits"
    assert clauses["fast"].binding is not None
    assert clauses["fast"].binding.untried == "no check decides this"


def test_lists_that_multiply_without_end_are_refused(tmp_path: Path) -> None:
    """The bound is on all bindings of a contract together."""
    seeds = list(range(99))
    parts = (
        f"- {{test: T-1, part: {part}, check: same_bits, reason: r,"
        f" scenarios: [{{seed: {seeds}, repeat: {seeds}}}]}}\n"
        for part in "abc"
    )
    (problem,) = _errors(tmp_path, "".join(parts))
    assert problem.endswith("lists multiply to over 10000 scenarios; use shorter lists")


def test_a_folder_in_the_place_of_bindings_is_told(tmp_path: Path) -> None:
    """A file that can't be read is an error. An empty one, which a shell creates, is ignored."""
    beside = tmp_path / "own.bindings.yaml"
    beside.mkdir()
    assert bindings._says_something(beside)
    beside.rmdir()
    assert not bindings._says_something(beside)
    beside.touch()
    assert not bindings._says_something(beside)
