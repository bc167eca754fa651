"""What the checks find on the runs of somebody's own trainer: each on those that are for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from entrenar_py.checks import Check
from entrenar_py.checks.needs import ALONE, KILLED, RESUMED, Near, Need, Runs
from entrenar_py.command import asked
from entrenar_py.command.asked import Asked
from entrenar_py.command.runs import Run
from entrenar_py.contract import Invariant
from entrenar_py.harness import companions, plan, roles, stored
from entrenar_py.harness.plan import Task
from entrenar_py.harness.runner import Listener, ignore
from entrenar_py.reports.report import Entry, NotApplying
from entrenar_py.verdict import inconclusive

# What to do where no run was made that a check can't do without.
_WHY_NOT: Mapping[Need, str] = {
    RESUMED: (
        "it was not stopped and resumed: the command has no {steps} (how many optimizer steps "
        "to make) or no {workdir} (where checkpoints go, and from where it goes on)"
    ),
    KILLED: "no worker was killed: that takes two",
}


def tasks(selected: Sequence[Invariant]) -> list[Task]:
    """The clauses that say something of a trainer: none that probes of the harness decide, or
    that are bound as statements about systems of the harness (`elsewhere`).
    """
    others = {one.invariant.id for one in elsewhere(selected)}
    found, _ = plan.divide([one for one in selected if one.id not in others], plan.Plan())
    return [one for one in found if one.check is None or one.check.explores]


def elsewhere(selected: Sequence[Invariant]) -> tuple[NotApplying, ...]:
    """The clauses whose bindings say that they are about certain systems, which no command is."""
    return tuple(
        NotApplying(
            invariant=one,
            reason=f"it is bound as a statement about {', '.join(one.binding.systems)}",
        )
        for one in selected
        if one.binding is not None and one.binding.systems
    )


def judge(
    tasks: Sequence[Task], runs: Mapping[Path, Run], *, on_judged: Listener = ignore
) -> Iterator[Entry]:
    """Yield an entry per task that any of the runs, by file, is for, or that has no check."""
    for task in tasks:
        check = task.check
        if check is None:
            yield untried(task)
            continue
        traces = {file: run.trace for file, run in runs.items() if _is_for(check, run)}
        if not traces:
            continue
        groups = {file: _beside(check, file, runs) for file in traces}
        entry = stored.judge_each(task, groups, traces, on_judged=on_judged)
        asked = [runs[file].asked for file in traces]
        if why := lacking(check, asked):
            entry = replace(entry, finding=inconclusive(task.invariant.id, why))
        notes = (*entry.finding.notes, *_untried(check, asked))
        yield replace(entry, finding=replace(entry.finding, notes=notes))


def untried(task: Task) -> Entry:
    """Says of a clause that no check decides why that is so."""
    finding = task.untried()
    return Entry(
        invariant=task.invariant, finding=finding, num_scenarios=0, num_explored=0, elapsed_s=0.0
    )


def _is_for(check: Check, run: Run) -> bool:
    """Return whether `check` says something of a run; of bits only where the run promises them."""
    promised = not check.bitwise or "bitwise" in run.trace.promises
    return promised and asked.judges(check, run.asked)


def _beside(check: Check, file: Path, runs: Mapping[Path, Run]) -> Runs[Path]:
    """Return the files of the run in `file` and of those that it is judged beside.

    One worker's run of a script may be of another training: on other batches, say.
    """
    files = {run.asked: file for file, run in runs.items()}
    found = asked.beside(check.needs, runs[file].asked).chosen(files.get)
    for alone in found.of(ALONE):
        meant = companions.plain(runs[file].trace.scenario, world_size=1)
        fields = roles.differences(runs[alone].trace.scenario, meant)
        unlike = {name: pair for name, pair in fields.items() if name not in roles.free(ALONE)}
        if unlike:
            rest = {need: those for need, those in found.beside.items() if need is not ALONE}
            return replace(found, beside=rest, near={ALONE: Near(alone, unlike)})
    return found


def _untried(check: Check, asked: Sequence[Asked]) -> list[str]:
    """Say which knobs the command does not have, that `check` would judge by."""
    tried = {one.turn.knob for one in asked if one.turn is not None}
    needed = [need.knob for need in check.needs if need.knob]
    lacking = ", ".join(f"{{{knob}}}" for knob in needed if knob not in tried)
    return [f"no runs were compared that differ in {lacking}: put it into the command"] * bool(
        lacking
    )


def lacking(check: Check, asked: Sequence[Asked]) -> str:
    """Return why no run was made that `check` can't do without; empty if there is one."""
    if RESUMED in check.needs and not any(one.stops for one in asked):
        return _WHY_NOT[RESUMED]
    if KILLED in check.needs and not any(one.faults for one in asked):
        return _WHY_NOT[KILLED]
    return ""
