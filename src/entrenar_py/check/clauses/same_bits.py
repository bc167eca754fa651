"""F-TI-006 and F-TI-007: the same bits for any number of workers, and in every repetition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.causes import presuppositions, rounding_bounds, state
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import plans
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, facts, missing, rounds
from entrenar_py.check.evidence.needs import COUNTS, REPEATED, Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, Shard, Trace, Update
from entrenar_py.shared.verdict import Counterexample, Finding, Tally

_ROUNDED = "two runs agree within rounding, and not in their bits,"
_ANY_ORDER = (
    "whose kernels may add in any order: torch.use_deterministic_algorithms(True) has torch take "
    "others, or names the one that has none"
)
_ADVICE = (
    "advice, since no contract was named: torch's kernels on GPUs need not give the same bits "
    "twice; --contract training-integrity-v1.yaml demands it"
)


def judge_worker_count(invariant: Invariant, runs: Traces) -> Finding:
    """Judge trainers that promise equal bits for any number of workers. Others are inconclusive."""
    tally = missing.tally_for(invariant, runs)
    runs = evidence.usable_runs(runs, tally)
    for trace in runs:
        if "bitwise" not in trace.promises:
            served = {attempt.backend for attempt in trace.of(Attempt) if attempt.served}
            names = ", ".join(sorted(served) or trace.scenario.backends)
            tally.miss(
                f"{trace.scenario.system} on {names} promises rounding, not bits: "
                'if it does give the same bits, record its trace with promises=("bitwise",)'
            )
    compare_worker_counts(tally, runs.own)
    return tally.finding(
        nothing="no two runs that differ in world_size alone: record another with world_size=1, "
        f"say, and all else equal{missing.nearest(tally, runs, COUNTS)}"
    )


def judge_determinism(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that two runs of one scenario are equal in every shard and every update."""
    tally = missing.tally_for(invariant, runs)
    runs = evidence.usable_runs(runs, tally)
    for trace in runs.of(REPEATED):
        if runs.base is None:
            continue
        compared = Compared(runs=runs, model=runs.base, trace=trace)
        left = presuppositions.comparable(tally, presuppositions.REPEATED, compared)
        if left is not None:
            before = tally.broken
            _compare_shards(tally, left.model, left.trace)
            message = "two runs of one scenario differ"
            compare_steps(tally, left.model, left.trace, message)
            state.compare_local_buffers(tally, left.model, left.trace, f"{message} (buffers)")
            if tally.broken is not None and tally.broken is not before:
                tally.broken = _by_rounding(left, tally.broken)
    return tally.finding(
        nothing=missing.told(
            tally,
            trace="no scenario was run twice: record a second run of it, its scenario with "
            f"repeat=1 and all else equal{missing.nearest(tally, runs, REPEATED)}",
            script="the command was not run twice in the same way, or the second run failed",
        )
    )


def _by_rounding(compared: Compared, broken: Counterexample) -> Counterexample:
    """Return where two runs differ. If they do by rounding on a GPU, blame its kernels.

    Only the first steps can be compared within rounding.
    """
    device = compared.trace.environment.get("accelerator")
    is_early = broken.step is not None and broken.step < rounding_bounds.ROUNDING_STEPS
    is_of_values = "(buffers)" not in broken.message and _have_one_course(compared)
    if not (
        device and is_early and is_of_values and presuppositions.agree_within_rounding(compared)
    ):
        return broken
    message = f"{_ROUNDED} on {device}: {_ANY_ORDER}"
    return replace(broken, message=message)


def _have_one_course(compared: Compared) -> bool:
    """Return whether both runs made the same steps, with the same samples and random numbers."""
    courses = [
        (
            set(evidence.updates(run)),
            {(one.step, one.rank, one.shard): (one.ids, one.draws) for one in run.of(Shard)},
        )
        for run in (compared.model, compared.trace)
    ]
    return courses[0] == courses[1]


def _advice(broken: Counterexample) -> str:
    """Return why two runs that agree within rounding are only advice; "" if they don't."""
    return _ADVICE if broken.message.startswith(_ROUNDED) else ""


def _compare_shards(tally: Tally, model: Trace, trace: Trace) -> None:
    """Compare shard by shard. The order in which ranks were recorded does not matter."""
    # Contents are only as exact as a comparison of inputs needs them.
    left_out = {"loss_sum": 0.0, "contents": (), **missing.bare_fields(tally, model, trace)}
    expected = {(shard.step, shard.rank, shard.shard): shard for shard in model.of(Shard)}
    for shard in trace.of(Shard):
        model_shard = expected.get((shard.step, shard.rank, shard.shard))
        if model_shard is None:  # another worker computed it: the first to be free may take it
            continue
        # As text, so that NaN equals NaN; Python's shortest text of a float is exact.
        same_loss = repr(model_shard.loss_sum) == repr(shard.loss_sum)
        tally.check(
            same_loss and replace(model_shard, **left_out) == replace(shard, **left_out),
            f"two runs of one scenario differ in shard {shard.shard}",
            **evidence.place(trace, shard),
        )


def compare_worker_counts(tally: Tally, traces: Sequence[Trace]) -> None:
    """Compare runs that promise equal bits with that on the fewest workers."""
    promised = [t for t in traces if "bitwise" in t.promises and evidence.is_as_trained(t)]
    promised = [t for t in promised if _training(t.scenario) == _training(promised[0].scenario)]
    ordered = sorted(promised, key=lambda trace: trace.scenario.world_size)
    for trace in ordered[1:]:
        few, many = ordered[0].scenario.world_size, trace.scenario.world_size
        if few != many:
            message = f"{many} workers give other bits than {few}"
            compare_steps(tally, ordered[0], trace, message)


def _training(scenario: Scenario) -> Scenario:
    """Return `scenario` without what may differ between runs that must have the same bits."""
    changes: dict[str, Any] = {"faults": (), "stops": (), "repeat": 0, "detail": "digests"}
    return scenario.with_(world_size=1, **changes)


def compare_steps(tally: Tally, model: Trace, trace: Trace, message: str) -> None:
    """Compare each rank's updates with the same rank's in `model`, bit for bit.

    If the runs have different workers, compare with the lowest rank of `model`. Gradients of
    logical shards are compared first, if recorded, since they name the worker that computed
    wrongly. Workers that step alone are compared after each synchronisation, too. A fact that one
    run never recorded is missing; a fact that it stopped recording is a difference.
    """
    if not missing.require_updates(tally, model, trace):
        return
    _compare_local(tally, model, trace, message)
    expected = evidence.updates(model)
    known = missing.recorded(model), missing.recorded(trace)
    workers, model_workers = (
        (run.scenario.world_size, run.scenario.faults) for run in (trace, model)
    )
    same_workers = workers == model_workers
    for step, by_rank in evidence.ranks_by_step(trace):
        if step not in expected:
            continue
        if same_workers and (alone := expected[step].keys() ^ by_rank.keys()):
            why = f"{missing.named(alone)} recorded step {step} in one run only"
            missing.ask(tally, why, facts.UPDATES_IN_BOTH)
        lowest = evidence.any_rank(expected[step])
        for rank, update in by_rank.items():
            is_own = same_workers or rounds.are_in(trace)
            peer = expected[step].get(rank, lowest) if is_own else lowest
            place = evidence.place(trace, update)
            _compare_update(tally, known, peer, update, message, place)
    _compare_rounds(tally, model, trace, message)
    lacking = sorted(set(expected) ^ set(evidence.updates(trace)))
    tally.check(
        not lacking,
        f"{message}: steps {lacking[:5]} are in one run only",
        step=lacking[0] if lacking else None,
        scenario=trace.scenario,
    )


def _compare_update(
    tally: Tally,
    known: tuple[missing.Recorded, missing.Recorded],
    model: Update,
    update: Update,
    message: str,
    place: Mapping[str, Any],
) -> None:
    """Compare an update with `model`. `known` has `missing.recorded` of both, the model's first."""
    for part in ("gradient", "weights", "optimizer", "buffers"):
        left, right = getattr(model, part), getattr(update, part)
        bare = [
            not getattr(holder, part) and missing.is_unknown(whose, holder, part)
            for whose, holder in zip(known, (model, update), strict=True)
        ]
        if any(bare) and (part == "weights" or not all(bare)):
            who = "neither run" if all(bare) else "one run only"
            why = f"{who} recorded the {part} of step {update.step}"
            missing.ask(tally, why, facts.of_update(part))
            continue
        closeness.compare_exact(tally, left, right, f"{message} ({part})", **place)
    if (model.loss, update.loss) != (None, None):
        tally.equal(model.loss, update.loss, f"{message} (loss)", **place)


def _compare_rounds(tally: Tally, model: Trace, trace: Trace, message: str) -> None:
    """Compare the state of each worker after each synchronisation."""
    expected, got = rounds.synchronisations(model), rounds.synchronisations(trace)
    for step in sorted(expected.keys() | got.keys()):
        left, right = expected.get(step, {}), got.get(step, {})
        for rank in sorted(left.keys() | right.keys()):
            place: dict[str, Any] = {"step": step, "rank": rank, "scenario": trace.scenario}
            if rank not in left or rank not in right:
                tally.check(False, f"{message}: synchronised in one run only", **place)
                continue
            for part in ("weights", "optimizer", "buffers"):
                one, other = (getattr(side[rank], part) for side in (left, right))
                closeness.compare_exact(tally, one, other, f"{message} (outer {part})", **place)


def _compare_local(tally: Tally, model: Trace, trace: Trace, message: str) -> None:
    """Compare the gradients of shards with the same samples, whichever worker computed them."""
    expected = {(shard.step, shard.shard): shard for shard in model.of(Shard)}
    begun_late = evidence.passes_begun_late(model) | evidence.passes_begun_late(trace)
    for shard in trace.of(Shard):
        model_shard = expected.get((shard.step, shard.shard))
        if model_shard is None or model_shard.ids != shard.ids:
            continue
        if (shard.step, shard.shard) in begun_late:
            continue
        if bool(model_shard.gradient) != bool(shard.gradient):
            why = f"one run only recorded the gradients of shards in step {shard.step}"
            missing.ask(tally, why, facts.of_shards("gradient"))
            continue
        what, place = f"{message} (gradient of shard {shard.shard})", evidence.place(trace, shard)
        closeness.compare_exact(tally, model_shard.gradient, shard.gradient, what, **place)


ROWS = (
    Check(
        name="worker_count",
        id="F-TI-006",
        decides="the same bits with any number of workers, from trainers that promise bits",
        spoken_of="invariance world-size invariant",
        judge=judge_worker_count,
        plan=plans.training,
        explores=True,
        needs=(COUNTS,),
        bitwise=True,
        in_step=True,
    ),
    Check(
        name="determinism",
        id="F-TI-007",
        decides="two runs of one scenario have the same bits",
        spoken_of="determinism deterministic reproducible reproducibility repeat",
        judge=judge_determinism,
        plan=plans.training,
        explores=True,
        needs=(REPEATED,),
        advice=_advice,
    ),
)
