"""F-EL-001 to F-EL-007: training while ranks die and join.

All are judged on the system `elastic`. What it should have computed is known from `elastic_oracle`,
which makes the same steps in one loop. A *stay* is the time of one process in one generation; a
process commits a step at most once in it. Source: elastic-v1.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.clauses.check import Check, probe
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, missing
from entrenar_py.check.evidence.needs import ORACLE, Traces
from entrenar_py.shared.faults import SILENT, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Grouped, Halt, Injected, Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally
from entrenar_py.shared.wording import listed

# Of the deadline, which is what ranks wait for one that is silent. A death is told at once, so they
# need not wait. If a rank is frozen, they wait for its part of a sum, and then for it to come.
SHARE_TOLD, SHARE_SILENT = 0.5, 2.5
_STATE = ("weights", "optimizer", "extra")


def plan_scenario(*faults: Fault, deadline_s: float = 8.0, **changes: Any) -> Scenario:
    """Return a scenario of three ranks and eight micro-batches."""
    usual: dict[str, Any] = {
        "world_size": 3,
        "num_shards": 8,
        "num_steps": 8,
        "learning_rate": 0.01,
        **changes,
    }
    options = {"deadline_s": deadline_s, "audit_share": 1.0}
    return probe("elastic", faults=faults, options=options, **usual)


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan a run in which a rank dies and is replaced, and one in which it gets wrong gradients."""
    kill = Fault(kind="kill", rank=1, step=1, at="Exchange")
    wrong = Fault(kind="corrupt_gradient", rank=1, step=2, shard=3, value="0.5")
    return [plan_scenario(kill, Fault(kind="join", rank=1, step=3)), plan_scenario(wrong)]


@dataclass
class Stay:
    """What one process did in one generation, from the state in `grouped` on.

    `after` is its next stay, None if it ended.
    """

    grouped: Grouped
    shards: list[Shard] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    after: Stay | None = None

    @property
    def commits(self) -> list[int]:
        """The steps that it committed, in order."""
        return [update.step for update in self.updates]

    @property
    def later(self) -> Iterator[Stay]:
        """This stay, and the next ones of the same process."""
        stay: Stay | None = self
        while stay is not None:
            yield stay
            stay = stay.after


def stays_of(trace: Trace) -> list[Stay]:
    """Return all stays in `trace`, by rank and process."""
    stays: list[Stay] = []
    for event in trace.events:
        last = stays[-1] if stays else None
        if isinstance(event, Grouped):
            stays.append(Stay(event))
            if last is not None and _process(last.grouped) == _process(event):
                last.after = stays[-1]
        elif last is None or getattr(event, "rank", None) != last.grouped.rank:
            continue
        elif isinstance(event, Shard):
            last.shards.append(event)
        elif isinstance(event, Update):
            last.updates.append(event)
        elif isinstance(event, Injected):
            last.injected.append(event)
    return stays


def _process(grouped: Grouped) -> tuple[int, int]:
    return grouped.rank, grouped.process


Compare = Callable[[Tally, Trace, Trace, Sequence[Stay]], None]


def judge(compare: Compare, nothing: str) -> Callable[[Invariant, Traces], Finding]:
    """Return a judge by `compare`, which gets the run, its oracle and its stays.

    `nothing` is the finding's reason if the run had nothing to compare.
    """

    def judged(invariant: Invariant, runs: Traces) -> Finding:
        tally = Tally(invariant.id)
        runs = evidence.usable_runs(runs, tally)
        for trace in (run for run in runs if run.of(Grouped)):
            oracle = next(iter(runs.of(ORACLE)), None)
            if oracle is None:
                tally.miss("there is no run of the plain loop to compare with")
            else:
                compare(tally, trace, oracle, stays_of(trace))
        return tally.finding(nothing=missing.probed(invariant, nothing))

    return judged


# --- the state of each step -----------------------------------------------------------------------


def compare_trajectory(tally: Tally, trace: Trace, oracle: Trace, stays: Sequence[Stay]) -> None:
    """Check that every step of every rank leaves the state of the oracle, and none is missing."""
    due = {update.step: update for update in oracle.of(Update)}
    for stay in stays:
        for update in stay.updates:
            model, place = due.get(update.step), evidence.place(trace, update)
            rank = f"rank {update.rank} after step {update.step}"
            if model is None:
                tally.check(False, f"{rank}: the undisturbed run has no such step", **place)
                continue
            what = f"{rank}: the schedule is not where that of the undisturbed run is"
            tally.equal(model.schedule, update.schedule, what, **place)
            what = f"{rank}: the learning rate is not that of the undisturbed run"
            tally.equal(model.learning_rate, update.learning_rate, what, **place)
            _compare_state(tally, model, update, rank, place)
    done = {step for stay in stays for step in stay.commits}
    closeness.compare_steps_made(tally, due.keys() - done, trace)


def _compare_state(
    tally: Tally,
    model: Start | Update,
    got: Grouped | Update,
    subject: str,
    place: Mapping[str, Any],
) -> None:
    for part in _STATE:
        name = "averages" if part == "extra" else part
        message = f"{subject}: {name} differ from the undisturbed run"
        closeness.compare_exact(tally, getattr(model, part), getattr(got, part), message, **place)


def compare_beginnings(
    received: bool,
    tally: Tally,
    trace: Trace,
    oracle: Trace,
    stays: Sequence[Stay],
) -> None:
    """Check the state with which ranks begin a generation: received by a transfer, or their own.

    One of those with their own state serves it to others.
    """
    states: dict[int, Start | Update] = {one.step + 1: one for one in oracle.of(Update)}
    states |= {one.step: one for one in oracle.of(Start)}
    for grouped in (stay.grouped for stay in stays if stay.grouped.received == received):
        place = {**evidence.place(trace, grouped), "step": grouped.step - 1}
        how = "received" if received else "went on with"
        rank = f"what rank {grouped.rank} {how} in generation {grouped.generation}"
        model = states.get(grouped.step)
        if model is None:
            tally.check(False, f"{rank}: the undisturbed run has no such step", **place)
            continue
        schedule = model.schedule if isinstance(model, Update) else 0
        what = f"{rank}: the schedule is not where that of the undisturbed run is"
        tally.equal(schedule, grouped.progress.get("schedule"), what, **place)
        _compare_state(tally, model, grouped, rank, place)


# --- the micro-batches ----------------------------------------------------------------------------


def compare_samples(tally: Tally, trace: Trace, oracle: Trace, stays: Sequence[Stay]) -> None:
    """Check that each committed step has each micro-batch once, with the oracle's samples."""
    due = {(shard.step, shard.shard): shard for shard in oracle.of(Shard)}
    attempts: dict[tuple[int, int], list[Shard]] = defaultdict(list)
    for stay in stays:
        for shard in stay.shards:
            attempts[stay.grouped.generation, shard.step].append(shard)
            model, place = due.get((shard.step, shard.shard)), evidence.place(trace, shard)
            what = f"rank {shard.rank} computed micro-batch {shard.shard} of step {shard.step}"
            if tally.check(model is not None, f"{what}, which does not exist", **place):
                assert model is not None
                tally.equal(model.ids, shard.ids, f"{what} with other samples", **place)
                tally.equal(model.draws, shard.draws, f"{what} with other random numbers", **place)
    for generation, step in sorted(_committed(stays), key=lambda key: key[::-1]):
        counts = Counter(shard.shard for shard in attempts[generation, step])
        for index in range(trace.scenario.num_shards):
            what = f"step {step} was committed with micro-batch {index} in it"
            where = {"step": step, "shard": index, "scenario": trace.scenario}
            num = counts[index]
            tally.equal(1, num, f"{what} {num} times (generation {generation})", **where)


def _committed(stays: Sequence[Stay]) -> set[tuple[int, int]]:
    """Return the (generation, step) of all steps that some rank committed."""
    return {(stay.grouped.generation, step) for stay in stays for step in stay.commits}


def compare_together(tally: Tally, trace: Trace, oracle: Trace, stays: Sequence[Stay]) -> None:
    """Check that the members of a generation are agreed on, and that nobody steps without them."""
    by_generation: dict[int, list[Stay]] = defaultdict(list)
    for stay in stays:
        by_generation[stay.grouped.generation].append(stay)
    for generation, together in sorted(by_generation.items()):
        first = together[0].grouped
        for stay in together:
            grouped, place = stay.grouped, evidence.place(trace, stay.grouped)
            what = f"rank {grouped.rank} trains in generation {generation} with ranks "
            what += listed([str(one) for one in grouped.members], most=8)
            other = f"{what}, and rank {first.rank} with others"
            tally.equal(first.members, grouped.members, other, **place)
            tally.check(grouped.rank in grouped.members, f"{what}, not with itself", **place)
            other = f"{what}, but not from the step of rank {first.rank}"
            tally.equal(first.step, grouped.step, other, **place)
            _compare_course(tally, trace, stay)
            _compare_end(tally, trace, stay)
            for step in stay.commits:
                _compare_partners(tally, trace, stay, step, together)
    for stay in stays:
        _compare_others(tally, trace, stay, by_generation)


def _compare_course(tally: Tally, trace: Trace, stay: Stay) -> None:
    """Check that a process commits steps one by one, and goes on where it was."""
    grouped, step = stay.grouped, stay.grouped.step
    for update in stay.updates:
        what = f"rank {update.rank} committed step {update.step}, but step {step} was its next"
        tally.equal(step, update.step, what, **evidence.place(trace, update))
        step = update.step + 1
    if stay.after is not None and not stay.after.grouped.received:
        what = f"rank {grouped.rank} went on with another step than its next"
        tally.equal(step, stay.after.grouped.step, what, **evidence.place(trace, grouped))


def _compare_end(tally: Tally, trace: Trace, stay: Stay) -> None:
    """Check that a process that nothing struck stays to the end.

    If one is frozen, others may be slow, too: then the deadline is too short to tell.
    """
    if any(fault.kind == "freeze" for fault in trace.scenario.faults) or stay.injected:
        return
    if any(halt.rank == stay.grouped.rank for halt in trace.of(Halt)):
        return
    num_made = 1 + max([*stay.commits, stay.grouped.step - 1])
    what = f"rank {stay.grouped.rank} ended without step {num_made}, though nothing struck it"
    place = {"step": num_made, "rank": stay.grouped.rank, "scenario": trace.scenario}
    tally.check(stay.after is not None or num_made == trace.scenario.num_steps, what, **place)


def _compare_partners(
    tally: Tally, trace: Trace, stay: Stay, step: int, together: Sequence[Stay]
) -> None:
    """Check that the others of its generation commit `step`, get its state, or end.

    If it ended after the step itself, they may have had to repeat it.
    """
    if stay.after is None and step == stay.commits[-1]:
        return
    for other in together:
        left = step in other.commits or other.after is None or other.after.grouped.step > step
        what = f"rank {stay.grouped.rank} committed step {step}, and rank {other.grouped.rank}, "
        what += f"which was in generation {stay.grouped.generation}, too, went on without it"
        place = {"step": step, "rank": other.grouped.rank, "scenario": trace.scenario}
        tally.check(left, what, **place)


def _compare_others(
    tally: Tally, trace: Trace, stay: Stay, by_generation: Mapping[int, Sequence[Stay]]
) -> None:
    """Check that nobody repeats the step of a process that goes on: they would train apart."""
    stays_on = [*stay.later]
    last = max((step for each in stays_on for step in each.commits), default=-1)
    own = {each.grouped.generation for each in stays_on}
    for step in stay.commits:
        for generation, together in by_generation.items():
            if generation <= stay.grouped.generation or generation in own:
                continue
            again = [each.grouped.rank for each in together if step in each.commits]
            what = f"rank {stay.grouped.rank} committed step {step} and went on, and so did rank "
            what += f"{again[0] if again else None} in generation {generation}, without it"
            place = {"step": step, "rank": stay.grouped.rank, "scenario": trace.scenario}
            tally.check(not again or last == step, what, **place)


# --- how long it takes ----------------------------------------------------------------------------


def compare_waits(tally: Tally, trace: Trace, oracle: Trace, stays: Sequence[Stay]) -> None:
    """Check how long ranks that go on waited for the next generation."""
    deadline_s = trace.scenario.options.get("deadline_s")
    if deadline_s is None:
        tally.miss("the scenario has no deadline_s, so there is no bound")
        return
    silent = any(one.kind == "freeze" for one in trace.scenario.faults)
    most = (SHARE_SILENT if silent else SHARE_TOLD) * deadline_s
    for stay in stays:
        # What a frozen rank itself waited is not the trainer's.
        frozen = any(strike.fault.get("kind") == "freeze" for strike in stay.injected)
        if (after := stay.after) is None or frozen or after.grouped.waited_s is None:
            continue
        what = f"rank {after.grouped.rank} went on after {after.grouped.waited_s:.1f} s"
        place = evidence.place(trace, after.grouped)
        tally.at_most(most, after.grouped.waited_s, what, form=".3g", **place)


def compare_audits(tally: Tally, trace: Trace, oracle: Trace, stays: Sequence[Stay]) -> None:
    """Check that a rank halts in the first step for which it computed wrong bits, and no other."""
    struck = [one for one in trace.of(Injected) if one.fault.get("kind") in SILENT]
    wrong = {one.rank: one.step for one in reversed(struck)}
    died = {one.step for one in trace.of(Injected) if one not in struck}
    halted = {halt.rank: halt.step for halt in trace.of(Halt)}
    audited = trace.scenario.options.get("audit_share") == 1
    for rank in range(trace.scenario.world_size) if audited else ():
        due, got = wrong.get(rank), halted.get(rank)
        if got is None and due in died:
            continue  # what was wrong once was not used
        late = "right bits, and was blamed" if due is None else "wrong bits, and was found later"
        what = "wrong bits, and was not found" if got is None else late
        place = {"step": due if due is not None else got, "rank": rank, "scenario": trace.scenario}
        tally.equal(due, got, f"rank {rank} computed {what} in that step", **place)


_NO_RUN = "no elastic training was run"
_NO_OTHER = "no rank went on in another generation"
# Name, comparison, what it decides, other words for that, and the reason if nothing was compared.
_CHECKS: tuple[tuple[str, Compare, str, str, str], ...] = (
    (
        *("elastic_trajectory", compare_trajectory),
        "each step of each rank leaves the state of the undisturbed run, whoever dies or joins",
        *("preemption failure spot", _NO_RUN),
    ),
    (
        *("elastic_samples", compare_samples),
        "each committed step has each micro-batch once, also if ranks die or join in it",
        *("lost duplicated resharding", _NO_RUN),
    ),
    (
        *("elastic_together", compare_together),
        "ranks agree on the members, and a step is committed by all of them or by none",
        *("quorum split-brain regroup", _NO_RUN),
    ),
    (
        *("elastic_joins", partial(compare_beginnings, True)),
        "a rank that joins begins with the whole state of the last committed step",
        *("newcomer spare", "no rank received a state"),
    ),
    (
        *("elastic_waits", compare_waits),
        "after a death the other ranks go on at once, and after a silence when it is due",
        *("detection regroup", _NO_OTHER),
    ),
    (
        *("elastic_service", partial(compare_beginnings, False)),
        "a rank that goes on, and may serve its state, has that of the last committed step",
        *("half-stepped torn", _NO_OTHER),
    ),
    (
        *("elastic_audits", compare_audits),
        "a rank that computes wrong bits is found by others before the step is committed",
        *("silent corruption SDC bit-flip stuck", "not all micro-batches of any run were audited"),
    ),
)
ROWS = tuple(
    Check(
        name=name,
        id=f"F-EL-{number:03}",
        decides=decides,
        spoken_of=f"elastic {spoken_of}",
        judge=judge(compare, nothing),
        plan=plan,
        needs=(ORACLE,),
    )
    for number, (name, compare, decides, spoken_of, nothing) in enumerate(_CHECKS, start=1)
)
