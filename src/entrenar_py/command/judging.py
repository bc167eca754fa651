"""What the checks find on the runs of somebody's own trainer: each on those that are for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from entrenar_py.checks import knob_pairs
from entrenar_py.command.knobs import KNOBS
from entrenar_py.contract import Invariant
from entrenar_py.harness import plan, stored
from entrenar_py.harness.plan import Task
from entrenar_py.harness.runner import Listener, ignore
from entrenar_py.reports.report import Entry, NotApplying
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Trace
from entrenar_py.verdict import inconclusive

# Which runs that are disturbed a check is there for.
_DISTURBED = {"finiteness": "non_finite_gradient", "recovery": "leave"}
_STOPPED = ("resume", "optimizer_state")
# What is judged on runs with a knob turned, and which knobs decide something there.
_TURNED = {
    "parity": tuple(KNOBS),
    "weighting": tuple(KNOBS),
    "step_rule": ("clip",),
    "replica_identity": (),
    "liveness": (),
    "resume": (),
    "optimizer_state": (),
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
    tasks: Sequence[Task], traces: Mapping[Path, Trace], *, on_judged: Listener = ignore
) -> Iterator[Entry]:
    """An entry per task that any of the runs, by file, is for; and per task that nothing tries."""
    for task in tasks:
        if task.check is None:
            yield untried(task)
            continue
        own = judged_by(task.check.name, traces)
        if own:
            (entry,) = stored.judge_stored([task], own, on_judged=on_judged)
            why = lacking(task.check.name, own)
            if why:
                entry = replace(entry, finding=inconclusive(task.invariant.id, why))
            notes = (*entry.finding.notes, *_untried(task.check.name, own))
            yield replace(entry, finding=replace(entry.finding, notes=notes))


def untried(task: Task) -> Entry:
    """Says of a clause that no check decides why that is so."""
    finding = task.untried()
    return Entry(
        invariant=task.invariant, finding=finding, num_scenarios=0, num_explored=0, elapsed_s=0.0
    )


def judged_by(check: str, traces: Mapping[Path, Trace]) -> dict[Path, Trace]:
    """Those of `traces` that say something about `check`: a run that was disturbed or stopped is
    there for the check that asked for it. Bits for any number of workers only who promises judges.
    """
    if check == "worker_count":
        return {file: one for file, one in traces.items() if "bitwise" in one.promises}

    def fits(one: Scenario) -> bool:
        disturbed = all(fault.kind == _DISTURBED.get(check) for fault in one.faults)
        turned = check in _TURNED or knob_pairs.pair_of(one) is None
        return disturbed and turned and (not one.stops or check in _STOPPED)

    return {file: one for file, one in traces.items() if fits(one.scenario)}


def _untried(check: str, traces: Mapping[Path, Trace]) -> list[str]:
    """Says which knobs the command does not have, that `check` would judge by."""
    found = [knob_pairs.pair_of(one.scenario) for one in traces.values()]
    tried = {pair.knob for pair in found if pair is not None}
    lacking = [f"{{{name}}}" for name in _TURNED.get(check, ()) if name not in tried]
    told = ", ".join(lacking)
    return [f"no runs were compared that differ in {told}: put it into the command"] * bool(told)


def lacking(check: str, traces: Mapping[Path, Trace]) -> str:
    """Why no run was made that `check` can't do without, and what to do; empty if there is one."""
    scenarios = [one.scenario for one in traces.values()]
    if check == "resume" and not any(one.stops for one in scenarios):
        return (
            "it was not stopped and resumed: the command has no {steps} (how many optimizer steps "
            "to make) or no {workdir} (where checkpoints go, and from where it goes on)"
        )
    if check == "recovery" and not any(one.faults for one in scenarios):
        return "no worker was killed: that takes two"
    return ""
