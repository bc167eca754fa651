"""The report on a terminal and in a pipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy

from entrenar_py.check.reports.report import NotApplying, Report
from entrenar_py.shared.verdict import Verdict
from tests.check.reports.conftest import printed

# Of the first two entries: placeholders that a command lacks.
UNTRIED = ((0, ("clip",)), (1, ("clip", "workdir")))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("terminal.txt", {"tty": True}),
        ("terminal-verbose.txt", {"tty": True, "verbose": True}),
        ("terminal-narrow.txt", {"tty": True, "width": 60}),
        ("terminal-quiet.txt", {"tty": True, "quiet": True}),
        ("terminal-piped.txt", {}),
    ],
)
def test_full_report(
    full: Report, golden: Callable[[str, str], None], name: str, form: dict[str, Any]
) -> None:
    """The output equals the golden files."""
    golden(name, "\n".join(printed(full, **form)) + "\n")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_terminal_lines_fit_the_terminal(full: Report, width: int) -> None:
    """On a terminal only commands, which are copied, may be longer than a line."""
    lines = printed(full, tty=True, width=width, verbose=True)
    assert max(len(line) for line in lines if "entrenar-check" not in line) <= width


@pytest.mark.parametrize("width", [43, 50, 60, 70, 80, 120])
def test_only_the_name_is_folded(full: Report, width: int) -> None:
    """A row starts with its verdict and id; numbers are shown whole or not at all."""
    lines = [line.split() for line in printed(full, tty=True, width=width, verbose=True)]
    [titles] = [line for line in lines if line[:1] == ["verdict"]]
    for entry in full.entries:
        start = [entry.verdict, entry.invariant.id.lower()]
        [row] = [line for line in lines if [word.lower() for word in line[:2]] == start]
        runs = f"{entry.num_scenarios}+{entry.num_explored}"
        numbers = (f"{entry.finding.compared:,}", runs, f"{entry.elapsed_s:.1f}")
        expected = [entry.invariant.severity, *numbers][: len(titles) - 3]
        assert row[-len(expected) :] == expected


def test_the_last_line_is_the_exit_code_with_its_reason(full: Report) -> None:
    """The command that replays the worst counterexample stands unbroken above the gate."""
    for form in ({"tty": True}, {}, {"quiet": True}, {"verbose": True}):
        lines = printed(full, **form)  # type: ignore[arg-type]
        assert lines[-1] == "exit 1: F-DP-005 falsified"
        assert f"replay with: {full.replay_command(full.entries[3])}" in lines


def test_long_reason_is_indented(full: Report) -> None:
    """On a terminal the later lines of a reason are indented below its heading."""
    entry = full.entries[1]
    entry = replace(entry, finding=replace(entry.finding, reason="unseen " * 12))
    lines = printed(replace(full, entries=(entry,)), tty=True)
    heading = next(
        n for n, line in enumerate(lines) if line.startswith("F-DP-002 INCONCLUSIVE: un")
    )
    assert lines[heading + 1].startswith("  unseen")


@given(data=st.data())
def test_piped_row_is_one_line(data: DataObject, any_report: SearchStrategy[Report]) -> None:
    """In a pipe each invariant is one line with its verdict, id and count, whatever its name."""
    report = data.draw(any_report)
    lines = printed(report, verbose=True)
    for entry in report.entries:
        word, id_ = entry.verdict.lower(), entry.invariant.id
        rows = [line.split() for line in lines if line.lower().startswith(word)]
        assert sum(row[1] == id_ for row in rows) == 1


@pytest.mark.parametrize("tty", [True, False])
def test_long_id_is_never_cut(full: Report, tty: bool) -> None:
    """A long id may be folded on a terminal, and is whole in a pipe."""
    long = "FALSIFY-" + "0123456789" * 7
    entry = full.entries[0]
    entry = replace(entry, invariant=replace(entry.invariant, id=long))
    lines = printed(replace(full, entries=(entry,)), tty=tty, verbose=True)
    column = lines[1].index("id")
    folded = "".join(line[column:].split("  ")[0].strip() for line in lines[2:6])
    assert folded.startswith(long)
    assert any(long in line for line in lines) == (not tty)


def test_contract_text_is_not_markup_and_steers_nothing(full: Report) -> None:
    """Brackets are printed as they are and escape sequences are spelled out."""
    entry = full.entries[0]
    entry = replace(entry, invariant=replace(entry.invariant, name="[bold]w[0]\x1b[2J"))
    text = "\n".join(printed(replace(full, entries=(entry,)), tty=True))
    assert r"[bold]w[0]\x1b[2J" in text
    assert "\x1b" not in text


def test_narrow_encoding_loses_nothing(full: Report) -> None:
    """A character that the encoding lacks is spelled out instead of crashing."""
    entry = full.entries[0]
    entry = replace(entry, invariant=replace(entry.invariant, name="‖Δw‖ = 0"))
    text = "\n".join(printed(replace(full, entries=(entry,)), encoding="ascii"))
    assert r"\u2016\u0394w\u2016 = 0" in text


def test_quiet_and_held_is_three_lines(full: Report) -> None:
    """If all clauses held, --quiet prints only the counts, the gate and the exit code."""
    held = tuple(entry for entry in full.entries if entry.verdict is Verdict.HELD)
    lines = printed(replace(full, entries=held), quiet=True)
    assert lines == [
        "2 held: 1,231 comparisons in 24 planned + 200 explored scenarios, 12.5 s",
        "gate QA-DT-001 over 3 clauses: UNDECIDED: not checked in this run: F-DP-002",
        "exit 0: 2 held",
    ]


@pytest.mark.parametrize(
    ("interrupted", "said", "unsaid"),
    [(True, "interrupted:", "nothing selected"), (False, "nothing selected", "interrupted:")],
)
def test_run_without_results_says_why(
    full: Report, interrupted: bool, said: str, unsaid: str
) -> None:
    """Runs that were interrupted at once and runs without a selection have different reasons."""
    report = replace(full, entries=(), interrupted=interrupted, environment={})
    text = "\n".join(printed(report))
    assert said in text
    assert unsaid not in text
    assert "no verdicts: 0 comparisons" in text


def gate_line(report: Report) -> str:
    return next(line for line in printed(report) if line.startswith("gate"))


def test_gate_line(full: Report) -> None:
    """The line says passed, not passed, undecided with the reason, or that there is no gate."""
    gate = full.contract.gate
    assert gate is not None
    one = replace(full, contract=replace(full.contract, gate=replace(gate, checks=("F-DP-001",))))
    assert gate_line(full) == "gate QA-DT-001 over 3 clauses: NOT PASSED: F-DP-002 inconclusive"
    title = "gate QA-DT-001 over 1 clause"
    held = replace(one, entries=full.entries[:1])
    assert gate_line(held) == f"{title}: passed"
    assert gate_line(replace(held, interrupted=True)) == f"{title}: UNDECIDED: interrupted"
    beside = "F-DP-005 falsified, which it does not demand"
    assert gate_line(one) == f"{title}: UNDECIDED: {beside}"
    none = replace(full, contract=replace(full.contract, gate=None))
    assert gate_line(none) == "gate: distributed-training-v1.yaml has none"
    bare = replace(full, contract=replace(full.contract, invariants=()))
    assert gate_line(bare) == (
        "gate QA-DT-001 over 0 clauses: UNDECIDED: F-DP-005 falsified, which it does not demand"
    )


def test_probes_are_no_part_of_a_scripts_gate(full: Report) -> None:
    """A clause about something else is not demanded, and the line says what the gate is over."""
    probe = NotApplying(invariant=full.entries[1].invariant, reason="a probe", outside=True)
    held = tuple(entry for entry in full.entries if entry.verdict is Verdict.HELD)
    script = replace(full, entries=held, not_applying=(probe,))
    assert script.gate_passed
    lines = printed(script)
    assert "gate QA-DT-001 over 2 script clauses: passed" in lines
    assert any(line.endswith("-v shows 1 note and 1 clause not applied") for line in lines)
    chosen = replace(script, not_applying=(replace(probe, outside=False),))
    assert chosen.gate_passed is None
    assert "not applied: F-DP-002 (Sharding covers every sample exactly once): a probe" in printed(
        chosen
    )


def test_what_a_command_lacks_is_listed_once(full: Report) -> None:
    """Each placeholder is named once; -v adds the clauses that it would have decided.

    Where something is broken, only -v names them.
    """
    first, second = (replace(full.entries[n], untried=names) for n, names in UNTRIED)
    lacking = replace(full, entries=(first, second, *full.entries[2:]))
    known = replace(
        lacking, entries=tuple(replace(entry, accepted="known") for entry in lacking.entries)
    )
    told = "not tried, as the command lacks: {clip} {workdir}"
    assert told in printed(known)
    assert told not in printed(lacking)
    lines = printed(lacking, verbose=True)
    (line,) = [line for line in lines if "{clip}" in line]
    assert line == (
        "not tried, as the command lacks: {clip} (F-DP-001, F-DP-002); {workdir} (F-DP-002)"
    )


@pytest.mark.parametrize(("num", "said"), [(1, "in 1 stored trace,"), (2, "in 2 stored traces,")])
def test_stored_traces_are_counted_as_such(full: Report, num: int, said: str) -> None:
    """For stored traces the report counts traces, not planned and explored scenarios."""
    text = "\n".join(printed(replace(full, num_traces=num)))
    assert said in text
    assert "explored" not in text
