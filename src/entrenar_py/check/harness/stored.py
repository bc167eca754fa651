"""Judges stored traces. Nothing is run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from entrenar_py.check.clauses import Check
from entrenar_py.check.contract import Position
from entrenar_py.check.evidence.needs import TWIN, Runs
from entrenar_py.check.harness import companions, roles
from entrenar_py.check.harness.plan import Task, is_trainer
from entrenar_py.check.harness.runner import Judgement, Listener, combine, ignore, judge
from entrenar_py.check.rank_files import observed_run
from entrenar_py.check.rank_files.rank_file import SUFFIX
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared import faults
from entrenar_py.shared import trace as trace_file
from entrenar_py.shared.errors import TraceError, UsageError
from entrenar_py.shared.systems import SYSTEMS
from entrenar_py.shared.trace import Called, Trace
from entrenar_py.shared.verdict import Finding, Verdict, first_few, not_applied

_PATTERN = frozenset("*?[")


def load(paths: Sequence[Path]) -> dict[Path, Trace]:
    """Return the traces in `paths`, by file. A path is a file, a folder of `*.jsonl`, or a pattern.

    The files of one run's ranks (`*.rank.jsonl`) form one trace, under the path of their folder.
    Raises TraceError for a file that can't be trusted, UsageError for a folder or a pattern without
    traces.
    """
    files = dict.fromkeys(file for path in paths for file in _files(path))
    ranks: dict[Path, list[Path]] = defaultdict(list)
    for file in files:
        if file.name.endswith(SUFFIX):
            ranks[file.parent].append(file)
    whole = {file: _load(file) for file in files if not file.name.endswith(SUFFIX)}
    return whole | {folder: observed_run.load(of_run) for folder, of_run in ranks.items()}


def _load(file: Path) -> Trace:
    """Return the trace in `file`; TraceError if its scenario's options are invalid.

    Reading a trace does not validate options, because each system defines its own.
    """
    trace = trace_file.load(file)
    try:
        companions.of((TWIN,), trace.scenario)
    except UsageError as error:
        raise TraceError(f"trace file {file}: scenario: {error}") from error
    return trace


def _files(path: Path) -> list[Path]:
    """Return the files that `path` stands for: a file, a folder, or a pattern left by the shell."""
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
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
    """Return the traces' merged environment. Values that differ between traces are listed."""
    environments = [trace.environment for trace in traces]
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for environment in environments for name in environment):
        values = [environment[name] for environment in environments if name in environment]
        distinct = [value for place, value in enumerate(values) if value not in values[:place]]
        merged[name] = distinct[0] if len(distinct) == 1 else distinct
    return merged


def places(traces: Iterable[Trace]) -> dict[str, Position]:
    """Return the lines of the script that the first of the traces with any of them shows."""
    for trace in traces:
        called = sorted(trace.of(Called), key=lambda event: -event.rank)
        if called:
            return {event.what: Position(event.file, event.line, 1) for event in called}
    return {}


def judge_stored(
    tasks: Sequence[Task], traces: Mapping[Path, Trace], *, on_judged: Listener = ignore
) -> Iterator[Entry]:
    """Yield an entry per task from stored traces. Nothing is run.

    Each trace is judged together with those stored traces that answer the check's needs for it.
    Traces of another kind of system than the clause's scenarios are not judged.
    """
    scenarios = {file: trace.scenario for file, trace in traces.items()}
    for task in tasks:
        runs: dict[Path, Runs[Path]] = {}
        if task.check is not None:
            kinds = {_kind(planned.system) for planned in task.scenarios}
            runs = {
                file: roles.of(task.check.needs, file, scenarios)
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
    """Return the entry of `task`; `runs` maps the file of each trace to judge to the runs compared.

    In the entry, `num_scenarios` counts the traces judged. No scenario was explored. If there are
    several traces, `form` puts a reason and its files together.
    """
    started = time.monotonic()
    check = task.check
    judged = [_judge(task, check, own, beside, traces) for own, beside in runs.items() if check]
    for judgement in judged:
        on_judged([traces[file] for file in judgement.files])
    deciding = _telling(judged)
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
    """Return `finding`, or if it is inconclusive, that the clause does not apply to the traces.

    What a run lacks that failed by itself may come in the part that is missing.
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
    """Return the finding for a task that no trace fits; a probe's check makes it, given no runs."""
    if task.check is None or task.check.explores:
        return task.untried()
    return task.check.judge(task.invariant, Runs())


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """A check's judgement of the trace in the first of `files`, compared with those in the others.

    `recorded` is true if somebody wanted this trace judged: the clause lists its scenario, or it is
    of a user's own trainer. Other scenarios were tried at random.
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
        """The files as text, the judged one first."""
        own, *others = map(str, self.files)
        return f"{own} (with {first_few(others, separator=', ')})" if others else own


def _judge(
    task: Task, check: Check, own: Path, runs: Runs[Path], traces: Mapping[Path, Trace]
) -> _Judged:
    """Return the judgement of the trace in the file `own`, which is one of `runs`."""
    scenario = traces[own].scenario
    return _Judged(
        files=tuple(dict.fromkeys((own, *runs, *(near.run for near in runs.near.values())))),
        judgement=judge(task.invariant, check, runs.chosen(traces.get)),
        recorded=scenario in task.scenarios or scenario.system not in SYSTEMS,
    )


def _telling(judged: Sequence[_Judged]) -> list[_Judged]:
    """Return the judgements that decide the verdict, or all of them if none decides.

    An inconclusive judgement decides only if a run failed, or if it is `recorded` and not vacuous.
    It is dropped if its trace is only the baseline of a judgement that is kept.
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
    """Return the findings, each reason with the files that have it, in the given `form`."""
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
