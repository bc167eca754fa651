"""F-DP-003: finite gradients give a finite average; a NaN or Inf halts training before any update.

A user's trainer may instead skip the step on all ranks and continue.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.causes import presuppositions, state
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import audits, plans
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import facts, missing, step_sums
from entrenar_py.check.evidence.needs import POISONED, REPEATED, Traces
from entrenar_py.shared.scenario import OBSERVED
from entrenar_py.shared.trace import Halt, Injected, Saved, Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Counterexample, Finding, Tally, micro_batch
from entrenar_py.shared.wording import named

# Most scripts continue after a NaN, so the finding says what to add.
_REMEDY = (
    ": stop there, for example by torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, "
    "error_if_nonfinite=True) before optimizer.step()"
)

_ADVICE = (
    "advice, since no contract was named: torch, Lightning and Hugging Face's Trainer step with a "
    "NaN by default; --contract distributed-training-v1.yaml demands that a run stops"
)


def judge(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that a run halts at its first non-finite value, and otherwise never halts.

    Without such a value it must stay finite. A user's trainer may skip the step instead of halting.
    """
    tally = missing.tally_for(invariant, traces)
    state.judge_first_weights(tally, traces)
    for trace in evidence.usable(traces, tally):
        compared = Compared(runs=traces, model=trace, trace=trace)
        if presuppositions.comparable(tally, presuppositions.POISONED, compared) is None:
            continue
        dropped = _without_effect(trace, traces)
        if dropped is None:
            compare(tally, trace)
        else:
            tally.miss(
                f"the value that was planted in step {dropped} changed no weight: the pass "
                "in which it was planted trains nothing (a probe), and the script discards "
                "its gradient"
            )
    why = "no update and no halt was recorded"
    return tally.finding(nothing=missing.nothing(tally, why, facts.FINITE_AND_HALT))


def compare(tally: Tally, trace: Trace) -> None:
    """Judge one run: where it must halt, and that all its other updates are finite."""
    missing.require_updates(tally, trace)
    missing.require_shards(tally, trace)
    steps = _steps_struck(trace)
    passed_over = steps & evidence.skipped(trace)
    if passed_over:
        tally.compared += len(passed_over)
        words = evidence.skip_words(passed_over)
        tally.note(
            f"{words}, as a GradScaler does, because of a non-finite value: no weight changed"
        )
    if discarded := _discarded(trace):
        tally.compared += len(discarded)
        words = named("step", {shard.step for shard in discarded}, most=5)
        tally.note(
            f"no optimizer applied the gradient with the non-finite value of {words}: the script "
            "discards it, and other parameters were updated"
        )
    culprits = _culprits(trace, steps - passed_over)
    if culprits and all(
        isinstance(culprit, Injected) and _is_lost(trace, culprit) for culprit in culprits
    ):
        reason = (
            f"the micro-batch of step {culprits[0].step} in which a value was planted is not in "
            "the record: the script may have skipped its step"
        )
        missing.ask(tally, reason, facts.IDS)
    elif culprits and all(_is_perhaps_dropped(trace, culprit) for culprit in culprits):
        tally.miss(
            f"the gradient in which a value was planted in step {culprits[0].step} may be one that "
            "no optimizer applies, since several take turns"
        )
    elif culprits:
        _halts(tally, trace, culprits, passed_over)
    else:
        _stays_finite(tally, trace, passed_over)


def _without_effect(trace: Trace, traces: Traces) -> int | None:
    """Return the step of a planted value after which all ranks have the weights of a plain run.

    The value then had no effect. Return None if there is no such step or no plain run, or if the
    step moves no weights, since equal weights then prove nothing.
    """
    planted = {event.step or 0 for event in _bad(trace)[1]}
    size = trace.scenario.world_size
    plain = [run for run in traces.witnesses.get(REPEATED, ()) if run.scenario.world_size == size]
    if len(planted) != 1 or not plain:
        return None
    (step,), made, due = planted, evidence.updates(trace), evidence.updates(plain[0])
    got, before = made.get(step, {}), made.get(step - 1, {})
    moved = all(rank in before and _differ(before[rank], got[rank]) for rank in got)
    same = got.keys() == due.get(step, {}).keys() and not any(
        _differ(due[step][rank], got[rank]) for rank in got
    )
    return step if got and moved and same else None


def _differ(one: Update, other: Update) -> bool:
    return {n: t.digest for n, t in one.weights.items()} != {
        n: t.digest for n, t in other.weights.items()
    }


def _bad(trace: Trace) -> tuple[list[Shard], list[Injected]]:
    """Return the non-finite shards, and the injected faults that made a value non-finite.

    Both without those of passes that the script discards.
    """
    discarded = _discarded(trace)
    bad = [
        shard
        for shard in trace.of(Shard)
        if not _is_finite(shard) and not any(shard is one for one in discarded)
    ]
    planted = [
        event
        for event in trace.of(Injected)
        if str(event.fault.get("kind")).startswith("non_finite_")
        and not any(_same_place(event, shard) for shard in discarded)
    ]
    return bad, planted


def _discarded(trace: Trace) -> list[Shard]:
    """Return the non-finite shards of finite steps in which no rank applied any of their tensors.

    One of several optimizers may skip its part of a step on all ranks, as with a GradScaler. If
    only some ranks discard their gradients, the average lacks them.
    """
    if trace.of(Halt) or trace.scenario.workload != "own":
        return []
    updates, shards = evidence.updates(trace), evidence.shards(trace)
    return [
        shard
        for shard in trace.of(Shard)
        if not _is_finite(shard)
        and (by_rank := updates.get(shard.step))
        and shard.rank in by_rank
        and all(map(_is_update_finite, by_rank.values()))
        and _is_dropped_everywhere(by_rank, shards[shard.step], shard)
    ]


def _is_dropped_everywhere(
    by_rank: Mapping[int, Update], shards: Sequence[Shard], bad: Shard
) -> bool:
    alike = [shard for shard in shards if shard.gradient.keys() & bad.gradient.keys()]
    lost = [shard for shard in alike if _is_dropped(by_rank, shard)]
    return (
        any(shard is bad for shard in lost)
        and {shard.rank for shard in lost} == {shard.rank for shard in alike} == by_rank.keys()
    )


def _is_dropped(by_rank: Mapping[int, Update], shard: Shard) -> bool:
    applied = by_rank[shard.rank].gradient.keys() if shard.rank in by_rank else set[str]()
    return bool(applied) and applied.isdisjoint(step_sums.summed(by_rank, shard))


def _is_update_finite(update: Update) -> bool:
    known = evidence.non_finite(update.gradient) or evidence.non_finite(update.weights)
    return update.finite and known is None


def _steps_struck(trace: Trace) -> set[int]:
    bad, planted = _bad(trace)
    return {shard.step for shard in bad} | {event.step or 0 for event in planted}


def _culprits(trace: Trace, steps: Set[int]) -> list[Shard] | list[Injected]:
    bad, planted = _bad(trace)
    first = min(steps, default=-1)
    shards = [shard for shard in bad if shard.step == first]
    return shards or [event for event in planted if (event.step or 0) == first]


def _is_lost(trace: Trace, planted: Injected) -> bool:
    """Return whether the record may have lost the micro-batch in which a value was planted.

    That is possible if samples are unknown, since a skipped micro-batch is not recorded then. If it
    was recorded, the recorder of a user's script would have seen the value, because it runs after
    the fault struck. If ranks differ after the step, or take different numbers of steps, not all
    ranks skipped the micro-batch, so it wasn't lost.
    """
    place = planted.step, planted.rank
    shards = [shard for shard in trace.of(Shard) if (shard.step, shard.rank) == place]
    num_steps = Counter(update.rank for update in trace.of(Update))
    after = [update.weights for update in trace.of(Update) if update.step == planted.step]
    alike = len({tuple((n, one.digest) for n, one in weights.items()) for weights in after}) == 1
    is_own = trace.scenario.workload == "own"
    together = alike and len({*num_steps.values()}) == 1
    unknown = planted.step in missing.unknown_steps(trace)
    return is_own and together and unknown and bool(shards) and all(map(_is_finite, shards))


def _is_perhaps_dropped(trace: Trace, culprit: Shard | Injected) -> bool:
    """Return whether the script may have discarded the non-finite gradient.

    For example, a pass for the generator of a GAN leaves gradients in the discriminator. In a
    script without the line `observe`, gradients of passes are unknown once optimizers have taken
    turns, since the record lacks those of later passes. For a sharded model it has none at all.
    """
    if not isinstance(culprit, Shard) or culprit.gradient or trace.traits.losses != "backward":
        return False
    if not any(shard.gradient for shard in trace.of(Shard)):
        return False
    applied = [update.gradient for update in trace.of(Update) if update.step == culprit.step]
    return (
        bool(applied)
        and all(applied)
        and all(evidence.non_finite(gradient) is None for gradient in applied)
    )


def _stays_finite(tally: Tally, trace: Trace, passed_over: Set[int]) -> None:
    disagreed = {audit.step for audit in audits.undecided(trace)}
    for halt in trace.of(Halt):
        if halt.step in disagreed:
            continue  # the trace proves a different reason to halt
        if unknown := _unknown_at(trace, halt):
            missing.ask(
                tally,
                f"the run halted in step {halt.step}: {unknown}",
                facts.FINITE_OF_ALL,
            )
            continue
        message = f"halted though every shard was finite: {halt.reason}"
        tally.check(False, message, tensor=halt.tensor, **evidence.place(trace, halt))
    for update in trace.of(Update):
        if update.step not in passed_over:
            _finite_update(tally, trace, update)
    updates = evidence.updates(trace)
    for step, shards in evidence.shards(trace).items():
        if missing.lacks_samples(shards, updates[step]):
            why = f"the shards of step {step} count fewer samples than its updates"
            missing.ask(tally, why, facts.FINITE)


def _unknown_at(trace: Trace, halt: Halt) -> str:
    """Return a phrase about unrecorded shards that may have caused a halt; "" if there are none."""
    shards = [shard for shard in trace.of(Shard) if shard.step == halt.step]
    if not any(_same_place(halt, shard) for shard in shards):
        where = "" if halt.rank is None else f" of rank {halt.rank}"
        return f"no shard{where if shards else ''} was recorded"
    there = evidence.members(evidence.stays(trace), halt.step)
    there |= evidence.updates(trace).get(halt.step - 1, {}).keys()
    silent = there - {shard.rank for shard in shards}
    return f"{missing.named(silent)} recorded no shard" if silent else ""


def _is_finite(shard: Shard) -> bool:
    known = evidence.non_finite(shard.gradient) is None
    return shard.finite and known and math.isfinite(shard.loss_sum or 0.0)


def _finite_update(tally: Tally, trace: Trace, update: Update) -> None:
    """Check that an update is finite: its loss, its norms, and its recorded values."""
    bad_place = evidence.non_finite(update.gradient) or evidence.non_finite(update.weights)
    tensor, element = bad_place or (None, None)
    numbers = (update.loss or 0.0, update.grad_norm or 0.0, update.applied_norm or 0.0)
    tally.check(
        update.finite and bad_place is None and all(map(math.isfinite, numbers)),
        f"finite shards gave a non-finite update (loss {update.loss}, gradient norm "
        f"{update.grad_norm})",
        tensor=tensor,
        element=element,
        **evidence.place(trace, update),
    )


def _named_by(halt: Halt, culprits: Sequence[Shard | Injected]) -> Shard | Injected:
    return max(
        culprits, key=lambda c: (_same_place(halt, c), isinstance(c, Shard) and c.ids == halt.ids)
    )


def _same_place(one: Halt | Injected, other: Shard | Injected) -> bool:
    pairs = ((one.rank, other.rank), (one.shard, other.shard))
    return one.step == other.step and all(None in pair or pair[0] == pair[1] for pair in pairs)


def _halts(
    tally: Tally,
    trace: Trace,
    culprits: Sequence[Shard] | Sequence[Injected],
    passed_over: Set[int],
) -> None:
    halts = trace.of(Halt)
    culprit = _named_by(halts[0], culprits) if halts else culprits[0]
    step = culprit.step or 0
    where = _where(trace, culprit, step)
    place = {**evidence.place(trace, culprit), "step": step}
    for update in trace.of(Update):
        if update.step in passed_over:
            continue
        if update.step < step:
            _finite_update(tally, trace, update)
            continue
        what = f"rank {update.rank} updated in step {update.step} after a non-finite value"
        remedy = missing.told(tally, trace="", script=_REMEDY)
        tally.check(False, f"{what} at {where}{remedy}", **place)
    for saved in trace.of(Saved):
        tally.check(saved.step <= step, f"a checkpoint was written after {where}", **place)
    # A user's processes may stop by their own error, at an unknown place.
    stopped = trace.scenario.workload == "own" and trace.end.status == "halted"
    went_on = f"training went on after a non-finite value at {where}"
    message = went_on + missing.told(tally, trace=": no Halt was recorded", script=_REMEDY)
    tally.check(bool(halts) or stopped, message, **place)
    if halts:
        _names(tally, trace, halts[0], culprit, place)
    elif stopped:
        tally.note(
            f"with a non-finite value at {where} the run stopped by itself: {trace.end.reason}"
        )


def _where(trace: Trace, culprit: Shard | Injected, step: int) -> str:
    where, scenario = f"rank {culprit.rank}, step {step}", trace.scenario
    if scenario.system != OBSERVED:
        return f"{where}, shard {culprit.shard}"
    name, index = micro_batch(culprit.shard or 0, accumulation=scenario.accumulation)
    return where if index is None else f"{where}, {name} {index}"


def _names(
    tally: Tally, trace: Trace, halt: Halt, culprit: Shard | Injected, place: Mapping[str, Any]
) -> None:
    """Check that a halt names the culprit's place. Count parts that it does not name as missing."""
    pairs = {"rank": (culprit.rank, halt.rank), "shard": (culprit.shard, halt.shard)}
    unnamed = [
        what for what, (right, named) in pairs.items() if named is None and right is not None
    ]
    known = (named if None in (right, named) else right for right, named in pairs.values())
    expected, got = (culprit.step or 0, *known), (halt.step, halt.rank, halt.shard)
    tally.equal(expected, got, "the halt names a different place", **place)
    if isinstance(culprit, Shard) and culprit.ids and not halt.ids:
        unnamed.append("sample ids")
    elif isinstance(culprit, Shard):
        tally.equal(culprit.ids, halt.ids, "the halt names different samples", **place)
    if unnamed:
        unknown = ", ".join(unnamed)
        why = f"the halt in step {halt.step} does not name its {unknown}"
        missing.ask(tally, why, facts.NAMED_BY_HALT)
    planted = _planted_tensors(trace, culprit)
    if halt.tensor is not None and planted:
        right_one = halt.tensor if halt.tensor in planted else planted[0]
        message = "the halt does not name the tensor with the planted value"
        tally.equal(right_one, halt.tensor, message, **place, tensor=right_one)


def _planted_tensors(trace: Trace, culprit: Shard | Injected) -> list[str]:
    """Return the names of the tensors in which a value was planted at the culprit's place."""
    first = [name for start in trace.of(Start)[:1] for name in start.trainable[:1]]
    planted = [
        event
        for event in trace.of(Injected)
        if event.fault.get("kind") == "non_finite_gradient" and _same_place(event, culprit)
    ]
    named = [event.fault.get("tensor") or event.tensor for event in planted]
    return [name for one in named for name in ([one] if one else first)]


def _advice(broken: Counterexample) -> str:
    return _ADVICE if (broken.scenario or {}).get("faults") else ""


ROWS = (
    Check(
        name="finiteness",
        id="F-DP-003",
        decides="finite gradients average to a finite one; NaN or Inf halts before any update",
        spoken_of="nan inf infinity jidoka halt non-finite overflow",
        judge=judge,
        plan=plans.non_finite,
        explores=True,
        needs=(POISONED,),
        in_step=True,
        advice=_advice,
    ),
)
