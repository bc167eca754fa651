"""The search for falsifications of a contract's clauses: run, judge, explore, shrink, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from entrenar_py.check.clauses import Check
from entrenar_py.check.harness import counterexamples, judgement
from entrenar_py.check.harness.judgement import Judgement, Progress, combine, telling
from entrenar_py.check.harness.plan import Plan, Task
from entrenar_py.check.harness.runner import Runner
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Finding, Verdict, inconclusive

MAX_RUNS = 150

# Field -> values to try, simplest first. Only the values before the current one are tried.
_SIMPLER: dict[str, tuple[Any, ...]] = {
    "workload": ("linear", "mlp"),
    "optimizer": ("sgd", "momentum"),
    "schedule": ("constant",),
    "warmup_steps": (0,),
    "dropout": (0.0,),
    "weight_decay": (0.0,),
    "clip_norm": (None,),
    "accumulation": (1, 2),
    "seed": (0,),
}
_SMALLER = ("num_steps", "world_size", "num_shards", "batch_size", "num_samples", "width")


def shrink(
    scenario: Scenario,
    attempt: Callable[[Scenario], Finding],
    *,
    fixed: Collection[str] = (),
) -> Iterator[tuple[Scenario, Finding]]:
    """Yield ever simpler scenarios that are still FALSIFIED, with their findings; the last is best.

    The search is greedy and deterministic, and makes at most MAX_RUNS attempts. A caller may stop
    after any scenario. Fields named in `fixed` keep their values. If the last scenario is still
    FALSIFIED when it records the tensors' values, it does so: the counterexample then names the
    element and both values.
    """
    tried = {scenario}
    improved = True
    while improved:
        improved = False
        for candidate in _candidates(scenario, fixed):
            if candidate in tried:
                continue
            if len(tried) > MAX_RUNS:
                break
            tried.add(candidate)
            finding = attempt(candidate)
            if finding.verdict is Verdict.FALSIFIED:
                scenario, improved = candidate, True
                yield scenario, finding
                break
    if scenario.detail != "values":
        scenario = scenario.with_(detail="values")
        finding = attempt(scenario)
        if finding.verdict is Verdict.FALSIFIED:
            yield scenario, finding


def _candidates(scenario: Scenario, fixed: Collection[str]) -> Iterator[Scenario]:
    for changes in _changes(scenario):
        if fixed and not changes.keys().isdisjoint(fixed):
            continue
        try:
            yield scenario.with_(**changes)
        except UsageError:
            continue


def _changes(scenario: Scenario) -> Iterator[dict[str, Any]]:
    for name in ("faults", "stops"):
        parts = getattr(scenario, name)
        for index, part in enumerate(parts):
            for less in ((), *_earlier(part)):
                yield {name: (*parts[:index], *less, *parts[index + 1 :])}
    for name, values in _SIMPLER.items():
        present = getattr(scenario, name)
        if present in values:
            values = values[: values.index(present)]
        yield from ({name: value} for value in values)
    for name in _SMALLER:
        present = getattr(scenario, name)
        for value in dict.fromkeys((1, 2, 3, present // 2, present - 1)):
            if 0 < value < present:
                yield {name: value}


def _earlier(part: Fault | int) -> Iterator[tuple[Fault | int]]:
    """Yield `part` with its step, rank or shard halved, so that sizes can shrink afterwards.

    `part` is a fault, or the step of a stop.
    """
    if isinstance(part, int):
        yield (part // 2,)
        return
    for name in ("step", "rank", "shard"):
        value = getattr(part, name)
        if value:
            yield (replace(part, **{name: value // 2}),)


# Only runs that are short enough to be repeated many times are explored.
EXPLORED_STEPS_MAX = 20


def falsify(
    tasks: Sequence[Task],
    plan: Plan,
    *,
    on_progress: Progress = lambda *_: None,
    on_judged: judgement.Listener = judgement.ignore,
    stop_early: bool = False,
) -> Iterator[Entry]:
    """Yield an entry per task, in order; with `stop_early`, end after the first falsified one.

    After an interrupt, yield the entry of the current task with the results so far, and for each
    later task an entry that says that it was not begun. Then raise KeyboardInterrupt.
    """
    runs = Runner(plan.trace_folder, on_judged=on_judged)
    deadline = None if plan.timeout_s is None else time.monotonic() + plan.timeout_s
    for place, task in enumerate(tasks):
        attempt = _Attempt(task, plan, runs, deadline, on_progress)
        try:
            attempt.run()
        except KeyboardInterrupt:
            attempt.left_out = f"interrupted after {attempt.num_scenarios} scenarios"
            yield attempt.entry()
            yield from map(_not_begun, tasks[place + 1 :])
            raise
        entry = attempt.entry()
        yield entry
        if stop_early and entry.verdict is Verdict.FALSIFIED:
            return


def _not_begun(task: Task) -> Entry:
    finding = inconclusive(task.invariant.id, "interrupted before it was tried")
    return Entry(
        invariant=task.invariant, finding=finding, num_scenarios=0, num_explored=0, elapsed_s=0.0
    )


def replay(
    task: Task,
    path: Path,
    *,
    trace_folder: Path | None = None,
    on_judged: judgement.Listener = judgement.ignore,
) -> Entry:
    """Run and judge the only scenario of `task`, which was saved in `path`; return the entry."""
    started = time.monotonic()
    finding = task.untried()
    if task.check is not None:
        runs = Runner(trace_folder, on_judged=on_judged)
        finding = combine(
            [runs.try_scenario(task.invariant, task.check, scenario) for scenario in task.known]
        )
    return Entry(
        invariant=task.invariant,
        finding=finding,
        num_scenarios=1,
        num_explored=0,
        elapsed_s=time.monotonic() - started,
        replay=str(path) if finding.verdict is Verdict.FALSIFIED else None,
    )


class _Attempt:
    """The attempt to falsify one clause. At any time, its fields have the results so far."""

    def __init__(
        self,
        task: Task,
        plan: Plan,
        runs: Runner,
        deadline: float | None,
        on_progress: Progress,
    ) -> None:
        self.task, self.plan, self.runs = task, plan, runs
        self.deadline, self.on_progress = deadline, on_progress
        self.started = time.monotonic()
        self.judgements: list[Judgement] = []
        self.explored: list[Judgement] = []
        self.broken: tuple[Scenario, Finding] | None = None
        self.num_scenarios = 0
        self.num_explored = 0
        self.left_out = ""
        self.notes = task.notes

    def run(self) -> None:
        """Try the scenarios, explore near them, and shrink a scenario that broke the clause."""
        check = self.task.check
        if check is None:
            return
        self._try(check)
        if check.explores and self.broken is None and not self.left_out:
            self._explore(check)
        if check.explores and self.broken is not None:
            self._shrink(check, self.broken[0])

    def entry(self) -> Entry:
        """Return the entry with the results so far. Save the counterexample if there is one."""
        finding, path = self._finding(), None
        if self.broken is not None:
            scenario, shrunk = self.broken
            finding = replace(finding, reason=shrunk.reason, counterexample=shrunk.counterexample)
            saved = counterexamples.Saved(
                invariant=finding.invariant, scenario=scenario, finding=shrunk
            )
            try:
                path = str(counterexamples.save(saved, self.plan.saved_folder))
            except OSError as error:
                self.notes += (f"the counterexample could not be saved: {error}",)
        return Entry(
            invariant=self.task.invariant,
            finding=replace(finding, notes=(*finding.notes, *self.notes)),
            num_scenarios=self.num_scenarios,
            num_explored=self.num_explored,
            elapsed_s=time.monotonic() - self.started,
            replay=path,
        )

    def _finding(self) -> Finding:
        findings = [judgement.finding for judgement in self.judgements] + telling(self.explored)
        if self.left_out:
            findings.append(inconclusive(self.task.invariant.id, self.left_out))
        return combine(findings or [self.task.untried()])

    def _try(self, check: Check) -> None:
        scenarios = self.task.scenarios
        for scenario in scenarios:
            if self._is_late():
                self.left_out = (
                    f"--timeout {self.plan.timeout_s:g} s ran out after {self.num_scenarios} "
                    f"of {len(scenarios)} scenarios"
                )
                return
            what = f"{scenario.system} {scenario.workload} x{scenario.world_size}"
            self.on_progress(self.task.invariant.id, self.num_scenarios, len(scenarios), what)
            broken = self._breaks(check, scenario, self.judgements)
            self.num_scenarios += 1
            if broken:
                return

    def _explore(self, check: Check) -> None:
        from entrenar_py.check.harness import explore  # imports hypothesis

        def visit(scenario: Scenario) -> bool:
            if self._is_late():
                self.notes += (f"--timeout ended exploring after {self.num_explored} examples",)
                return True
            self.on_progress(
                self.task.invariant.id, self.num_explored, self.plan.num_examples, "exploring"
            )
            self.num_explored += 1
            return self._breaks(check, scenario, self.explored)

        planned = self.task.planned
        short = [
            scenario
            for scenario in planned
            if scenario.num_steps <= EXPLORED_STEPS_MAX
            and not scenario.workload.startswith("decoder")
        ]
        if planned and self.plan.num_examples:
            explore.search(
                short or planned,
                seed=self.plan.seed,
                num_examples=self.plan.num_examples,
                fixed=self.plan.fixed,
                visit=visit,
            )

    def _shrink(self, check: Check, scenario: Scenario) -> None:
        def attempt(candidate: Scenario) -> Finding:
            self.on_progress(self.task.invariant.id, 0, 0, "shrinking")
            return self.runs.try_scenario(self.task.invariant, check, candidate)

        for simpler in shrink(scenario, attempt, fixed=self.plan.fixed):
            self.broken = simpler
            if self._is_late():
                return

    def _breaks(self, check: Check, scenario: Scenario, judgements: list[Judgement]) -> bool:
        judgement = self.runs.attempt(self.task.invariant, check, scenario)
        judgements.append(judgement)
        if judgement.finding.verdict is Verdict.FALSIFIED:
            self.broken = scenario, judgement.finding
        return self.broken is not None

    def _is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline
