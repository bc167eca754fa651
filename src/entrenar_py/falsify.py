"""From a contract to a report: plan, run, judge, explore, shrink, save.

The only place that sees both what runs things (`systems`) and what judges them (`checks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from entrenar_py import checks, counterexamples, explore, scenario, shrink
from entrenar_py.checks import Check
from entrenar_py.contract import Contract, Invariant
from entrenar_py.errors import UsageError
from entrenar_py.reports.report import Entry
from entrenar_py.runner import Runner, judge
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Trace
from entrenar_py.verdict import Counterexample, Finding, Verdict, inconclusive, worst

Progress = Callable[[str, int, int, str], None]

# Systems that train; the others probe one thing, whatever trainer is asked for.
TRAINERS = ("reference", "textbook")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a person asked for on the command line, beside the contract.

    `world_sizes` and `backends` are empty where the contract's own count. `timeout_s` bounds the
    whole run; what it leaves out is inconclusive.
    """

    system: str = "reference"
    world_sizes: tuple[int, ...] = ()
    backends: tuple[str, ...] = ()
    seed: int = 0
    num_examples: int = 20
    timeout_s: float | None = None
    trace_folder: Path | None = None

    @property
    def fixed(self) -> tuple[str, ...]:
        """Scenario fields that exploration may not change."""
        return ("world_size",) if self.world_sizes else ()


def select(
    contract: Contract,
    *,
    only: Collection[str] = (),
    exclude: Collection[str] = (),
    severities: Collection[str] = (),
) -> list[Invariant]:
    """The clauses that `only`, `exclude` and `severities` leave; UsageError for an unknown id."""
    ids = [invariant.id for invariant in contract.invariants]
    for wanted in (*only, *exclude):
        if wanted not in ids:
            raise UsageError(f"id {wanted!r} is not in {contract.name}: it has {', '.join(ids)}")
    return [
        invariant
        for invariant in contract.invariants
        if (not only or invariant.id in only)
        and invariant.id not in exclude
        and (not severities or invariant.severity in severities)
    ]


def scenarios_of(invariant: Invariant, check: Check, plan: Plan) -> list[Scenario]:
    """The scenarios of a clause (or its check's own), as `plan` changes them.

    Raises UsageError where the plan makes no scenario at all of them.
    """
    found: list[Scenario] = []
    if invariant.scenarios:
        defaults = {"system": "reference", "workload": "linear", "world_size": 3, "seed": 0}
        for record in invariant.scenarios:
            found += scenario.expand(record, **defaults)
    else:
        found = check.plan(invariant)
    adapted = [changed for one in found for changed in _adapted(one, plan)]
    return list(dict.fromkeys(adapted))


def _adapted(one: Scenario, plan: Plan) -> Iterator[Scenario]:
    one = one.with_(seed=one.seed + plan.seed)
    if one.system not in TRAINERS:
        yield one
        return
    one = one.with_(system=plan.system, backends=plan.backends or one.backends)
    for world_size in plan.world_sizes or (one.world_size,):
        faults = tuple(fault for fault in one.faults if (fault.rank or 0) < world_size)
        shards = max(one.num_shards, world_size)
        yield one.with_(world_size=world_size, num_shards=shards, faults=faults)


def require_runnable(invariants: Sequence[Invariant], plan: Plan) -> None:
    """UsageError, before anything runs, if the plan makes an impossible scenario of a clause."""
    for invariant in invariants:
        check = checks.bind(invariant)
        if check is not None:
            scenarios_of(invariant, check, plan)


def falsify(
    contract: Contract,
    invariants: Sequence[Invariant],
    plan: Plan,
    *,
    on_progress: Progress = lambda *_: None,
    stop_early: bool = False,
) -> Iterator[Entry]:
    """An entry per invariant, in order; with `stop_early`, none after the first falsified one."""
    runner = Runner(plan.trace_folder)
    started = time.monotonic()
    for invariant in invariants:
        search = _Search(invariant, plan, runner, started, on_progress)
        entry = search.entry()
        yield entry
        if stop_early and entry.verdict is Verdict.FALSIFIED:
            return


def judge_stored(invariants: Sequence[Invariant], traces: Sequence[Trace]) -> Iterator[Entry]:
    """An entry per invariant from stored traces; nothing is run."""
    for invariant in invariants:
        started = time.monotonic()
        check = checks.bind(invariant)
        finding = _uncovered(invariant) if check is None else judge(invariant, check, traces)
        yield Entry(
            invariant=invariant,
            finding=finding,
            num_scenarios=len(traces),
            num_explored=0,
            elapsed_s=time.monotonic() - started,
        )


def replay(contract: Contract, path: Path) -> Entry:
    """The entry of the one scenario saved in `path`; UsageError if its clause is not here."""
    saved = counterexamples.load(path)
    invariant = select(contract, only=(saved.invariant,))[0]
    check = checks.bind(invariant)
    if check is None:
        raise UsageError(f"replay file {path}: no check covers {invariant.id}")
    started = time.monotonic()
    finding = Runner().try_scenario(invariant, check, saved.scenario)
    return Entry(
        invariant=invariant,
        finding=finding,
        num_scenarios=1,
        num_explored=0,
        elapsed_s=time.monotonic() - started,
        replay=str(path) if finding.verdict is Verdict.FALSIFIED else None,
    )


class _Search:
    """The attempt to break one invariant."""

    def __init__(
        self,
        invariant: Invariant,
        plan: Plan,
        runner: Runner,
        started: float,
        on_progress: Progress,
    ) -> None:
        self.invariant, self.plan, self.runner = invariant, plan, runner
        self.started, self.on_progress = started, on_progress
        self.findings: list[Finding] = []
        self.num_scenarios = 0
        self.num_explored = 0
        self.broken: Scenario | None = None

    def entry(self) -> Entry:
        started = time.monotonic()
        check = checks.bind(self.invariant)
        path = None
        if check is None:
            finding = _uncovered(self.invariant)
        else:
            finding = self._try(check)
            if self.broken is not None:
                finding, path = self._shrink_and_save(check, self.broken, finding)
        return Entry(
            invariant=self.invariant,
            finding=finding,
            num_scenarios=self.num_scenarios,
            num_explored=self.num_explored,
            elapsed_s=time.monotonic() - started,
            replay=path,
        )

    def _try(self, check: Check) -> Finding:
        planned = scenarios_of(self.invariant, check, self.plan)
        known = [saved.scenario for saved in counterexamples.known(self.invariant.id)]
        for one in dict.fromkeys((*known, *planned)):
            if self._out_of_time():
                self.findings.append(self._late(f"{len(planned)} scenarios were planned"))
                break
            self.num_scenarios += 1
            what = f"{one.system} {one.workload} x{one.world_size}"
            self.on_progress(self.invariant.id, self.num_scenarios, len(planned), what)
            finding = self.runner.try_scenario(self.invariant, check, one)
            self.findings.append(finding)
            if finding.verdict is Verdict.FALSIFIED:
                self.broken = one
                break
        if self.broken is None and check.explores and planned:
            self._explore(check, planned)
        if not self.findings:
            return inconclusive(self.invariant.id, "no scenario to try")
        return combine(self.findings)

    def _explore(self, check: Check, planned: Sequence[Scenario]) -> None:
        def falsifies(one: Scenario) -> bool:
            if self._out_of_time():
                return False
            self.num_explored += 1
            self.on_progress(
                self.invariant.id, self.num_explored, self.plan.num_examples, "exploring"
            )
            finding = self.runner.try_scenario(self.invariant, check, one)
            if finding.verdict is not Verdict.INCONCLUSIVE:  # small ones may have nothing to show
                self.findings.append(finding)
            return finding.verdict is Verdict.FALSIFIED

        if self.plan.num_examples:
            short = [one for one in planned if one.num_steps <= 20 and one.workload != "decoder"]
            self.broken = explore.search(
                short or planned,
                seed=self.plan.seed,
                num_examples=self.plan.num_examples,
                fixed=self.plan.fixed,
                falsifies=falsifies,
            )

    def _shrink_and_save(
        self, check: Check, broken: Scenario, finding: Finding
    ) -> tuple[Finding, str | None]:
        def attempt(one: Scenario) -> Finding:
            self.on_progress(self.invariant.id, 0, 0, "shrinking")
            return self.runner.try_scenario(self.invariant, check, one)

        smallest, shrunk = shrink.shrink(broken, finding, attempt)
        saved = counterexamples.Saved(
            invariant=self.invariant.id, scenario=smallest, finding=shrunk
        )
        try:
            path = str(counterexamples.save(saved))
        except OSError as error:
            note = f"the counterexample could not be saved: {error}"
            return with_notes(shrunk, note), None
        return shrunk, path

    def _out_of_time(self) -> bool:
        limit = self.plan.timeout_s
        return limit is not None and time.monotonic() - self.started > limit

    def _late(self, what: str) -> Finding:
        reason = f"--timeout {self.plan.timeout_s:g} s ran out: {self.num_scenarios} tried, {what}"
        return inconclusive(self.invariant.id, reason)


def combine(findings: Sequence[Finding]) -> Finding:
    """One finding for all: the worst verdict, all comparisons, the first break, every note."""
    verdict = worst(finding.verdict for finding in findings)
    first = next(finding for finding in findings if finding.verdict is verdict)
    reasons = dict.fromkeys(f.reason for f in findings if f.verdict is verdict and f.reason)
    broken: Counterexample | None = first.counterexample
    return Finding(
        invariant=first.invariant,
        verdict=verdict,
        compared=sum(finding.compared for finding in findings),
        reason=first.reason if verdict is Verdict.FALSIFIED else "; ".join([*reasons][:3]),
        counterexample=broken,
        notes=tuple(dict.fromkeys(note for finding in findings for note in finding.notes)),
    )


def with_notes(finding: Finding, *notes: str) -> Finding:
    """`finding` with `notes` added."""
    return Finding(**{**vars(finding), "notes": (*finding.notes, *notes)})


def _uncovered(invariant: Invariant) -> Finding:
    named = f"check={invariant.check!r} is unknown" if invariant.check else "no check covers it"
    return inconclusive(invariant.id, f"{invariant.position}: {named}: nothing was compared")
