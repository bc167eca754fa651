"""Stored traces judged again: nothing is run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from entrenar_py import trace as trace_file
from entrenar_py.checks import Check, missing
from entrenar_py.errors import UsageError
from entrenar_py.harness.plan import Task, is_trainer
from entrenar_py.harness.runner import Judgement, Listener, combine, ignore, judge
from entrenar_py.rank_files import stored_run
from entrenar_py.rank_files.rank_file import SUFFIX
from entrenar_py.reports.report import Entry
from entrenar_py.systems import SYSTEMS
from entrenar_py.trace import Trace
from entrenar_py.verdict import Finding, Verdict, first_few

# A run that differs in one of these may differ rightly: no other is judged by it.
_APART = frozenset({"system", "mutant", "faults", "stops"})

_PATTERN = frozenset("*?[")


def load(paths: Sequence[Path]) -> dict[Path, Trace]:
    """The traces in `paths`, by file; each a file, a folder of `*.jsonl` files, or a pattern.

    The files of one run's ranks (`*.rank.jsonl`) are one trace, by their folder. Raises TraceError
    for a file that can't be trusted, UsageError for a folder or a pattern without traces.
    """
    files = dict.fromkeys(file for path in paths for file in _files(path))
    ranks: dict[Path, list[Path]] = defaultdict(list)
    for file in files:
        if file.name.endswith(SUFFIX):
            ranks[file.parent].append(file)
    whole = {file: trace_file.load(file) for file in files if not file.name.endswith(SUFFIX)}
    return whole | {folder: stored_run.load(of_run) for folder, of_run in ranks.items()}


def _files(path: Path) -> list[Path]:
    """The files that a path, a folder or a pattern means, which a shell may have left as it is."""
    if path.is_dir():
        found = sorted(path.glob("*.jsonl"))
        if not found:
            raise UsageError(f"trace folder {path}: holds no *.jsonl file; give one that does")
        return found
    if _PATTERN.intersection(str(path)) and not path.exists():
        matched = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        found = [file for one in matched for file in _files(one)]
        if not found:
            raise UsageError(f"traces {path}: no file is called so; nothing can be judged")
        return found
    return [path]


def environment(traces: Iterable[Trace]) -> Mapping[str, Any]:
    """Where the traces were recorded: what they agree on, and lists of what they differ in."""
    recorded = [trace.environment for trace in traces]
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in recorded for name in one):
        values = [one[name] for one in recorded if name in one]
        distinct = [value for place, value in enumerate(values) if value not in values[:place]]
        found[name] = distinct[0] if len(distinct) == 1 else distinct
    return found


def judge_stored(
    tasks: Sequence[Task], traces: Mapping[Path, Trace], *, on_judged: Listener = ignore
) -> Iterator[Entry]:
    """An entry per task from stored traces, by file; nothing is run.

    Each trace is judged beside those of its family that are there, as it was when it was run.
    Nothing was explored: `num_scenarios` counts the traces that say something about the clause.
    """
    for task in tasks:
        started = time.monotonic()
        judged = _judge_each(task, traces)
        for one in judged:
            on_judged([traces[file] for file in one.files])
        told = _telling(judged)
        findings = _located(told) if len(traces) > 1 else [one.finding for one in told]
        yield Entry(
            invariant=task.invariant,
            finding=combine(findings or [_unseen(task)]),
            num_scenarios=len(judged),
            num_explored=0,
            elapsed_s=time.monotonic() - started,
        )


def _unseen(task: Task) -> Finding:
    """The finding where no trace was for the task; a probe's own words, where it is one."""
    if task.check is None or task.check.explores:
        return task.untried()
    return task.check.judge(task.invariant, ())


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """What the check found on the trace in the first of `files`, judged with the others beside it.

    `recorded` tells whether the trace is here because someone wants it judged: the clause asks for
    its scenario, or it is of somebody's own trainer. Others were tried at random.
    """

    files: tuple[Path, ...]
    judgement: Judgement
    recorded: bool

    @property
    def finding(self) -> Finding:
        """The judgement's."""
        return self.judgement.finding

    @property
    def is_open(self) -> bool:
        """Whether the finding is inconclusive."""
        return self.finding.verdict is Verdict.INCONCLUSIVE

    @property
    def place(self) -> str:
        """The files, as text."""
        own, *beside = map(str, self.files)
        return f"{own} (beside {first_few(beside, separator=', ')})" if beside else own


def _judge_each(task: Task, traces: Mapping[Path, Trace]) -> list[_Judged]:
    """What the check finds on each trace.

    Runs of another kind of system than the clause asks for say nothing about it and are left out.
    """
    check = task.check
    if check is None:
        return []
    found = []
    kinds = {_kind(one.system) for one in task.scenarios}
    file_of = {trace.scenario: file for file, trace in traces.items()}
    for file, trace in traces.items():
        own = trace.scenario
        if _kind(own.system) in kinds:
            family = [one for one in check.family(own)[1:] if one in file_of and one != own]
            beside = {file_of[one]: traces[file_of[one]] for one in family}
            judged = _judge(task, check, {file: trace, **beside})
            found.append(_beside_nearest(task, check, judged, traces) if judged.is_open else judged)
    return found


def _judge(task: Task, check: Check, traces: Mapping[Path, Trace]) -> _Judged:
    """What the check finds on the first of `traces` beside the others."""
    own = next(iter(traces.values())).scenario
    return _Judged(
        files=tuple(traces),
        judgement=judge(task.invariant, check, [*traces.values()]),
        recorded=own in task.scenarios or own.system not in SYSTEMS,
    )


def _beside_nearest(
    task: Task, check: Check, judged: _Judged, traces: Mapping[Path, Trace]
) -> _Judged:
    """`judged` again beside the trace that comes nearest to one that is missing there, if that says
    more: it may do after all, or else the reason tells how it differs.
    """
    family = {file: traces[file] for file in judged.files}
    own = traces[judged.files[0]].scenario
    others = {
        trace.scenario: file
        for file, trace in traces.items()
        if file not in family and trace.scenario != own  # a copy is none to judge it by
    }
    near = missing.nearest(own, others, check.family)
    if near is None:
        return judged
    file = others[near[0]]
    together = _judge(task, check, {**family, file: traces[file]})
    if together.finding.reason == judged.finding.reason:
        return judged
    if together.is_open or _APART.isdisjoint(near[1]):
        return together
    reason = judged.finding.reason + missing.differing(near[1])
    finding = replace(judged.finding, reason=reason)
    return replace(judged, judgement=replace(judged.judgement, finding=finding))


def _telling(judged: Sequence[_Judged]) -> list[_Judged]:
    """Those that decide: without runs in which there was nothing to compare, and without what was
    tried at random and lacks something; all of them where none decides.

    An open one is left out if another was judged with it beside: by itself a baseline is open.
    """
    decide = [
        one
        for one in judged
        if not one.is_open or one.judgement.failed or (one.recorded and not one.finding.vacuous)
    ] or judged
    baselines = {file for one in decide for file in one.files[1:]}
    told: list[_Judged] = []
    for one in sorted(decide, key=lambda one: (one.is_open, one.files[0] in baselines)):
        if not (one.is_open and any(one.files[0] in other.files for other in told)):
            told.append(one)
    return told


def _located(judged: Sequence[_Judged]) -> list[Finding]:
    """The findings, their reasons led by the files that they are about."""
    places: dict[str, list[str]] = defaultdict(list)
    for one in judged:
        places[one.finding.reason].append(one.place)
    return [
        replace(found, reason=f"{first_few(places[found.reason], separator=', ')}: {found.reason}")
        if found.reason
        else found
        for found in (one.finding for one in judged)
    ]


def _kind(system: str) -> str:
    return "trainer" if is_trainer(system) else system
