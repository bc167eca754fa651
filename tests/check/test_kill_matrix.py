"""The kill matrix: its rows and tables, and every planted bug against the clauses that claim it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from entrenar_py.check import clauses as checks
from entrenar_py.check import kill_matrix
from entrenar_py.check.kill_matrix import Row
from entrenar_py.check.reports import terminal
from entrenar_py.shared import mutants, package_data
from entrenar_py.shared.errors import ContractError, UsageError
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Counterexample, Finding, Verdict, inconclusive
from tests.conftest import has_adapter, has_peft

SCENARIO = Scenario(system="reference", workload="linear", world_size=2, seed=0)
MUTANT = Variant(
    name="planted",
    summary="a bug",
    plants={},
    scenario=SCENARIO,
    source="somewhere #1",
    invariants=("F-DP-001",),
    place={"step": 1, "rank": 0},
)
BENIGN = Variant(
    name="harmless", summary="no bug", plants={}, scenario=SCENARIO, tried=("F-DP-001",)
)
HELD = Finding(invariant="F-DP-001", verdict=Verdict.HELD, compared=3)
UNKNOWN = inconclusive("F-DP-001", "the run crashed")


def falsified(step: int | None = None, rank: int | None = None) -> Finding:
    """Return a finding whose counterexample has this place."""
    found = Counterexample(message="broken", step=step, rank=rank)
    return Finding(
        invariant="F-DP-001",
        verdict=Verdict.FALSIFIED,
        compared=1,
        reason="broken",
        counterexample=found,
    )


def row(variant: Variant, finding: Finding, *, invariant: str = "F-DP-001") -> Row:
    return Row(variant=variant, invariant=invariant, finding=finding)


def test_a_mutant_is_killed_at_the_planted_place_only() -> None:
    """Another place is a wrong reason; a crash or a held clause means that the mutant survived."""
    right = row(MUTANT, falsified(step=1, rank=0))
    elsewhere = row(MUTANT, falsified(step=1, rank=1))
    assert (right.killed, right.place_right, right.right) == (True, True, True)
    assert (elsewhere.killed, elsewhere.place_right, elsewhere.right) == (True, False, False)
    for finding in (HELD, UNKNOWN):
        survivor = row(MUTANT, finding)
        assert (survivor.killed, survivor.place_right, survivor.right) == (False, False, False)
        assert survivor.outcome == "SURVIVED"


def test_a_benign_variant_must_hold_where_it_is_tried() -> None:
    """A crashed run is not a held clause, so the row is wrong."""
    assert row(BENIGN, HELD).right
    assert not row(BENIGN, UNKNOWN).right
    assert not row(BENIGN, falsified(step=0)).right
    assert row(BENIGN, UNKNOWN).outcome == "INCONCLUSIVE"


def test_a_benign_variant_may_not_alarm_elsewhere() -> None:
    """Other clauses may be inconclusive on a benign variant, but not falsified."""
    assert row(BENIGN, HELD, invariant="F-DP-006").right
    assert not row(BENIGN, falsified(step=0), invariant="F-DP-006").right
    unknown = row(BENIGN, UNKNOWN, invariant="F-DP-006")
    assert unknown.right
    assert not unknown.silent
    assert unknown.outcome == "inconclusive"


def test_all_right_needs_rows() -> None:
    """Without rows the matrix is not right."""
    killed = row(MUTANT, falsified(step=1, rank=0))
    assert kill_matrix.all_right([row(BENIGN, HELD), killed])
    assert not kill_matrix.all_right([row(BENIGN, HELD), row(MUTANT, HELD)])
    assert not kill_matrix.all_right([])


def test_one_wrong_row_spoils_its_variant() -> None:
    """The summary counts variants, not rows."""
    rows = [
        row(MUTANT, falsified(step=1, rank=0)),
        row(MUTANT, HELD, invariant="F-DP-005"),
        row(BENIGN, HELD),
        row(BENIGN, UNKNOWN, invariant="F-DP-006"),
    ]
    assert kill_matrix.summary(rows) == (
        "0 of 1 mutants killed for the right reason, 1 of 1 benign variants silent"
    )


def printed(table: Table, *, tty: bool) -> list[str]:
    """Return the lines on a terminal of 100 columns or in a pipe, without colour."""
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=tty, color_system=None)
    terminal.print_table(console, table)
    return file.getvalue().splitlines()


def test_a_terminal_of_100_columns_shows_all(matrix: list[Row]) -> None:
    """No line is wider than the terminal, and no name or clause is broken."""
    for table in (kill_matrix.mutants_table(matrix), kill_matrix.benign_table(matrix)):
        lines = printed(table, tty=True)
        assert max(map(len, lines)) <= 100
    names = {row.variant.name for row in matrix}
    lines = printed(kill_matrix.mutants_table(matrix), tty=True) + printed(
        kill_matrix.benign_table(matrix), tty=True
    )
    assert names <= {line.split()[0] for line in lines if line.strip()}


def test_in_a_pipe_a_row_is_a_line(matrix: list[Row]) -> None:
    """Name, source and place of every mutant are complete on its line."""
    lines = printed(kill_matrix.mutants_table(matrix), tty=False)
    for one in matrix:
        found = one.finding.counterexample
        if not one.variant.benign and found is not None:
            whole = (one.variant.name, one.variant.source, one.invariant, found.place())
            assert any(all(text in line for text in whole) for line in lines), one.variant.name


def test_a_benign_variant_is_one_row(matrix: list[Row]) -> None:
    """A benign variant has one row, however many clauses judged it."""
    names = [row.variant.name for row in matrix if row.variant.benign]
    lines = printed(kill_matrix.benign_table(matrix), tty=False)
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in names] == [
        *dict.fromkeys(names)
    ]


def test_what_went_wrong_is_marked() -> None:
    """Survivors, wrong places and false alarms are marked by words, not by colour alone."""
    rows = [
        row(MUTANT, falsified(step=1, rank=0)),
        row(MUTANT, falsified(step=2)),
        row(MUTANT, HELD),
    ]
    text = "\n".join(printed(kill_matrix.mutants_table(rows), tty=True))
    for words in ("somewhere #1", "step 1, rank 0", "right", "wrong", "SURVIVED"):
        assert words in text
    judged = [
        row(BENIGN, falsified(step=0)),
        row(BENIGN, UNKNOWN, invariant="F-DP-006"),
        row(BENIGN, HELD, invariant="F-DP-002"),
    ]
    (line,) = [
        line for line in printed(kill_matrix.benign_table(judged), tty=True) if "harmless" in line
    ]
    cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
    assert cells == ["harmless", "1 of 3", "F-DP-006", "F-DP-001 FALSIFIED"]


def test_every_mutant_is_killed_for_the_right_reason(matrix: list[Row]) -> None:
    """Each clause that a mutant names is falsified, at the planted place."""
    planted = [row for row in matrix if not row.variant.benign]
    assert len({row.variant.name for row in planted}) >= 50
    wrong = [(row.variant.name, row.invariant, row.finding) for row in planted if not row.right]
    assert wrong == []


def test_every_benign_variant_is_silent(matrix: list[Row]) -> None:
    """Each clause that a benign variant is tried on holds, and no other is falsified."""
    harmless = [row for row in matrix if row.variant.benign]
    assert len({row.variant.name for row in harmless}) >= 12
    assert [(r.variant.name, r.invariant, r.finding) for r in harmless if not r.right] == []
    tried = [row for row in harmless if row.invariant in row.variant.tried]
    assert all(row.silent and row.finding.compared > 0 for row in tried)


def test_every_clause_kills(matrix: list[Row]) -> None:
    """Every clause of the shipped contracts kills a mutant."""
    known = set(kill_matrix.invariants())
    if not has_adapter():
        known -= {f"F-WGPU-{number:03}" for number in range(2, 10)}
    if not has_peft():
        known = {name for name in known if not name.startswith(("F-FT-", "F-LP-", "F-KD-"))}
    assert {row.invariant for row in matrix if row.killed} == known


def test_every_training_clause_is_silent_on_something_right(matrix: list[Row]) -> None:
    """Every clause of training holds on a benign variant."""
    training = {
        name
        for name, clause in kill_matrix.invariants().items()
        if (check := checks.bind(clause)) is not None and check.explores
    }
    assert {row.invariant for row in matrix if row.variant.benign and row.silent} >= training


def test_contracts_and_catalogue_agree() -> None:
    """A clause's `mutants` are the mutants that name the clause, each once."""
    claims = {
        name: sorted(v.name for v in mutants.catalogue().values() if name in v.invariants)
        for name in kill_matrix.invariants()
    }
    written = {name: sorted(clause.mutants) for name, clause in kill_matrix.invariants().items()}
    assert written == claims
    assert len(written) >= 90, "no clause was lost"
    assert all(written.values())


def test_a_mutant_is_judged_by_all_who_claim_it() -> None:
    """A mutant is judged by the clauses it names and those that name it, each once."""
    clauses = {
        name: replace(clause, mutants=("planted",) if name < "F-DP-003" else ())
        for name, clause in kill_matrix.invariants().items()
    }
    assert kill_matrix.judges(MUTANT, clauses) == ["F-DP-001", "F-DP-002"]
    assert kill_matrix.judges(replace(MUTANT, invariants=("F-TI-001",)), clauses) == [
        *("F-TI-001", "F-DP-001", "F-DP-002")
    ]


def test_a_benign_variant_is_judged_by_every_clause_of_training() -> None:
    """A benign variant is judged first by the clauses it is tried on, never by probes' clauses."""
    tried = ("F-TI-008", "F-DP-001")
    judges = kill_matrix.judges(replace(BENIGN, tried=tried), kill_matrix.invariants())
    assert tuple(judges[:2]) == tried
    of_training = [check.id for check in checks.CHECKS.values() if check.explores]
    assert sorted(judges) == sorted(of_training)
    assert not {"F-DP-004", "F-WGPU-001", "F-HET-001", "F-HET-002"} & set(judges)


def test_a_benign_variant_is_no_planted_bug() -> None:
    """A clause's `mutants` may name only variants that must break it."""
    known = mutants.catalogue()
    assert mutants.names() == tuple(name for name in known if not known[name].benign), (
        "write falsification/names.txt anew: docs.generate.write_names"
    )


def test_a_contract_with_an_unknown_bug_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contract that names an unknown mutant is refused before any is tried."""
    original = package_data.contract_path("distributed-training-v1").read_text(encoding="utf-8")
    path = tmp_path / "typing-error-v1.yaml"
    path.write_text(original.replace("[shard-lost,", "[shard-losst,"), encoding="utf-8")
    monkeypatch.setattr(package_data, "shipped_contracts", lambda: [path])
    with pytest.raises(ContractError) as caught:
        kill_matrix.invariants()
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}:")
    said = "mutants: 'shard-losst' is not a planted bug; did you mean 'shard-lost'?"
    assert said in problem


def test_a_clause_that_no_contract_has() -> None:
    """The message names the variant and what the contracts have."""
    with pytest.raises(UsageError, match="variant planted: clause 'F-DP-001' is not in the"):
        kill_matrix.run([MUTANT], {})


def test_rows_are_told_as_they_come() -> None:
    """`on_row` is called with each row in order, first the clauses that a variant is tried on."""
    heard: list[Row] = []
    variant = mutants.catalogue()["more-ranks-than-samples"]
    rows = kill_matrix.run([variant], kill_matrix.invariants(), heard.append)
    assert rows == heard
    assert tuple(row.invariant for row in rows)[: len(variant.tried)] == variant.tried


@pytest.mark.parametrize(
    ("variant", "finding", "code", "words"),
    [
        (MUTANT, falsified(step=1, rank=0), 0, "1 of 1 mutants killed for the right reason"),
        (
            MUTANT,
            falsified(step=2),
            1,
            "points at step 2, but the bug was planted at step 1, rank 0",
        ),
        (MUTANT, falsified(), 1, "points at broken, but the bug was planted at step 1, rank 0"),
        (MUTANT, HELD, 1, "planted, F-DP-001: no check found it"),
        (MUTANT, UNKNOWN, 1, "planted, F-DP-001: the run crashed"),
        (BENIGN, HELD, 0, "1 of 1 benign variants silent"),
        (BENIGN, falsified(step=0), 1, "harmless, F-DP-001: broken"),
    ],
)
def test_show(
    variant: Variant, finding: Finding, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 0 only if all rows are right. Each wrong row is explained on a line."""
    clause = replace(kill_matrix.invariants()["F-DP-001"], mutants=())
    monkeypatch.setattr(kill_matrix, "invariants", lambda: {clause.id: clause})
    monkeypatch.setattr(mutants, "catalogue", lambda: {variant.name: variant})
    monkeypatch.setattr("entrenar_py.check.harness.runner.Runner.try_scenario", lambda *_: finding)
    console = Console(file=io.StringIO(), width=40)
    assert kill_matrix.show(console) == code
    assert isinstance(console.file, io.StringIO)
    assert words in console.file.getvalue()


def test_show_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an interrupt the known rows and the progress are printed, and the exit code is 4."""
    variants = {one.name: one for one in (MUTANT, BENIGN)}
    clause = replace(kill_matrix.invariants()["F-DP-001"], mutants=())
    monkeypatch.setattr(kill_matrix, "invariants", lambda: {clause.id: clause})
    monkeypatch.setattr(mutants, "catalogue", lambda: variants)
    findings = iter([falsified()])

    def interrupted(*_: object) -> Finding:
        try:
            return next(findings)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("entrenar_py.check.harness.runner.Runner.try_scenario", interrupted)
    console = Console(file=io.StringIO(), width=80)
    assert kill_matrix.show(console) == 4
    assert isinstance(console.file, io.StringIO)
    assert MUTANT.name in console.file.getvalue()
    assert "interrupted in variant 1 of 2" in console.file.getvalue()
