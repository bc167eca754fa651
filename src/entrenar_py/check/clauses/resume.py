"""F-TI-003: a run that is stopped and resumed has the bits of one that is not.

Two runs of a user's command are not always equal, and the step given to `observe(step=...)` is not
always the script's. So the presuppositions of comparing the two runs are judged first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes import presuppositions, resumes, state, weight_averages
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import plans, same_bits
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, facts, missing, step_sums
from entrenar_py.check.evidence.needs import REPEATED, RESUMED, Traces
from entrenar_py.shared.trace import Event, Shard, Start, Synchronised, Tensors, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally
from entrenar_py.shared.wording import counted

_RESTORED = ("weights", "optimizer", "local", "buffers")


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that a resumed run has the unstopped run's samples, draws, rates, losses and state."""
    tally = missing.tally_for(invariant, runs)
    judge_unresumed(tally, runs)
    runs = evidence.usable_runs(runs, tally)
    straight = None if runs.base is None or _resumed(runs.base) else runs.base
    for trace in runs:
        if not _was_stopped(trace):
            continue
        if straight is None:
            tally.miss(_no_straight_run(tally, trace, runs))
            continue
        require_resumes(tally, trace)
        compared = Compared(runs=runs, model=straight, trace=trace)
        if not _resumed(trace):
            continue
        if option := trace.environment.get("resumed_by"):
            tally.note(f"the stopped run was resumed by the script's own option: {option}")
        left = presuppositions.comparable(tally, presuppositions.RESUMED, compared)
        if left is not None:
            missing.require_moves(tally, left.model)
            _compare(tally, left.model, left.trace)
    return tally.finding(
        nothing=missing.told(
            tally,
            trace="no run was stopped and resumed: record one with stops=(k,) in its scenario, and "
            "in it a Start with resumed=True and step=k on every rank",
            script="the stopped run did not continue where it had stopped: after loading a "
            "checkpoint, tell observe(..., step=k) how many steps were made before",
        )
    )


def _compare(tally: Tally, straight: Trace, trace: Trace) -> None:
    """Compare a resumed run with the `straight` one, causes of a difference first."""
    is_own = trace.scenario.workload == "own"
    if is_own and not (
        repeats(tally, straight, trace) and begins_where_it_says(tally, straight, trace)
    ):
        return
    same_samples = resumes.compare_data(tally, straight, trace)
    resumes.compare_state(tally, straight, trace, _RESTORED)
    _same_rates(tally, straight, trace)
    if not same_samples:
        return
    _same_scale(tally, straight, trace)
    compare_first_steps(tally, straight, trace)
    kept = _as_long(tally, straight, trace) if is_own else trace
    if is_own:
        _ends_as_late(tally, straight, trace)
        straight, kept = resumes.summed_alike(tally, straight, kept)
    message = "the resumed run differs from the uninterrupted one"
    same_bits.compare_steps(tally, straight, kept, message)
    state.compare_local_buffers(tally, straight, kept, f"{message} (buffers)")
    weight_averages.compare_resumed(tally, straight, kept)


def _resumed(trace: Trace) -> bool:
    return any(start.resumed for start in trace.of(Start))


def _was_stopped(trace: Trace) -> bool:
    return _resumed(trace) or (trace.scenario.workload == "own" and bool(trace.scenario.stops))


def _no_straight_run(tally: Tally, trace: Trace, runs: Traces) -> str:
    if tally.observed:
        return "the run without a stop, with which it would be compared, failed"
    reason = "no uninterrupted run of the same training to compare with: "
    if not trace.scenario.stops:
        back_to = next(start.step for start in trace.of(Start) if start.resumed)
        return f"{reason}the run that resumed must say so by stops=({back_to},) in its scenario"
    near = missing.nearest(tally, runs, RESUMED)
    return f"{reason}record one with stops=() in its scenario, and all else equal{near}"


_NO_RESUME = {
    "late": "the script loads its weights only once it has trained, and it started over when it "
    "was restarted with its checkpoint",
    "other": "the script saves its weights, and when it was started again with these files it "
    "read none of them, and started over",
}


def absent(traces: Sequence[Trace]) -> str:
    """Return why the script has nothing to resume from, as far as its runs show; otherwise ""."""
    saves = {trace.traits.saves for trace in traces}
    stopped = [trace for trace in traces if trace.scenario.stops]
    loads = {trace.traits.loads for trace in traces}
    if stopped and len(loads) == 1 and (why := _NO_RESUME.get(*loads)):
        is_anew = all(map(began_anew, stopped))
        return f"{why}: no run continues from a checkpoint" if is_anew else ""
    unreached = next((trace.traits.unreached for trace in traces if trace.traits.unreached), "")
    if stopped or "" in saves:
        return ""
    if saves == {"nothing"} and not unreached:
        steps = counted(max(trace.scenario.num_steps for trace in traces), "step")
        return f"the script writes no checkpoint: no rank saved its weights in {steps}"
    if loads != {"nothing"}:
        return ""
    what = "saves its weights" if "weights" in saves else f"may save its weights ({unreached})"
    return f"the script {what}, but no line of it loads any: no run continues from them"


def _as_long(tally: Tally, straight: Trace, trace: Trace) -> Trace:
    """Return `trace` without the steps after the last one of the `straight` run.

    Additional steps are reported as missing, not as different, since {steps} may count the steps of
    one launch. If the harness ended the straight run, they are not reported at all.
    """
    last = max(evidence.updates(straight), default=-1)
    beyond = max(evidence.updates(trace), default=-1) - last
    if beyond <= 0 or last < 0:
        return trace
    if "ended" not in straight.environment:
        tally.miss(
            f"the resumed run made {beyond} steps more than the one without stops: {{steps}} is "
            "the total number of steps, including those before a resume; or the script's count "
            "was not restored"
        )
    kept = [
        event
        for event in trace.events
        if not (isinstance(event, Shard | Update) and event.step > last)
    ]
    return replace(trace, events=tuple(kept))


def _ends_as_late(tally: Tally, straight: Trace, trace: Trace) -> None:
    """Check that a resumed run that ended by itself took at least as many steps as `straight`."""
    num_steps = max(evidence.updates(trace), default=-1) + 1
    due = max(evidence.updates(straight), default=-1) + 1
    if trace.end.status == "completed" and "ended" not in trace.environment:
        tally.check(
            num_steps >= due,
            f"the resumed run ended by itself after {counted(num_steps, 'step')}, and the one "
            f"without stops after {due}: its step count is higher than the number of steps made",
            step=num_steps,
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
                source = _rate_of(name, got, update.step, expected, trace) if is_told else ""
                rate = f"{got:.6g} and not {due:.6g}{source}"
                message = f"the resumed run has a different learning rate, {rate}"
                tally.equal(*pair, message, tensor=name, **place)


def _rate_of(
    name: str | None, rate: float, at: int, expected: dict[int, dict[int, Update]], trace: Trace
) -> str:
    step = closeness.step_of_rate(name, rate, expected)
    if step in (None, at):
        return ""
    back = [start.step for start in trace.of(Start) if start.resumed and start.step <= at]
    anew = step in (0, at - max(back, default=0))
    return f": it is step {step}'s{', as if the schedule started over' if anew else ''}"


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
                f"after the resume gradients are {factor:g} times those of the "
                "uninterrupted run: the loss scale was not restored"
            )
            tally.check(False, message, **evidence.place(trace, shard))


def _power_of_two(expected: Tensors, got: Tensors) -> float | None:
    """Return `got` over `expected` if it is one power of two other than 1, otherwise None."""
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


# --- what a comparison with a run without stops presupposes ---------------------------------------


def repeats(tally: Tally, straight: Trace, trace: Trace) -> bool:
    """Return whether the run was the same as `straight` until it was stopped.

    If it was not, count the reason as missing. Both runs have the same command, except for {steps}.
    """
    difference = next(_differences(straight, trace), "")
    if difference:
        tally.miss(f"{difference}. So the stopped run can't be compared with the one without stops")
    return not difference


def differed_before(straight: Trace, trace: Trace) -> bool:
    """Return whether the run differs from `straight` before its first stop, or went on past it."""
    stop = min(trace.scenario.stops, default=0)
    updates = (event for event in first_life(trace) if isinstance(event, Update))
    went_on = any(update.step >= stop for update in updates)
    return went_on or bool(next(_differences(straight, trace), ""))


def is_telling(trace: Trace) -> bool:
    """Return whether a stopped run has resumed, or has read its checkpoint and continued."""
    resumed = any(start.resumed for start in trace.of(Start))
    has_read = "unresumed" in trace.environment and trace.end.status == "completed"
    return resumed or bool(trace.traits.read_back) or has_read


def began_anew(trace: Trace) -> bool:
    """Return whether each rank of a stopped run started over and ignored the checkpoint."""
    return (
        bool(trace.traits.saved_after)
        and not is_telling(trace)
        and all(
            len(lives) > 1 and all(evidence.are_equal(lives[0], weights) for weights in lives)
            for lives in _first_weights(trace).values()
        )
    )


def _first_weights(trace: Trace) -> dict[int, list[Tensors]]:
    """Return rank -> for each of its lives, the weights from which it took the first step.

    These are the weights of the start, with the changes before the step. A pass may have come
    earlier.
    """
    lives: dict[int, list[Tensors]] = {}
    begun: dict[int, int] = {}  # rank -> the first step of its life
    for event in trace.events:
        if isinstance(event, Start):
            lives.setdefault(event.rank, []).append(event.weights)
            begun[event.rank] = event.step
        elif isinstance(event, Update) and begun.get(event.rank) == event.step:
            lives[event.rank][-1] = {**lives[event.rank][-1], **event.edited}
    return lives


def _differences(straight: Trace, trace: Trace) -> Iterator[str]:
    """Yield, in words, how the run differs from the `straight` one before its first stop."""
    updates = evidence.updates(straight)
    ids = {(shard.step, shard.rank, shard.shard): shard.ids for shard in straight.of(Shard)}
    for event in first_life(trace):
        if isinstance(event, Shard):
            due = ids.get((event.step, event.rank, event.shard), ())
            if due and event.ids and due != event.ids:
                yield (
                    f"before it was stopped, rank {event.rank} drew different samples in step "
                    f"{event.step} than without stops: seed the order of the samples, and don't "
                    "let it depend on {steps}"
                )
        elif isinstance(event, Update):
            model = updates.get(event.step, {}).get(event.rank)
            if model is not None:
                yield from _moved_otherwise(model, event)


def _moved_otherwise(model: Update, update: Update) -> Iterator[str]:
    apart = closeness.first_unlike_rates(model, update)
    if apart is not None:
        name, due, got = apart
        yield (
            f"before it was stopped, step {update.step} had the learning rate {got:.6g}"
            f"{f' for {name}' if name else ''}, and without stops {due:.6g}: the schedule depends "
            "on more than the steps that were made"
        )
    tensor = evidence.first_difference(model.weights, update.weights)
    if tensor is not None:
        yield (
            f"before it was stopped, {tensor} differed after step {update.step} from the run "
            "without stops: two launches of this command are not the same run; seed it (F-TI-007), "
            "and leave no file outside of {workdir}"
        )


def first_life(trace: Trace) -> Iterator[Event]:
    """Yield the events before any rank was started a second time."""
    begun: set[int] = set()
    for event in trace.events:
        if isinstance(event, Start):
            if event.rank in begun:
                return
            begun.add(event.rank)
        yield event


# --- the step at which a resume claims to continue ------------------------------------------------


def begins_where_it_says(tally: Tally, straight: Trace, trace: Trace) -> bool:
    """Return whether each resume has the weights of the step that it reports, as far as is known.

    A resume with the weights of a different step has one of two causes. If the run ends at the same
    step as the `straight` run, the script counts wrongly: the clause is falsified. Otherwise
    `observe` was given a step that is not the script's: the right step counts as a missing fact.
    """
    weights: dict[int, dict[int, Tensors]] = {}  # rank -> step -> weights after it
    for event in trace.events:
        if isinstance(event, Update | Synchronised):
            weights.setdefault(event.rank, {})[event.step] = event.weights
        elif isinstance(event, Start) and event.resumed:
            before = weights.get(event.rank, {})
            other = _other_step(event, before)
            if other is not None:
                _tell_other_step(tally, straight, trace, event, other)
                return False
            weights[event.rank] = {at: held for at, held in before.items() if at < event.step}
    return True


def _other_step(start: Start, before: dict[int, Tensors]) -> int | None:
    if not start.weights:
        return None
    held = [step for step, weights in before.items() if evidence.are_equal(weights, start.weights)]
    return held[0] if len(held) == 1 and held[0] != start.step - 1 else None


def _tell_other_step(tally: Tally, straight: Trace, trace: Trace, start: Start, step: int) -> None:
    num_steps = step + 1
    message = f"rank {start.rank} resumed at step {start.step} with the weights after step {step}"
    last = max(evidence.updates(straight), default=-1)
    if max(evidence.updates(trace), default=-1) == last:
        what = f"{message}: its step count is {start.step}, but {num_steps} steps were made"
        tally.check(False, what, **evidence.place(trace, start))
    else:
        tally.miss(
            f"{message}: say how many optimizer steps (not micro-batches, not epochs) were made "
            f"before, observe(..., step={num_steps})"
        )


def judge_unresumed(tally: Tally, runs: Traces) -> None:
    """Report a counterexample if a script read its checkpoint after a stop and did not continue."""
    for trace in runs:
        if error := trace.environment.get("unresumed"):
            lives = Counter(start.rank for start in trace.of(Start))
            stop = trace.scenario.stops[max(lives.values(), default=1) - 1]
            tally.check(False, error, step=stop, scenario=trace.scenario)


def require_resumes(tally: Tally, trace: Trace) -> None:
    """Count as missing each planned stop after which no rank resumed, unless the run ended before.

    A resume may go back to an earlier step than the stop, if its checkpoint is older.
    """
    last = max(evidence.updates(trace), default=-1)
    starts: dict[int, list[Start]] = {}
    for start in trace.of(Start):
        starts.setdefault(start.rank, []).append(start)
    lives = max(starts.values(), key=len, default=[])
    resumed = {start.step for start in trace.of(Start) if start.resumed}
    for number, stop in enumerate(trace.scenario.stops, start=1):
        anew = [lives[number]] if number < len(lives) and not lives[number].resumed else []
        if anew and trace.scenario.workload == "own":
            _tell_anew(tally, trace, stop, (lives[0], anew[0]), is_enough=bool(resumed))
            if not resumed:
                break  # after every stop the script starts over, for the same reason
        elif stop not in resumed and len(lives) <= number and stop <= last:
            why = f"the run should stop before step {stop}, but no resume was recorded"
            missing.ask(tally, why, facts.RESUMED_START)


def _tell_anew(
    tally: Tally, trace: Trace, stop: int, starts: tuple[Start, Start], *, is_enough: bool
) -> None:
    """Count as missing that a rank that was started again after a stop has not resumed, and why.

    `starts` are the rank's first start and the one after the stop. `is_enough` says that a
    different stop was resumed. In that case, a stop before the first checkpoint was written is only
    noted. A script that has read its checkpoint has nothing else to continue from.
    """
    first, start = starts
    if evidence.are_equal(first.weights, start.weights):
        if trace.traits.read_back and not is_enough and _moves(trace, first):
            message = (
                f"after the stop before step {stop} the script read a checkpoint "
                f"({trace.traits.read_back}) and trained from its initial weights: nothing "
                "was restored from it"
            )
            tally.check(False, message, **evidence.place(trace, start))
            return
        what = (
            f"after the stop before step {stop} the script started over, with its initial weights"
        )
        if is_enough:
            tally.note(f"{what}: it had written no checkpoint by then")
            return
        if trace.traits.read_back and not _moves(trace, first):
            what = (
                f"the script read a checkpoint ({trace.traits.read_back}), and steps don't "
                "change its first weights: at which step it continues can't be told"
            )
            tally.miss(what)
            return
        tally.miss(f"{what}: {_how_to_resume(trace)}")
        return
    tally.miss(
        f"after the stop before step {stop} the script began at step {start.step}, "
        "with weights that no earlier step had: if it resumes, say how many "
        "optimizer steps were made before, observe(..., step=...)"
    )


def _moves(trace: Trace, first: Start) -> bool:
    own = [e for e in first_life(trace) if isinstance(e, Update) and e.rank == first.rank]
    return bool(own) and not any(
        evidence.are_equal(update.weights, first.weights) for update in own
    )


def _how_to_resume(trace: Trace) -> str:
    """Return why a script may have started over, and what to do about it."""
    if trace.traits.saves != "weights":
        return (
            "it found no checkpoint in {workdir}, or loads none; save one at the latest when "
            "{steps} steps are made"
        )
    option = trace.traits.resume_option
    named = f"{option}, say, in the form" if option else "an option of it, say,"
    before = "" if option.startswith("-") or not option else "env "
    return (
        "it saved its weights, but doesn't load any by itself; make it continue by "
        f"{named} {before}{{resume:{option or '--resume PATH'}}} in the command: it "
        "is filled in after a stop only"
    )


# --- the first step after a resume ----------------------------------------------------------------


def compare_first_steps(tally: Tally, straight: Trace, trace: Trace) -> None:
    """Compare the weights after the first step of each resume with equal recorded inputs."""
    expected, updates = evidence.updates(straight), evidence.updates(trace)
    for resume in resumes.resumes(trace):
        start = resume.start
        model, update = (steps.get(start.step, {}).get(start.rank) for steps in (expected, updates))
        if model is None or update is None or not _rests_on_the_same(resume, model, update):
            continue
        message = (
            f"rank {start.rank} resumed at step {start.step} with the right weights and "
            "optimizer state; its gradient and learning rate are right, too, but the step differs"
        )
        place = evidence.place(trace, update)
        words = _cause(resume, update)
        closeness.compare_exact(tally, model.weights, update.weights, message, words=words, **place)


def _rests_on_the_same(resume: resumes.Resume, model: Update, update: Update) -> bool:
    before, start = resume.before, resume.start
    pairs = [(model.gradient, update.gradient)]
    if before is not None:
        pairs += [(before.weights, start.weights), (before.optimizer, start.optimizer)]
    known = (
        before is not None
        and bool(model.gradient)
        and closeness.first_unlike_rates(model, update) is None
    )
    return known and all(evidence.are_equal(left, right) for left, right in pairs)


def _cause(resume: resumes.Resume, update: Update) -> str:
    """Return what was not restored: copies, if the weights went back to those of the start."""
    first = resume.begun.get(resume.start.rank)
    general = (
        "the optimizer's settings (decay, momentum), or copies of the weights that "
        "it steps, were not restored"
    )
    states = [resume.start.weights, update.weights, {} if first is None else first.weights]
    known = [vectors for vectors in map(evidence.vectors, states) if vectors is not None]
    sizes = [{name: vector.size for name, vector in vectors.items()} for vectors in known]
    if len(known) < len(states) or any(other != sizes[0] for other in sizes):
        return general
    was, came, begun = (step_sums.joined(vectors, vectors.keys()) for vectors in known)
    if not np.linalg.norm(came - begun) < np.linalg.norm(came - was):  # also if one is NaN
        return general
    return (
        "it went back to nearly its value before the first step: the optimizer steps copies of "
        "the weights, which were made before the checkpoint was loaded"
    )


ROWS = (
    Check(
        name="resume",
        id="F-TI-003",
        decides="a run that is stopped and resumed has the bits of one that is not",
        spoken_of="resume resumed checkpoint restart position skipped re-processed",
        judge=judge,
        plan=plans.stops,
        explores=True,
        needs=(RESUMED,),
        witnesses=(REPEATED,),
        takes_turned=True,
        absent=absent,
    ),
)
