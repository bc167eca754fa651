"""Runs each scenario once, stops one that stalls, keeps its trace on request, and judges traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from entrenar_py.check.clauses import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence.needs import Traces
from entrenar_py.check.harness import companions, interrupts, stopping
from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import SYSTEMS
from entrenar_py.shared.verdict import Finding, Verdict, first_few, inconclusive, worst

# Above the patience of systems that start processes. These end their processes without harm to
# this one.
RUN_PATIENCE_S = 180.0
_ALONE = (
    "does not apply to a run whose workers step alone and only synchronise after some steps: "
    "check such a run by local-sgd-v1.yaml"
)
REMEMBERED = 400  # traces; a baseline is needed again soon or never


# Called with the traces of each judgement: the judged one, then those it is compared with.
Listener = Callable[[Sequence[trace.Trace]], None]


def ignore(traces: Sequence[trace.Trace]) -> None:
    """Do nothing: the default listener."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A finding, and whether something went wrong: a run failed or the check crashed."""

    finding: Finding
    failed: bool


class Runner:
    """Runs scenarios and remembers their traces; saves each trace in `trace_folder`."""

    def __init__(
        self,
        trace_folder: Path | None = None,
        *,
        patience_s: float = RUN_PATIENCE_S,
        on_judged: Listener = ignore,
    ) -> None:
        self._folder = trace_folder
        self._on_judged = on_judged
        self._patience_s = patience_s
        self._known: dict[Scenario, trace.Trace] = {}

    def run(self, scenario: Scenario) -> trace.Trace:
        """Return the trace of `scenario`, from memory if it was run before."""
        interrupts.check()
        if scenario not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.pop(next(iter(self._known)))
            result = stopping.run(scenario, patience_s=self._patience_s)
            if self._folder is not None:
                trace.save(result, self._folder / f"{scenario.digest}.jsonl")
            self._known[scenario] = result
        return self._known[scenario]

    def attempt(self, invariant: Invariant, check: Check, scenario: Scenario) -> Judgement:
        """Run `scenario` and the runs that it is compared with; return the check's judgement."""
        own = self.run(scenario)
        runs = companions.of(check.needs, scenario).chosen(self.run)
        self._on_judged([own, *(trace for trace in runs if trace is not own)])
        return judge(invariant, check, runs)

    def try_scenario(self, invariant: Invariant, check: Check, scenario: Scenario) -> Finding:
        """Return only the finding of `attempt`."""
        return self.attempt(invariant, check, scenario).finding


def judge(invariant: Invariant, check: Check, runs: Traces) -> Judgement:
    """Return the check's judgement of `runs`.

    The judgement is inconclusive, with the reason, if the check crashes or does not apply to one of
    the runs, or if the clause would be held although the planted bug took no part.
    """
    interrupts.check()
    decide: Callable[[Invariant, Traces], Finding] | None = check.judge
    if check.in_step and any("rounds" in run.promises for run in runs):
        is_own = all(run.scenario.workload == "own" for run in runs)
        decide = check.in_rounds if is_own else None
    if decide is None:
        return Judgement(finding=inconclusive(invariant.id, _ALONE), failed=False)
    try:
        finding = decide(invariant, runs)
    except Exception as error:  # noqa: BLE001  (a checker that crashed knows nothing)
        reason = f"the check {check.name} crashed: {type(error).__name__}: {error}"
        return Judgement(finding=inconclusive(invariant.id, reason), failed=True)
    idle = _idle_mutant(runs)
    if finding.verdict is Verdict.HELD and idle is not None:
        reason = f"mutant {idle} took no part: no function that it replaces was called in this run"
        finding = inconclusive(invariant.id, reason, finding.compared)
    return Judgement(finding=finding, failed=any(run.end.status == "failed" for run in runs))


def _idle_mutant(traces: Iterable[trace.Trace]) -> str | None:
    """Return the mutant of `traces` if it took part in none of them, else None.

    Traces of a user's own trainer don't count. Such a trainer plants its bugs itself, and `mutant`
    is only a name.
    """
    ours = [one for one in traces if one.scenario.system in SYSTEMS]
    mutated = [one for one in ours if one.scenario.mutant is not None]
    if not mutated or any(one.of(trace.Planted) for one in mutated):
        return None
    return mutated[0].scenario.mutant


def telling(explored: Sequence[Judgement]) -> list[Finding]:
    """Return the findings, except inconclusive ones of runs in which nothing went wrong."""
    return [
        judgement.finding
        for judgement in explored
        if judgement.failed or judgement.finding.verdict is not Verdict.INCONCLUSIVE
    ]


def combine(findings: Sequence[Finding]) -> Finding:
    """Combine findings: the worst verdict, all comparisons, the first break, every note."""
    verdict = worst(finding.verdict for finding in findings)
    first = next(finding for finding in findings if finding.verdict is verdict)
    reasons = list(dict.fromkeys(f.reason for f in findings if f.verdict is verdict and f.reason))
    return replace(
        first,
        compared=sum(finding.compared for finding in findings),
        reason=first.reason if verdict is Verdict.FALSIFIED else first_few(reasons),
        notes=tuple(dict.fromkeys(note for finding in findings for note in finding.notes)),
        vacuous=all(finding.vacuous for finding in findings),
    )
