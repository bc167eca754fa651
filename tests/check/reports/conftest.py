"""Reports for the renderers' tests: one with every kind of content, and a strategy for any."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from rich.console import Console

from entrenar_py.check.contract import SEVERITIES, Contract, FalsificationTest, Gate, Invariant
from entrenar_py.check.reports import terminal
from entrenar_py.check.reports.report import Entry, NotApplying, Report, ending
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Counterexample, Finding, Verdict, inconclusive

FILE = "contracts/distributed-training-v1.yaml"


def invariant(number: int, name: str, *, severity: str = "P0", critical: bool = False) -> Invariant:
    return Invariant(
        id=f"F-DP-{number:03}",
        name=name,
        statement=f"{name} holds",
        position=Position(FILE, 20 + 10 * number, 5),
        group="data_parallel.weight_consistency",
        severity=severity,
        critical=critical,
        tolerance=0.0,
        tolerance_kind="bitwise",
    )


def attempt(rule: str, if_fails: str) -> FalsificationTest:
    """Return a falsification test of the clause `rule`."""
    return FalsificationTest(
        id=f"FT {rule} {if_fails}",
        rule=rule,
        target=rule,
        prediction=f"{rule} holds",
        position=Position(FILE, 150, 5),
        if_fails=if_fails,
    )


def contract(
    *invariants: Invariant,
    checks: tuple[str, ...] | None = (),
    tests: tuple[FalsificationTest, ...] = (),
) -> Contract:
    """Return a contract of `invariants`; with `checks` None it has no gate."""
    gate = None
    if checks is not None:
        gate = Gate(
            id="QA-DT-001",
            name="Distributed training",
            description="",
            checks=checks,
            pass_criteria="all held",
            position=Position(FILE, 200, 1),
        )
    return Contract(
        path=Path(FILE),
        digest="0123456789abcdef" * 2,
        metadata={"version": "1.0.0"},
        invariants=invariants,
        falsification_tests=tests,
        gate=gate,
    )


def entry(clause: Invariant, finding: Finding, *, replay: str | None = None) -> Entry:
    return Entry(
        invariant=clause,
        finding=finding,
        num_scenarios=12,
        num_explored=100,
        elapsed_s=1.25,
        replay=replay,
    )


def finding(clause: Invariant, verdict: Verdict) -> Finding:
    if verdict is Verdict.INCONCLUSIVE:
        return inconclusive(clause.id, "no adapter")
    reason = "" if verdict is Verdict.HELD else "weights differ"
    return Finding(invariant=clause.id, verdict=verdict, compared=1200, reason=reason)


def report(
    of: Contract,
    *entries: Entry,
    interrupted: bool = False,
    contract_given: str = "distributed-training-v1.yaml",
) -> Report:
    return Report(
        contract=of,
        contract_given=contract_given,
        system="reference",
        seed=7,
        entries=entries,
        environment={"python": "3.11.7", "torch": "2.13.0", "devices": ["cpu", "llvmpipe"]},
        elapsed_s=12.5,
        interrupted=interrupted,
        command=f"entrenar-check --contract {contract_given} --seed 7",
    )


def printed(
    *reports: Report,
    tty: bool = False,
    quiet: bool = False,
    verbose: bool = False,
    encoding: str = "utf-8",
    width: int = 80,
    foreseen: tuple[str, ...] = (),
) -> list[str]:
    """Return the lines on a terminal of `width` columns, without colours and trailing spaces."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    console = Console(file=file, width=width, force_terminal=tty, color_system=None)
    style = terminal.Style(quiet=quiet, verbose=verbose)
    terminal.begin(reports, console, style=style, foreseen=foreseen)
    closing = ending(reports, allow_inconclusive=False)
    terminal.render(reports, console, style=style, ending=closing)
    file.flush()
    return [line.rstrip() for line in raw.getvalue().decode(encoding).splitlines()]


def full_report() -> Report:
    """Return a report with every verdict, a full counterexample, notes, and a gate not passed."""
    clauses = (
        invariant(1, "Replicas hold identical weights after every step"),
        invariant(2, "Sharding covers every sample exactly once"),
        invariant(4, "The backend chain degrades to a finite result"),
        invariant(5, "Loss parity with one worker", severity="P1"),
        invariant(6, "Recovery after a worker leaves", severity="P1"),
    )
    scenario = Scenario(
        system="reference",
        workload="linear",
        world_size=3,
        seed=7,
        num_steps=4,
        accumulation=2,
        optimizer="adamw",
        clip_norm=0.5,
        backends=("cpu", "wgpu"),
        faults=(Fault(kind="leave", step=2, rank=1),),
        options={"k": 512},
    )
    broken = Counterexample(
        message="rank 1 holds other weights than rank 0",
        step=3,
        rank=1,
        shard=2,
        tensor="weight",
        element=0,
        sample_ids=tuple(range(12)),
        expected="9f86d081884c7d659a2feaa0c55ad015",
        got="60303ae22b998861bce3b28f33eec1be",
        scenario=scenario.to_dict(),
    )
    falsified = Finding(
        invariant="F-DP-005",
        verdict=Verdict.FALSIFIED,
        compared=1204,
        reason=broken.message,
        counterexample=broken,
    )
    noted = Finding(
        invariant="F-DP-004",
        verdict=Verdict.HELD,
        compared=31,
        notes=("software adapter llvmpipe (LLVM 15.0.6, 256 bits)",),
    )
    tests = (
        attempt("F-DP-001", "A rank skipped a gradient."),
        attempt("F-DP-002", "The sampler pads."),
        attempt("F-DP-005", "A mean of means, or a division too many, or one that is missing."),
        attempt("Loss parity with one worker", "An addition in the order of arrival."),
        attempt("F-DP-005", ""),
    )
    return report(
        contract(*clauses, tests=tests),
        entry(clauses[0], finding(clauses[0], Verdict.HELD)),
        entry(clauses[1], inconclusive("F-DP-002", "the trace has no shard events")),
        entry(clauses[2], noted),
        entry(clauses[3], falsified, replay="counterexamples/F-DP-005 first.json"),
    )


@st.composite
def _any_report(draw: DrawFn) -> Report:
    clauses, entries, not_applying = [], [], []
    for number in range(draw(st.integers(0, 5))):
        severity = draw(st.sampled_from(SEVERITIES))
        clause = invariant(number, draw(_TEXT), severity=severity, critical=draw(st.booleans()))
        clauses.append(clause)
        if draw(st.booleans()):
            verdict = draw(st.sampled_from(Verdict))
            entries.append(entry(clause, finding(clause, verdict), replay=draw(st.none() | _TEXT)))
        elif draw(st.booleans()):
            not_applying.append(NotApplying(invariant=clause, reason=draw(_TEXT)))
    names = [*(clause.id for clause in clauses), "unknown"]
    checks = draw(st.none() | st.lists(st.sampled_from(names), unique=True).map(tuple))
    tests = tuple(attempt(name, draw(_TEXT)) for name in names)
    made = report(
        contract(*clauses, checks=checks, tests=tests), *entries, interrupted=draw(st.booleans())
    )
    return replace(made, not_applying=tuple(not_applying))


# Letters, and characters that break XML, terminals, encodings, markup and shells. The alphabet is
# short, since Hypothesis takes seconds to build its table of all characters on a fresh machine.
_TEXT = st.text("aZ0 '[]<&\\\n\t\r\0\x1b\x85é漢😀\udc80\ufffe", max_size=30)


@pytest.fixture(scope="session")
def full() -> Report:
    return full_report()


@pytest.fixture(scope="session")
def any_report() -> SearchStrategy[Report]:
    return _any_report()


@pytest.fixture
def golden(tmp_path: Path) -> Callable[[str, str], None]:
    """Compare a text with a file under golden/; a failure says how to accept the new text."""

    def compare(name: str, text: str) -> None:
        expected = Path(__file__).parent / "golden" / name
        got = tmp_path / name
        got.write_text(text, encoding="utf-8")
        old = expected.read_text(encoding="utf-8") if expected.exists() else ""
        assert text == old, f"if the new text is right: cp {got} {expected}"

    return compare
