"""The conditions of comparing a stopped run with the same run without stops.

Only for users' commands, of which the harness knows neither whether they repeat themselves nor
whether `observe(step=...)` says what the script does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from entrenar_py.check import evidence
from entrenar_py.check.evidence import closeness, facts, missing
from entrenar_py.check.evidence.needs import Traces
from entrenar_py.shared.trace import Event, Shard, Start, Synchronised, Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally


def repeats(tally: Tally, straight: Trace, trace: Trace) -> bool:
    """Return whether the run was the `straight` one until it was stopped; if not, count why.

    Both were launched by the same command, apart from {steps}.
    """
    why = next(_differences(straight, trace), "")
    if why:
        tally.miss(f"{why}. So the stopped run can't be compared with the one without stops")
    return not why


def differed_before(straight: Trace, trace: Trace) -> bool:
    """Return whether the run differs from the `straight` one before its first stop, or in it."""
    stop = min(trace.scenario.stops, default=0)
    updates = (event for event in first_life(trace) if isinstance(event, Update))
    went_on = any(update.step >= stop for update in updates)
    return went_on or bool(next(_differences(straight, trace), ""))


def is_telling(trace: Trace) -> bool:
    """Return whether a stopped run has resumed, or read its checkpoint and gone on otherwise."""
    resumed = any(start.resumed for start in trace.of(Start))
    has_read = "unresumed" in trace.environment and trace.end.status == "completed"
    return resumed or bool(trace.traits.read_back) or has_read


def began_anew(trace: Trace) -> bool:
    """Return whether each rank of a stopped run began again as at first, beside a checkpoint."""
    return (
        bool(trace.traits.saved_after)
        and not is_telling(trace)
        and all(
            len(lives) > 1 and all(_same(lives[0], weights) for weights in lives)
            for lives in _first_weights(trace).values()
        )
    )


def _first_weights(trace: Trace) -> dict[int, list[Tensors]]:
    """Return by rank, for each of its lives, the weights from which it made its first step.

    A pass may have come before, and the weights been changed since.
    """
    lives: dict[int, list[Tensors]] = {}
    begun: dict[int, int] = {}  # by rank, the step with which its life begins
    for event in trace.events:
        if isinstance(event, Start):
            lives.setdefault(event.rank, []).append(event.weights)
            begun[event.rank] = event.step
        elif isinstance(event, Update) and begun.get(event.rank) == event.step:
            lives[event.rank][-1] = {**lives[event.rank][-1], **event.edited}
    return lives


def _differences(straight: Trace, trace: Trace) -> Iterator[str]:
    """Yield how the run differs from the `straight` one before its first stop."""
    updates = evidence.updates(straight)
    ids = {(shard.step, shard.rank, shard.shard): shard.ids for shard in straight.of(Shard)}
    for event in first_life(trace):
        if isinstance(event, Shard):
            due = ids.get((event.step, event.rank, event.shard), ())
            if due and event.ids and due != event.ids:
                yield (
                    f"before it was stopped, rank {event.rank} drew other samples in step "
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
    tensor = first_difference(model.weights, update.weights)
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


def first_difference(expected: Tensors, got: Tensors) -> str | None:
    """Return the first tensor that both sides hold with other bits; None if there is none."""
    return next(
        (n for n in expected if n in got and expected[n].digest != got[n].digest),
        None,
    )


# --- the step at which a resume says to go on -----------------------------------------------------


def begins_where_it_says(tally: Tally, straight: Trace, trace: Trace) -> bool:
    """Return whether each resume has the weights of the step that it says, as far as known.

    If it has those of another step, either the script counts wrongly, which is falsified, or
    `observe` was told another step than the script's, which is missing. The script counts so itself
    if it ends after as many steps as the `straight` run.
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
    """Return the only step after which the weights of `start` were held, if not the last before."""
    if not start.weights:
        return None
    held = [step for step, weights in before.items() if _same(weights, start.weights)]
    return held[0] if len(held) == 1 and held[0] != start.step - 1 else None


def _same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and first_difference(one, other) is None


def _tell_other_step(tally: Tally, straight: Trace, trace: Trace, start: Start, step: int) -> None:
    made = step + 1
    message = f"rank {start.rank} resumed at step {start.step} with the weights after step {step}"
    last = max(evidence.updates(straight), default=-1)
    if max(evidence.updates(trace), default=-1) == last:
        what = f"{message}: its count of steps is {start.step}, and {made} were made"
        tally.check(False, what, **evidence.place(trace, start))
    else:
        tally.miss(
            f"{message}: say how many optimizer steps (not micro-batches, not epochs) were made "
            f"before, observe(..., step={made})"
        )


def judge_unresumed(tally: Tally, runs: Traces) -> None:
    """Count a stopped run as broken whose script read its checkpoint and did not go on."""
    for trace in runs:
        if why := trace.environment.get("unresumed"):
            lives = Counter(start.rank for start in trace.of(Start))
            stop = trace.scenario.stops[max(lives.values(), default=1) - 1]
            tally.check(False, why, step=stop, scenario=trace.scenario)


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
                break  # after every stop it begins anew, for the same reason
        elif stop not in resumed and len(lives) <= number and stop <= last:
            why = f"the run was to stop before step {stop}, and no resume was recorded"
            missing.ask(tally, why, facts.RESUMED_START)


def _tell_anew(
    tally: Tally, trace: Trace, stop: int, starts: tuple[Start, Start], *, is_enough: bool
) -> None:
    """Count as missing why a rank that was started again after a stop has not resumed.

    `starts` are its first one, and the one after the stop. It is only noted if the first checkpoint
    was written later: then another stop `is_enough`. A script that has read its checkpoint has
    nothing else to go on by.
    """
    first, start = starts
    if _same(first.weights, start.weights):
        if trace.traits.read_back and not is_enough and _moves(trace, first):
            message = (
                f"after the stop before step {stop} the script read a checkpoint "
                f"({trace.traits.read_back}) and trained from its initial weights: nothing of it "
                "was restored"
            )
            tally.check(False, message, **evidence.place(trace, start))
            return
        why = f"after the stop before step {stop} the script began anew, with its initial weights"
        if is_enough:
            tally.note(f"{why}: it had written no checkpoint by then")
            return
        if trace.traits.read_back and not _moves(trace, first):
            why = (
                f"the script read a checkpoint ({trace.traits.read_back}), and steps leave its "
                "first weights as they are: at which step it goes on can't be told"
            )
            tally.miss(why)
            return
        tally.miss(f"{why}: {_how_to_resume(trace)}")
        return
    tally.miss(
        f"after the stop before step {stop} the script began at step {start.step}, with weights of "
        "no earlier step: if it resumes, say how many optimizer steps were made before, "
        "observe(..., step=...)"
    )


def _moves(trace: Trace, first: Start) -> bool:
    """Return whether each step of a rank's first life left other weights than it began with."""
    own = [e for e in first_life(trace) if isinstance(e, Update) and e.rank == first.rank]
    return bool(own) and not any(_same(update.weights, first.weights) for update in own)


def _how_to_resume(trace: Trace) -> str:
    """Return why a script may have begun anew, and what to do about it."""
    if trace.traits.saves != "weights":
        return (
            "it found no checkpoint in {workdir}, or loads none; save one at the latest when "
            "{steps} steps are made"
        )
    option = trace.traits.resume_option
    named = f"{option}, say, in the form" if option else "an option of it, say,"
    before = "" if option.startswith("-") or not option else "env "
    return (
        f"it saved its weights, and loads none by itself; tell it to go on by {named} {before}"
        f"{{resume:{option or '--resume PATH'}}} in the command: it is filled in after a stop only"
    )
