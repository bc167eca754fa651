"""F-TI-003: a run that was stopped and resumed is the same run, bit for bit."""

from __future__ import annotations

from entrenar_py.checks import evidence, missing, plans, same_bits
from entrenar_py.checks.check import Check
from entrenar_py.checks.needs import RESUMED, Traces
from entrenar_py.contract import Invariant
from entrenar_py.trace import Shard, Start, Trace
from entrenar_py.verdict import Finding, Tally


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that a resumed run has the unstopped run's samples, draws, rates, losses and states."""
    tally = Tally(invariant.id)
    runs = evidence.usable_runs(runs, tally)
    straight = None if runs.base is None or _resumed(runs.base) else runs.base
    for trace in runs:
        if not _resumed(trace):
            continue
        if straight is None:
            tally.miss(_no_straight_run(trace, runs))
            continue
        _require_resumes(tally, trace)
        _same_data(tally, straight, trace)
        message = "the resumed run differs from the straight one"
        same_bits.compare_steps(tally, straight, trace, message)
        _same_rates(tally, straight, trace)
    return tally.finding(
        nothing="no run was stopped and resumed: record one with stops=(k,) in its scenario, and "
        "in it a Start with resumed=True and step=k on every rank"
    )


def _resumed(trace: Trace) -> bool:
    return any(start.resumed for start in trace.of(Start))


def _no_straight_run(trace: Trace, runs: Traces) -> str:
    why = "no straight run of the same training to compare with: "
    if not trace.scenario.stops:
        back_to = next(start.step for start in trace.of(Start) if start.resumed)
        return f"{why}the run that resumed must say so by stops=({back_to},) in its scenario"
    near = runs.nearly(RESUMED)
    return f"{why}record one with stops=() in its scenario, and all else equal{near}"


def _require_resumes(tally: Tally, trace: Trace) -> None:
    """Count as missing each planned stop without a resume, unless the run ended before it."""
    seen = {start.step for start in trace.of(Start) if start.resumed}
    last = max(evidence.updates(trace), default=-1)
    for stop in trace.scenario.stops:
        if stop not in seen and stop <= last:
            missing.ask(
                tally,
                f"the run was to stop before step {stop}, and no resume was recorded",
                "a Start with resumed=True on every rank",
            )


def _same_data(tally: Tally, straight: Trace, trace: Trace) -> None:
    bare = missing.bare_fields(tally, straight, trace)
    expected = {(shard.step, shard.rank, shard.shard): shard for shard in straight.of(Shard)}
    for shard in trace.of(Shard):
        model = expected.get((shard.step, shard.rank, shard.shard))
        if model is None:
            continue
        place = evidence.place(trace, shard)
        moved = tuple(sorted(set(model.ids) ^ set(shard.ids))) or shard.ids
        if shard.ids != model.ids and "ids" not in bare:
            message = "after the resume other samples are drawn"
            tally.check(False, message, sample_ids=moved, **place)
        if "draws" not in bare:
            message = "after the resume other random numbers are drawn"
            tally.equal(model.draws, shard.draws, message, **place)


def _same_rates(tally: Tally, straight: Trace, trace: Trace) -> None:
    expected = evidence.updates(straight)
    for step, by_rank in evidence.ranks_by_step(trace):
        for rank, update in by_rank.items():
            if step in expected:
                model = expected[step].get(rank, evidence.any_rank(expected[step]))
                message = "the resumed run has another learning rate"
                rates = model.learning_rate, update.learning_rate
                tally.equal(*rates, message, **evidence.place(trace, update))


ROWS = (
    Check(
        name="resume",
        id="F-TI-003",
        decides="a run that was stopped and resumed is the same run, bit for bit",
        spoken_of="resume resumed checkpoint restart position skipped re-processed",
        judge=judge,
        plan=plans.stops,
        explores=True,
        needs=(RESUMED,),
        takes_turned=True,
    ),
)
