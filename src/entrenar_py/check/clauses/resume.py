"""F-TI-003: a run that was stopped and resumed is the same run, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes import presuppositions, resumes, state, weight_averages
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import plans, resumed_step, same_bits, stopped_run
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, missing
from entrenar_py.check.evidence.needs import REPEATED, RESUMED, Traces
from entrenar_py.shared.trace import Shard, Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally
from entrenar_py.shared.wording import counted

_RESTORED = ("weights", "optimizer", "local", "buffers")


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that a resumed run has the unstopped run's samples, draws, rates, losses and states."""
    tally = missing.tally_for(invariant, runs)
    stopped_run.judge_unresumed(tally, runs)
    runs = evidence.usable_runs(runs, tally)
    straight = None if runs.base is None or _resumed(runs.base) else runs.base
    for trace in runs:
        if not _was_stopped(trace):
            continue
        if straight is None:
            tally.miss(_no_straight_run(tally, trace, runs))
            continue
        stopped_run.require_resumes(tally, trace)
        compared = Compared(runs=runs, model=straight, trace=trace)
        if not _resumed(trace):
            continue
        if option := trace.environment.get("resumed_by"):
            tally.note(f"the stopped run was told to go on as the script has it: {option}")
        left = presuppositions.comparable(tally, presuppositions.RESUMED, compared)
        if left is not None:
            missing.require_moves(tally, left.model)
            _compare(tally, left.model, left.trace)
    return tally.finding(
        nothing=missing.told(
            tally,
            trace="no run was stopped and resumed: record one with stops=(k,) in its scenario, and "
            "in it a Start with resumed=True and step=k on every rank",
            script="the run that was stopped did not go on where it stopped: after loading a "
            "checkpoint, tell observe(..., step=k) how many steps were made before",
        )
    )


def _compare(tally: Tally, straight: Trace, trace: Trace) -> None:
    """Compare a resumed run with the `straight` one; the causes of a difference come first."""
    is_own = trace.scenario.workload == "own"
    if is_own and not (
        stopped_run.repeats(tally, straight, trace)
        and stopped_run.begins_where_it_says(tally, straight, trace)
    ):
        return
    same_samples = resumes.compare_data(tally, straight, trace)
    resumes.compare_state(tally, straight, trace, _RESTORED)
    _same_rates(tally, straight, trace)
    if not same_samples:
        return
    _same_scale(tally, straight, trace)
    resumed_step.compare(tally, straight, trace)
    kept = _as_long(tally, straight, trace) if is_own else trace
    if is_own:
        _ends_as_late(tally, straight, trace)
        straight, kept = resumes.summed_alike(tally, straight, kept)
    message = "the resumed run differs from the straight one"
    same_bits.compare_steps(tally, straight, kept, message)
    state.compare_local_buffers(tally, straight, kept, f"{message} (buffers)")
    weight_averages.compare_resumed(tally, straight, kept)


def _resumed(trace: Trace) -> bool:
    return any(start.resumed for start in trace.of(Start))


def _was_stopped(trace: Trace) -> bool:
    """Return whether a run was resumed, or is a command's run that should have been."""
    return _resumed(trace) or (trace.scenario.workload == "own" and bool(trace.scenario.stops))


def _no_straight_run(tally: Tally, trace: Trace, runs: Traces) -> str:
    if tally.observed:
        return "the run without a stop, with which it would be compared, failed"
    why = "no straight run of the same training to compare with: "
    if not trace.scenario.stops:
        back_to = next(start.step for start in trace.of(Start) if start.resumed)
        return f"{why}the run that resumed must say so by stops=({back_to},) in its scenario"
    near = missing.nearest(tally, runs, RESUMED)
    return f"{why}record one with stops=() in its scenario, and all else equal{near}"


def _absent(traces: Sequence[Trace]) -> str:
    """Return why the script has nothing to resume from, as far as all of its runs show."""
    saves = {trace.traits.saves for trace in traces}
    stopped = [trace for trace in traces if trace.scenario.stops]
    if stopped and {trace.traits.loads for trace in traces} == {"late"}:
        if not all(map(stopped_run.began_anew, stopped)):
            return ""
        return (
            "the script loads its weights only once it has trained, and it began anew where it "
            "was started again beside its checkpoint: no run goes on from one"
        )
    unreached = next((trace.traits.unreached for trace in traces if trace.traits.unreached), "")
    if stopped or "" in saves:
        return ""
    if saves == {"nothing"} and not unreached:
        steps = counted(max(trace.scenario.num_steps for trace in traces), "step")
        return f"the script writes no checkpoint: no rank saved its weights in {steps}"
    if {trace.traits.loads for trace in traces} != {"nothing"}:
        return ""
    what = "saves its weights" if "weights" in saves else f"may save its weights ({unreached})"
    return f"the script {what}, and no line of it loads any: no run goes on from them"


def _as_long(tally: Tally, straight: Trace, trace: Trace) -> Trace:
    """Return `trace` without the steps after the last one of the `straight` run.

    They are missing, not different: {steps} may count those of one launch. They are neither if the
    harness ended the straight run.
    """
    last = max(evidence.updates(straight), default=-1)
    beyond = max(evidence.updates(trace), default=-1) - last
    if beyond <= 0 or last < 0:
        return trace
    if "ended" not in straight.environment:
        tally.miss(
            f"the resumed run made {beyond} steps more than the one without stops: {{steps}} is "
            "the number of steps in all, also after a resume; or the script's count was not "
            "restored"
        )
    kept = [
        event
        for event in trace.events
        if not (isinstance(event, Shard | Update) and event.step > last)
    ]
    return replace(trace, events=tuple(kept))


def _ends_as_late(tally: Tally, straight: Trace, trace: Trace) -> None:
    """Check that a resumed run that ended by itself made as many steps as the `straight` one."""
    made = max(evidence.updates(trace), default=-1) + 1
    due = max(evidence.updates(straight), default=-1) + 1
    if trace.end.status == "completed" and "ended" not in trace.environment:
        tally.check(
            made >= due,
            f"the resumed run ended by itself after {counted(made, 'step')}, and the one without "
            f"stops after {due}: it counts more than were made",
            step=made,
            scenario=trace.scenario,
        )


def _same_rates(tally: Tally, straight: Trace, trace: Trace) -> None:
    """Compare the learning rate of every tensor, in every step."""
    expected = evidence.updates(straight)
    for step, by_rank in evidence.ranks_by_step(trace):
        if step not in expected:
            continue
        for rank, update in by_rank.items():
            model = expected[step].get(rank, evidence.any_rank(expected[step]))
            place = evidence.place(trace, update)
            for name, pair in closeness.rates_of(model, update).items():
                due, got = pair
                is_told = due != got and tally.would_keep(update.step)
                whose = _rate_of(name, got, update.step, expected, trace) if is_told else ""
                message = (
                    f"the resumed run has another learning rate, {got:.6g} and not {due:.6g}{whose}"
                )
                tally.equal(*pair, message, tensor=name, **place)


def _rate_of(
    name: str | None, rate: float, at: int, expected: dict[int, dict[int, Update]], trace: Trace
) -> str:
    """Return in words which one other step of the straight run has the rate of step `at`, or ""."""
    step = closeness.step_of_rate(name, rate, expected)
    if step in (None, at):
        return ""
    back = [start.step for start in trace.of(Start) if start.resumed and start.step <= at]
    anew = step in (0, at - max(back, default=0))
    return f": that of step {step}{', as if the schedule began anew' if anew else ''}"


def _same_scale(tally: Tally, straight: Trace, trace: Trace) -> None:
    """Check that gradients are scaled as in the `straight` run.

    A loss scale that was not restored multiplies them by a power of two.
    """
    expected = {(shard.step, shard.rank, shard.shard): shard for shard in straight.of(Shard)}
    for shard in trace.of(Shard):
        model = expected.get((shard.step, shard.rank, shard.shard))
        factor = None if model is None else _power_of_two(model.gradient, shard.gradient)
        if factor is not None:
            message = (
                f"after the resume gradients are {factor:g} times those of the straight run: the "
                "loss scale was not restored"
            )
            tally.check(False, message, **evidence.place(trace, shard))


def _power_of_two(expected: Tensors, got: Tensors) -> float | None:
    """Return `got` over `expected` if it is one power of two, other than 1; else None."""
    due, now = evidence.vectors(expected), evidence.vectors(got)
    if due is None or now is None or due.keys() != now.keys():
        return None
    largest = max(due, key=lambda name: float(np.abs(due[name]).max(initial=0.0)))
    at = int(np.abs(due[largest]).argmax()) if due[largest].size else 0
    if due[largest].shape != now[largest].shape or not due[largest].size or not due[largest][at]:
        return None
    factor = float(now[largest][at]) / float(due[largest][at])
    if factor in (0.0, 1.0) or not np.isfinite(factor) or abs(np.frexp(factor)[0]) != 0.5:
        return None
    same = all(
        due[name].shape == now[name].shape
        and bool((due[name].astype(np.float64) * factor == now[name].astype(np.float64)).all())
        for name in due
    )
    return factor if same else None


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
        witnesses=(REPEATED,),
        takes_turned=True,
        absent=_absent,
    ),
)
