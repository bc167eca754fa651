"""Judgements: a check's decision on the traces that it compares, and their combination.

The traces may be new or stored. Nothing is run here.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from entrenar_py.check.clauses import Check
from entrenar_py.check.contract import Invariant, Position
from entrenar_py.check.evidence.needs import TWIN, Runs, Traces
from entrenar_py.check.harness import companions
from entrenar_py.check.harness.plan import Task, is_trainer
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared import faults, process, trace
from entrenar_py.shared.errors import TraceError, UsageError
from entrenar_py.shared.systems import SYSTEMS
from entrenar_py.shared.trace import Called, Planted, Trace
from entrenar_py.shared.verdict import Finding, Verdict, first_few, inconclusive, not_applied, worst

_ALONE = (
    "does not apply to a run with workers that step alone and only synchronise after some steps: "
    "check such a run by local-sgd-v1.yaml"
)


# Called with the traces of each judgement: the judged trace first, then those that it is compared
# with.
Listener = Callable[[Sequence[Trace]], None]
# Called with: clause id, pieces of work done, pieces planned (0: unknown), what is done now.
Progress = Callable[[str, int, int, str], None]


def ignore(traces: Sequence[Trace]) -> None:
    """Do nothing: the default listener."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A finding, and whether something went wrong: a run failed, or the check crashed."""

    finding: Finding
    failed: bool


def judge(invariant: Invariant, check: Check, runs: Traces) -> Judgement:
    """Return the check's judgement of `runs`.

    The judgement is inconclusive, with the reason, if the check crashes or does not apply to one of
    the runs. It is also inconclusive if the clause would be held but the planted bug was never
    called.
    """
    process.check_interrupts()
    decide: Callable[[Invariant, Traces], Finding] | None = check.judge
    if check.in_step and any("rounds" in run.promises for run in runs):
        is_own = all(run.scenario.workload == "own" for run in runs)
        decide = check.in_rounds if is_own else None
    if decide is None:
        return Judgement(finding=inconclusive(invariant.id, _ALONE), failed=False)
    try:
        finding = decide(invariant, runs)
    except Exception as error:  # noqa: BLE001  (a crashed check decides nothing)
        reason = f"the check {check.name} crashed: {type(error).__name__}: {error}"
        return Judgement(finding=inconclusive(invariant.id, reason), failed=True)
    idle = _idle_mutant(runs)
    if finding.verdict is Verdict.HELD and idle is not None:
        reason = f"mutant {idle} had no effect: no function that it replaces was called in this run"
        finding = inconclusive(invariant.id, reason, finding.compared)
    return Judgement(finding=finding, failed=any(run.end.status == "failed" for run in runs))


def _idle_mutant(traces: Iterable[Trace]) -> str | None:
    # A user's own trainer plants its bugs itself: `mutant` is only a name there.
    ours = [one for one in traces if one.scenario.system in SYSTEMS]
    mutated = [one for one in ours if one.scenario.mutant is not None]
    if not mutated or any(one.of(Planted) for one in mutated):
        return None
    return mutated[0].scenario.mutant


def telling(explored: Sequence[Judgement]) -> list[Finding]:
    """Return the findings without inconclusive ones of scenarios in which nothing went wrong."""
    return [
        judgement.finding
        for judgement in explored
        if judgement.failed or judgement.finding.verdict is not Verdict.INCONCLUSIVE
    ]


def combine(findings: Sequence[Finding]) -> Finding:
    """Return one finding for several: the worst verdict, its first counterexample, all notes.

    The numbers of comparisons are added up.
    """
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


_PATTERN = frozenset("*?[")


def load_stored(paths: Sequence[Path]) -> dict[Path, Trace]:
    """Return path -> trace for `paths`; each is a file, a folder of `*.jsonl`, or a glob pattern.

    The files of one run's ranks (`*.rank.jsonl`) are assembled to one trace, under the path of
    their folder. Raises TraceError for a file that can't be trusted, and UsageError for a folder or
    a pattern without traces.
    """
    from entrenar_py.check.rank_files import observed_run
    from entrenar_py.check.rank_files.rank_file import SUFFIX

    files = dict.fromkeys(file for path in paths for file in _files(path))
    ranks: dict[Path, list[Path]] = defaultdict(list)
    for file in files:
        if file.name.endswith(SUFFIX):
            ranks[file.parent].append(file)
    whole = {file: _load(file) for file in files if not file.name.endswith(SUFFIX)}
    return whole | {folder: observed_run.load(of_run) for folder, of_run in ranks.items()}


def _load(file: Path) -> Trace:
    # Reading a trace doesn't validate options, because each system defines its own.
    stored = trace.load(file)
    try:
        companions.of((TWIN,), stored.scenario)
    except UsageError as error:
        raise TraceError(f"trace file {file}: scenario: {error}") from error
    return stored


def _files(path: Path) -> list[Path]:
    """Return the files that `path` stands for: a file, a folder, or a glob pattern.

    A folder also has what ranks write in addition to their traces.
    """
    if path.is_dir():
        from entrenar_py.check.rank_files import border_file, line_file, notes

        others = (notes.SAVES, f"*{border_file.SUFFIX}", f"*{line_file.SUFFIX}")
        beside = {file for pattern in others for file in path.glob(pattern)}
        files = sorted(file for file in path.glob("*.jsonl") if file not in beside)
        if not files:
            raise UsageError(f"trace folder {path}: holds no *.jsonl file; give one that does")
        return files
    if _PATTERN.intersection(str(path)) and not path.exists():
        matched = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        files = [file for match in matched for file in _files(match)]
        if not files:
            raise UsageError(f"traces {path}: no such file; give a trace, or a folder of traces")
        return files
    return [path]


def environment(traces: Iterable[Trace]) -> Mapping[str, Any]:
    """Return the merged environments of the traces. Values that differ are listed."""
    environments = [trace.environment for trace in traces]
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for environment in environments for name in environment):
        values = [environment[name] for environment in environments if name in environment]
        distinct = [value for place, value in enumerate(values) if value not in values[:place]]
        merged[name] = distinct[0] if len(distinct) == 1 else distinct
    return merged


def places(traces: Iterable[Trace]) -> dict[str, Position]:
    """Return purpose (such as `step`) -> line of the script, from the first trace with lines."""
    for one_trace in traces:
        called = sorted(one_trace.of(Called), key=lambda event: -event.rank)
        if called:
            return {event.what: Position(event.file, event.line, 1) for event in called}
    return {}


def judge_stored(
    tasks: Sequence[Task], traces: Mapping[Path, Trace], *, on_judged: Listener = ignore
) -> Iterator[Entry]:
    """Yield an entry per task from stored traces, without running anything.

    Each trace is judged together with the stored traces that answer the check's needs for it. A
    trace is not judged if it is of a different kind of system than the clause's scenarios.
    """
    scenarios = {file: trace.scenario for file, trace in traces.items()}
    for task in tasks:
        runs: dict[Path, Runs[Path]] = {}
        if task.check is not None:
            kinds = {_kind(planned.system) for planned in task.scenarios}
            runs = {
                file: companions.among(
                    task.check.needs, file, scenarios, witnesses=task.check.witnesses
                )
                for file, scenario in scenarios.items()
                if _kind(scenario.system) in kinds and not faults.are_of_witnesses(scenario.faults)
            }
        yield judge_each(task, runs, traces, on_judged=on_judged)


def judge_each(
    task: Task,
    runs: Mapping[Path, Runs[Path]],
    traces: Mapping[Path, Trace],
    *,
    on_judged: Listener = ignore,
    form: str = "{files}: {reason}",
) -> Entry:
    """Return the entry of `task` from judging several traces.

    `runs` maps the file of each judged trace to the runs that it is compared with. `form` is how a
    reason and its files are joined if there are several traces. The entry's `num_scenarios` counts
    the judged traces, and `num_explored` is 0.
    """
    started = time.monotonic()
    check = task.check
    judged = [
        _judge_file(task, check, own, beside, traces) for own, beside in runs.items() if check
    ]
    for judgement in judged:
        on_judged([traces[file] for file in judgement.files])
    deciding = _deciding(judged)
    findings = _located(deciding, form) if len(traces) > 1 else [each.finding for each in deciding]
    finding = combine(findings or [_unseen(task)])
    return Entry(
        invariant=task.invariant,
        finding=_applying(task, finding, [traces[own] for own in runs]),
        num_scenarios=len(judged),
        num_explored=0,
        elapsed_s=time.monotonic() - started,
    )


def _applying(task: Task, finding: Finding, traces: Sequence[Trace]) -> Finding:
    """Return `finding`, or a finding that says that the clause doesn't apply.

    It does if `finding` is inconclusive for that reason. Only runs of a user's trainer can show
    that a clause doesn't apply, and not if one of them failed without a planted fault: its missing
    part may have what the clause is about.
    """
    if finding.verdict is not Verdict.INCONCLUSIVE or task.check is None or not traces:
        return finding
    is_own = all(trace.scenario.workload == "own" for trace in traces)
    if not is_own or any(_failed_by_itself(trace) for trace in traces):
        return finding
    why = task.check.absent(traces)
    return not_applied(task.invariant.id, why) if why else finding


def _failed_by_itself(trace: Trace) -> bool:
    return trace.end.status == "failed" and not trace.scenario.faults


def _unseen(task: Task) -> Finding:
    """Return the finding for a task without a matching trace.

    For a probe, it is the check's own finding on no runs.
    """
    if task.check is None or task.check.explores:
        return task.untried()
    return task.check.judge(task.invariant, Runs())


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """A check's judgement of the first of `files`; the other files were compared with it.

    `recorded` is true if the user wanted this trace judged: the clause lists its scenario, or it is
    from a user's own trainer. Other scenarios were drawn at random.
    """

    files: tuple[Path, ...]
    judgement: Judgement
    recorded: bool

    @property
    def finding(self) -> Finding:
        """The finding of the judgement."""
        return self.judgement.finding

    @property
    def is_open(self) -> bool:
        """True if the finding is inconclusive."""
        return self.finding.verdict is Verdict.INCONCLUSIVE

    @property
    def place(self) -> str:
        """The judged file, followed by the files that it was compared with, as text."""
        own, *others = map(str, self.files)
        return f"{own} (with {first_few(others, separator=', ')})" if others else own


def _judge_file(
    task: Task, check: Check, own: Path, runs: Runs[Path], traces: Mapping[Path, Trace]
) -> _Judged:
    scenario = traces[own].scenario
    return _Judged(
        files=tuple(dict.fromkeys((own, *runs, *(near.run for near in runs.near.values())))),
        judgement=judge(task.invariant, check, runs.chosen(traces.get)),
        recorded=scenario in task.scenarios or scenario.system not in SYSTEMS,
    )


def _deciding(judged: Sequence[_Judged]) -> list[_Judged]:
    """Return the judgements that decide the verdict, or all of them if none decides.

    An inconclusive judgement decides only if a run failed, or if it is `recorded` and not vacuous.
    An inconclusive judgement is dropped if its trace takes part in another one that is returned.
    """
    decide = [
        candidate
        for candidate in judged
        if not candidate.is_open
        or candidate.judgement.failed
        or (candidate.recorded and not candidate.finding.vacuous)
    ] or judged
    baselines = {file for candidate in decide for file in candidate.files[1:]}
    kept: list[_Judged] = []
    for candidate in sorted(
        decide, key=lambda candidate: (candidate.is_open, candidate.files[0] in baselines)
    ):
        if not (candidate.is_open and any(candidate.files[0] in other.files for other in kept)):
            kept.append(candidate)
    return kept


def _located(judged: Sequence[_Judged], form: str) -> list[Finding]:
    """Return the findings; `form` joins each reason with the files that have it."""
    places: dict[str, list[str]] = defaultdict(list)
    for candidate in judged:
        places[candidate.finding.reason].append(candidate.place)
    files = {reason: first_few(places[reason], separator=", ") for reason in places if reason}
    findings = [candidate.finding for candidate in judged]
    return [
        replace(finding, reason=form.format(files=files[finding.reason], reason=finding.reason))
        if finding.reason
        else finding
        for finding in findings
    ]


def _kind(system: str) -> str:
    return "trainer" if is_trainer(system) else system
