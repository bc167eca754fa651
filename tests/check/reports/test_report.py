"""The record of a run: verdict, gate and exit code."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy

from entrenar_py.check.reports.report import Report, ending
from entrenar_py.shared.verdict import Verdict


def only(full: Report, *ids: str, checks: tuple[str, ...] = ()) -> Report:
    """Return the full report with only the entries `ids`, and a gate that names `checks`."""
    assert full.contract.gate is not None
    contract = replace(full.contract, gate=replace(full.contract.gate, checks=checks))
    entries = tuple(entry for entry in full.entries if entry.invariant.id in ids)
    return replace(full, contract=contract, entries=entries)


@pytest.mark.parametrize(
    ("ids", "strict", "allowed"),
    [
        (("F-DP-001", "F-DP-004"), 0, 0),
        (("F-DP-001", "F-DP-002"), 4, 0),
        (("F-DP-001", "F-DP-002", "F-DP-005"), 1, 1),
        ((), 5, 5),
    ],
)
def test_exit_code_follows_the_worst_verdict(
    full: Report, ids: tuple[str, ...], strict: int, allowed: int
) -> None:
    """0 held, 4 inconclusive unless allowed, 1 falsified, 5 nothing selected."""
    report = only(full, *ids)
    assert report.exit_code(allow_inconclusive=False) == strict
    assert report.exit_code(allow_inconclusive=True) == allowed


@pytest.mark.parametrize(
    ("ids", "code"), [(("F-DP-001",), 4), ((), 4), (("F-DP-002",), 4), (("F-DP-005",), 1)]
)
def test_interrupted_run_exits_4_or_1(full: Report, ids: tuple[str, ...], code: int) -> None:
    """An interrupted run exits 4, even if inconclusive is allowed, or 1 if a clause broke."""
    report = replace(only(full, *ids), interrupted=True)
    assert report.exit_code(allow_inconclusive=True) == code


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (("F-DP-001", "F-DP-004"), "exit 0: 2 held"),
        (("F-DP-001", "F-DP-002"), "exit 4: F-DP-002 inconclusive: the trace has no shard events"),
        (("F-DP-002", "F-DP-005"), "exit 1: F-DP-005 falsified"),
        ((), "exit 5: nothing selected: no clause of the contract is left to check"),
    ],
)
def test_the_exit_code_has_its_reason(full: Report, ids: tuple[str, ...], reason: str) -> None:
    """Code and reason come from one function, so that they can't differ."""
    assert str(ending([only(full, *ids)], allow_inconclusive=False)) == reason


def test_several_contracts_end_in_the_worst_code(full: Report) -> None:
    """The reason names the clauses of all contracts; what is allowed or interrupted is said."""
    held, open_, broken, empty = (
        only(full, *ids) for ids in (("F-DP-001",), ("F-DP-002",), ("F-DP-005",), ())
    )
    told = [
        ((held, held), "exit 0: 2 held"),
        ((held, empty), "exit 5: nothing selected: no clause of the contract is left to check"),
        ((empty, open_, open_), "exit 4: F-DP-002, F-DP-002 inconclusive"),
        ((held, open_, broken), "exit 1: F-DP-005 falsified"),
        (
            (held, replace(held, interrupted=True)),
            "exit 4: interrupted: these are the results so far",
        ),
    ]
    for reports, reason in told:
        assert str(ending(reports, allow_inconclusive=False)) == reason
    allowed = str(ending([held, open_], allow_inconclusive=True))
    assert allowed == "exit 0: 1 held, 1 inconclusive and allowed"


@given(data=st.data())
def test_green_needs_evidence(data: DataObject, any_report: SearchStrategy[Report]) -> None:
    """Exit 0 and a passed gate need an uninterrupted run in which every entry held.

    A run of the whole contract also exits nonzero if its gate has demands that no clause decides.
    """
    report = data.draw(any_report)
    held = bool(report.entries) and report.counts[Verdict.HELD] == len(report.entries)
    green = held and not report.interrupted and not report.gate_open
    assert (report.exit_code(allow_inconclusive=False) == 0) == green
    assert (report.verdict is Verdict.HELD) == green
    if report.gate_passed:
        assert not report.interrupted
        assert not report.gate_broken
        assert not report.gate_not_run
        assert not report.gate_unresolved


@given(data=st.data())
def test_ranked_is_worst_first(data: DataObject, any_report: SearchStrategy[Report]) -> None:
    """Entries are ranked by verdict, then by severity, and none is lost."""
    report = data.draw(any_report)
    ranks = [(-e.verdict.badness, e.invariant.severity) for e in report.ranked]
    assert ranks == sorted(ranks)
    assert set(map(id, report.ranked)) == set(map(id, report.entries))


@pytest.mark.parametrize(
    ("checks", "ids", "passed"),
    [
        (("F-DP-001",), ("F-DP-001", "F-DP-004"), True),
        (("F-DP-001",), ("F-DP-001", "F-DP-005"), None),
        (("Loss parity with one worker",), ("F-DP-001", "F-DP-005"), False),
        (("F-DP-002",), ("F-DP-002",), False),
        (("F-DP-001", "F-DP-002"), ("F-DP-001",), None),
        (("F-DP-001", "no such clause"), ("F-DP-001",), None),
        ((), ("F-DP-001", "F-DP-004"), None),
        ((), ("F-DP-001", "F-DP-002", "F-DP-004"), False),
        (("weight_consistency",), ("F-DP-001",), None),
    ],
)
def test_gate_asks_for_what_it_names(
    full: Report, checks: tuple[str, ...], ids: tuple[str, ...], passed: bool | None
) -> None:
    """A gate passes if all named (or all P0) clauses held; a missing one leaves it undecided."""
    assert only(full, *ids, checks=checks).gate_passed is passed


@pytest.mark.parametrize(
    ("checks", "ids", "strict", "allowed"),
    [
        (("F-DP-001", "F-DP-004", "soundness"), ("F-DP-001", "F-DP-004"), 4, 0),
        (("F-DP-001", "F-DP-004", "soundness"), ("F-DP-001",), 0, 0),  # a part of the contract
        (("F-DP-001", "F-DP-004"), ("F-DP-001", "F-DP-004"), 0, 0),
    ],
)
def test_a_gate_that_no_clause_decides_is_inconclusive(
    full: Report, checks: tuple[str, ...], ids: tuple[str, ...], strict: int, allowed: int
) -> None:
    """A run of the whole contract then exits 4; a run of a part does not."""
    clauses = tuple(c for c in full.contract.invariants if c.id in ("F-DP-001", "F-DP-004"))
    report = only(full, *ids, checks=checks)
    report = replace(report, contract=replace(report.contract, invariants=clauses))
    assert report.exit_code(allow_inconclusive=False) == strict
    assert report.exit_code(allow_inconclusive=True) == allowed
    assert report.gate_unresolved == tuple(name for name in checks if name == "soundness")
    assert report.gate_passed is (None if "soundness" in checks else True)
    if strict:
        assert report.gate_open == "the gate is undecided: no clause decides soundness"


def test_gate_that_names_nothing_asks_for_p0_and_critical(full: Report) -> None:
    """A gate without names demands the P0 and the critical clauses only."""
    clauses = tuple(
        replace(clause, severity="P2", critical=clause.id == "F-DP-001")
        for clause in full.contract.invariants
    )
    report = only(full, "F-DP-001", "F-DP-004")
    assert replace(report, contract=replace(report.contract, invariants=clauses)).gate_passed


@pytest.mark.parametrize("severity", ["P1", "P2"])
def test_gate_that_demands_nothing_is_undecided(full: Report, severity: str) -> None:
    """A gate without any demand does not pass."""
    clauses = tuple(replace(c, severity=severity) for c in full.contract.invariants)
    report = only(full, "F-DP-001")
    report = replace(report, contract=replace(report.contract, invariants=clauses))
    assert report.gate_passed is None


def test_contract_without_gate_is_undecided(full: Report) -> None:
    """Without a gate, nothing passed, broke or is missing."""
    report = replace(full, contract=replace(full.contract, gate=None))
    assert report.gate_passed is None
    assert report.gate_broken == ()
    assert report.gate_not_run == ()


def test_replay_command_survives_a_shell(full: Report) -> None:
    """A path with a space is one word for the shell; without a saved file there is no command."""
    report = replace(full, contract_given="my contracts/a.yaml")
    command = report.replay_command(full.entries[3])
    assert command is not None
    assert shlex.split(command) == [
        *("entrenar-check", "--contract", "my contracts/a.yaml"),
        *("--replay", "counterexamples/F-DP-005 first.json"),
    ]
    assert report.replay_command(full.entries[0]) is None


def test_what_a_break_means_is_the_contracts_own_words(full: Report) -> None:
    """They come from the tests that name the clause by id or name, for a falsified clause only."""
    held, unknown, _, broken = full.entries
    assert full.meanings(broken) == (
        "A mean of means, or a division too many, or one that is missing.",
        "An addition in the order of arrival.",
    )
    assert full.meanings(held) == ()
    assert full.meanings(unknown) == ()
