"""Stored traces judged again: nothing is run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from entrenar_py import trace as trace_file
from entrenar_py.checks import Check, missing
from entrenar_py.errors import UsageError
from entrenar_py.plan import Task, is_trainer
from entrenar_py.reports.report import Entry
from entrenar_py.runner import Judgement, combine, judge, telling
from entrenar_py.trace import Trace
from entrenar_py.verdict import Finding, Verdict


def load(paths: Sequence[Path]) -> list[Trace]:
    """The traces in `paths`, each a file or a folder of `*.jsonl` files.

    Raises TraceError for a file that can't be trusted, UsageError for a folder without traces.
    """
    traces = []
    for path in paths:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise UsageError(f"trace folder {path}: holds no *.jsonl file; give one that does")
        traces += [trace_file.load(file) for file in files]
    return traces


def environment(traces: Sequence[Trace]) -> Mapping[str, Any]:
    """Where the traces were recorded: what they agree on, and lists of what they differ in."""
    names = dict.fromkeys(name for trace in traces for name in trace.environment)
    found: dict[str, Any] = {}
    for name in names:
        values = [trace.environment[name] for trace in traces if name in trace.environment]
        distinct = [value for place, value in enumerate(values) if value not in values[:place]]
        found[name] = distinct[0] if len(distinct) == 1 else distinct
    return found


def judge_stored(tasks: Sequence[Task], traces: Sequence[Trace]) -> Iterator[Entry]:
    """An entry per task from stored traces; nothing is run.

    Each trace is judged beside those of its family that are there, as it was when it was run.
    Nothing was explored: `num_scenarios` counts the traces that say something about the clause.
    """
    for task in tasks:
        started = time.monotonic()
        planned, explored = _judgements(task, traces)
        findings = [one.finding for one in planned] + telling(explored)
        finding = combine(findings or [one.finding for one in explored] or [_unseen(task)])
        yield Entry(
            invariant=task.invariant,
            finding=finding,
            num_scenarios=len(planned) + len(explored),
            num_explored=0,
            elapsed_s=time.monotonic() - started,
        )


def _unseen(task: Task) -> Finding:
    """The finding where no trace was for the task; a probe's own words, where it is one."""
    if task.check is None or task.check.explores:
        return task.untried()
    return task.check.judge(task.invariant, ())


def _judgements(task: Task, traces: Sequence[Trace]) -> tuple[list[Judgement], list[Judgement]]:
    """What the check finds on each family: of planned scenarios, and of others that it could try.

    Runs of another kind of system than the clause asks for say nothing about it and are left out.
    """
    planned: list[Judgement] = []
    others: list[Judgement] = []
    if task.check is None:
        return planned, others
    trace_of = {trace.scenario: trace for trace in traces}
    kinds = {_kind(one.system) for one in task.scenarios}
    for trace in traces:
        scenario = trace.scenario
        if _kind(scenario.system) in kinds:
            beside = [trace_of[one] for one in task.check.family(scenario)[1:] if one in trace_of]
            judgement = judge(task.invariant, task.check, [trace, *beside])
            if judgement.finding.verdict is Verdict.INCONCLUSIVE:
                near = _nearest(task.check, trace, traces)
                judgement = judge(task.invariant, task.check, [trace, *beside, *near])
            (planned if scenario in task.scenarios else others).append(judgement)
    return planned, others


def _nearest(check: Check, trace: Trace, traces: Sequence[Trace]) -> list[Trace]:
    """The other trace that comes nearest to one that is missing beside `trace`: it may do after
    all, or the reason can say how it differs. Of the very same scenario it may be a copy.
    """
    others = {one.scenario: one for one in traces if one.scenario != trace.scenario}
    near = missing.nearest(trace.scenario, others, check.family)
    return [] if near is None else [others[near[0]]]


def _kind(system: str) -> str:
    return "trainer" if is_trainer(system) else system
