"""What comparisons of a user's own runs presuppose: where it fails nothing is held or falsified."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check import evidence
from entrenar_py.check.causes import copies
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import CHECKS, step_rule
from entrenar_py.check.evidence import run_names
from entrenar_py.check.evidence.needs import (
    ALONE,
    CONTROLLED,
    NUDGED,
    REPEATED,
    SHORTENED,
    Runs,
)
from entrenar_py.check.harness import companions
from entrenar_py.shared.faults import MERGED, MIRRORED, Fault
from entrenar_py.shared.trace import Injected, Noticed, Shard, Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Finding, Verdict
from tests import traces
from tests.traces import altered, falsified, left_open, scenario, undecided

SUBJECT = scenario(detail="values", clip_norm=None)


def own(world_size: int = 3, **changes: Any) -> Trace:
    """Return a run as a user's own trainer recorded it, promising nothing."""
    run = traces.run(SUBJECT.with_(world_size=world_size, **changes))
    return replace(run, scenario=run.scenario.with_(system="mine", workload="own"), promises=())


def wrapped(trace: Trace, *prefix: str) -> Trace:
    """Return `trace` with the names that a wrapper gives to the tensors."""
    names = copies.known_names(trace)
    return copies.renamed(trace, {name: ".".join((*prefix, name)) for name in names})


def changed(tensors: Tensors, name: str, *, times: float = 1.0, by: float = 0.0) -> Tensors:
    """Return `tensors` with each element of one multiplied and increased."""
    values = tensors[name].values()
    assert values is not None
    return {**tensors, name: traces.values(*(times * values + by))}


def parity(trace: Trace, alone: Trace, *again: Trace) -> Finding:
    """Return the finding of F-DP-005 on a run, with two plain runs as witnesses if given."""
    witnesses = {REPEATED: (trace, *again)} if again else {}
    runs = Runs(trace, {ALONE: (alone,)}, witnesses=witnesses)
    return traces.judge("parity", runs)


def replicas(trace: Trace, alone: Trace | None) -> Finding:
    """Return the finding of F-DP-001 on a run, with the run on one worker as a witness."""
    witnesses = {} if alone is None else {ALONE: (alone,)}
    runs = Runs(trace, witnesses=witnesses)
    return traces.judge("replica_identity", runs)


@pytest.mark.parametrize("prefix", [("module",), ("wrapped", "model"), ("0",)])
def test_a_prefix_of_a_wrapper_is_mapped_away(prefix: tuple[str, ...]) -> None:
    """A wrapper around the model of several workers changes names, and nothing else."""
    many, alone = wrapped(own(), *prefix), own(1)
    held = parity(many, alone, many)
    assert held.verdict is Verdict.HELD, held
    first = min(copies.known_names(many))
    gradient = changed(traces.one(many, Update, step=1).gradient, first, by=9.0)
    broken = parity(altered(many, Update, {"step": 1}, gradient=gradient), alone)
    assert traces.broken(broken).tensor == first


def test_names_that_don_t_correspond_are_not_compared() -> None:
    """Tensors of other names in the run on one worker are no difference: the reason names them."""
    many, alone = own(), own(1)
    first = min(copies.known_names(many))
    reason = undecided(parity(copies.renamed(many, {first: "head.scale"}), alone))
    assert "head.scale" in reason
    assert "give observe() the same module" in reason


def test_ranks_that_hold_other_tensors_are_not_compared() -> None:
    """Stages of a pipeline without a declared layout are not taken for broken copies."""
    trace, name = own(), ""
    for rank in (0, 1):
        start = traces.one(trace, Start, rank=rank)
        name = sorted(start.weights)[rank]
        kept = {key: record for key, record in start.weights.items() if key != name}
        trace = altered(trace, Start, {"rank": rank}, weights=kept)
    reason = undecided(replicas(trace, None))
    assert "ranks 0 and 1 hold tensors of different names" in reason
    assert 'layout={"pp"' in reason


def test_two_plain_runs_that_differ_make_no_comparison_count() -> None:
    """A script that draws other weights in each run is not falsified by another number of workers.

    The reason says what differs, and how to seed it.
    """
    many, again, alone = own(), own(seed=5), own(1, seed=6)
    reason = undecided(parity(many, alone, again))
    assert "two plain runs of the command differ: they begin with different weights" in reason
    assert "torch.manual_seed" in reason


def test_gradients_that_are_all_zero_are_never_held() -> None:
    """They are alike in any trainer. One tensor without a gradient is normal."""
    runs = own(2), own(1)
    many, alone = map(traces.without_gradients, runs)
    beside = Runs(many, {ALONE: (alone,)}, witnesses={REPEATED: (many, many)})
    for check in ("parity", "weighting"):
        assert "all gradients of the first steps are zero" in left_open(check, *beside)
    assert parity(runs[0], alone).verdict is Verdict.FALSIFIED
    first = min(copies.known_names(alone))
    assert parity(*(_without_one(run, first) for run in runs)).verdict is Verdict.HELD


def _without_one(trace: Trace, name: str) -> Trace:
    return altered(
        trace, Shard | Update, {}, gradient=lambda event: changed(event.gradient, name, times=0.0)
    )


def test_weights_that_never_move_are_never_held() -> None:
    """Ranks, and a resumed run, have the same ones then without any synchronisation.

    A rate that begins at zero is right: a later step moves.
    """
    subject = scenario(stops=(2, 4))
    for check, runs in (
        ("replica_identity", [own(2)]),
        ("resume", traces.family("resume", subject)),
    ):
        assert "no weight changes in 6 steps" in left_open(check, *map(traces.without_motion, runs))
        traces.held(check, *[traces.without_motion(run, until=3) for run in runs])
    parted = of_ranks(traces.without_motion(own(2)), "weights", min(copies.known_names(own(2))))
    assert falsified("replica_identity", parted).step == 0


def test_weights_that_were_drawn_apart_are_not_compared() -> None:
    """Initial weights that depend on the number of workers make the runs incomparable.

    Weights that were drawn alike, and changed before the first step, are a difference.
    """
    many, alone = own(), own(1, seed=6)
    assert "the run on 3 workers begins with different weights from the run on 1 w" in undecided(
        parity(many, alone)
    )
    name = max(copies.known_names(many))
    weights = changed(traces.one(many, Start, rank=0).weights, name, times=0.9)
    place = traces.broken(parity(altered(many, Start, {}, weights=weights), own(1)))
    assert (place.step, place.tensor) == (-1, name)


def halved(trace: Trace, *, apart: bool = False) -> Trace:
    """Return a run in which each rank holds a piece of a tensor: another one on each if `apart`."""
    name = max(copies.known_names(trace))
    events = []
    for event in trace.events:
        if isinstance(event, Start | Update) and name in event.weights:
            values = event.weights[name].values()
            assert values is not None
            half = len(values) // 2 or 1
            piece = traces.values(*(values[event.rank % 2 :][:half] + event.rank * apart))
            event = replace(event, weights={**event.weights, name: piece})
        events.append(event)
    return replace(trace, events=tuple(events))


def test_pieces_in_plain_tensors_are_not_taken_for_copies() -> None:
    """A rank's tensor with fewer elements than on one worker is a piece; others are compared."""
    trace, alone = halved(own(), apart=True), own(1)
    finding = replicas(trace, alone)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.compared > 0
    assert "DTensor.from_local" in finding.reason
    assert parity(trace, alone).verdict is Verdict.INCONCLUSIVE
    other = min(copies.known_names(trace))
    weights = changed(traces.one(trace, Update, rank=1, step=2).weights, other, by=7.0)
    drifted = altered(trace, Update, {"rank": 1, "step": 2}, weights=weights)
    assert traces.broken(replicas(drifted, alone)).tensor == other


def test_a_name_that_means_other_tensors_on_ranks() -> None:
    """Ranks whose tensors of a name have other shapes hold no copies, whatever one worker has.

    So do the first layers of two stages that are observed by themselves.
    """
    trace, alone = own(), own(1)
    names = sorted(copies.known_names(trace))
    for part, kind in (("weights", Start), ("weights", Update), ("gradient", Update)):
        for name in names:
            trace = of_ranks(trace, part, name, kind)
    for event in [event for event in trace.of(Start) if event.rank == 1]:
        weights = {**event.weights, names[0]: traces.values(1.0, 2.0, 3.0, 4.0, 5.0)}
        trace = altered(trace, Start, {"rank": 1}, weights=weights)
    others = {name: f"stage{number}" for number, name in enumerate(names)}
    assert "the name means different tensors" in undecided(
        replicas(trace, copies.renamed(alone, others))
    )


def of_ranks(trace: Trace, part: str, name: str, kind: type[Start | Update] = Update) -> Trace:
    """Return a run in which each rank but the first has another value of a tensor."""
    for rank in range(1, trace.scenario.world_size):
        for event in [one for one in trace.of(kind) if one.rank == rank]:
            tensors = changed(getattr(event, part), name, by=float(rank))
            at = {"rank": rank, "step": event.step}
            trace = altered(trace, kind, at, **{part: tensors})
    return trace


def test_a_tensor_of_each_rank_s_own_is_not_taken_for_a_copy() -> None:
    """Ranks that begin with other values of a tensor and apply other gradients may have experts.

    Equal gradients show that a broadcast is missing, and other tensors that move apart that nothing
    is synchronised.
    """
    alone, name = own(1), max(copies.known_names(own()))
    unsent = of_ranks(of_ranks(own(), "weights", name, Start), "weights", name)
    place = traces.broken(replicas(unsent, alone))
    assert (place.step, place.rank, place.tensor) == (-1, 1, name)
    expert = of_ranks(unsent, "gradient", name)
    assert f"each rank begins with its own {name}" in undecided(replicas(expert, alone))
    assert replicas(traces.was(expert, shared=True), alone).verdict is Verdict.FALSIFIED
    for other in copies.known_names(expert) - {name}:
        expert = of_ranks(of_ranks(expert, "weights", other), "gradient", other)
        expert = of_ranks(expert, "weights", other, Start)
    assert traces.broken(replicas(expert, alone)).step == -1
    assert replicas(expert, None).verdict is Verdict.INCONCLUSIVE


def test_gradients_that_the_optimizer_reduces_are_not_compared() -> None:
    """Ranks with other gradients and the same weights reduce in the step: weights are compared."""
    name = max(copies.known_names(own()))
    trace, alone = of_ranks(own(), "gradient", name), own(1)
    reason = undecided(parity(trace, alone))
    assert f"hand different gradients of {name} to the optimizer in step 0" in reason
    assert "obs.reduced()" in reason
    assert replicas(trace, alone).verdict is Verdict.HELD
    for rank in range(3):
        weights = changed(traces.one(trace, Update, rank=rank, step=1).weights, name, by=1.0)
        trace = altered(trace, Update, {"rank": rank, "step": 1}, weights=weights)
    assert traces.broken(parity(trace, alone)).message.startswith("weights after the step")


@pytest.mark.parametrize("dropped", [True, False])
def test_a_skipped_step_that_ranks_did_not_see(dropped: bool) -> None:
    """Finite gradients that a rank drops, since another's are not, are not taken for a step.

    They are if the rank made that step with as many micro-batches as before.
    """
    trace = own()
    nan = Injected(fault={"kind": "non_finite_gradient"}, step=2, rank=1)
    again = [replace(s, shard=s.shard + 9) for s in trace.of(Shard) if s.step == 2 and s.rank != 1]
    run = altered(
        traces.also(trace, *(again if dropped else ()), nan),
        Update,
        {"step": 2, "rank": 1},
        gradient={},
    )
    finding = traces.judge("finiteness", Runs(run))
    assert finding.verdict is (Verdict.INCONCLUSIVE if dropped else Verdict.FALSIFIED)
    assert not dropped or "call obs.skipped() on every rank" in finding.reason


def rule(trace: Trace) -> Finding:
    """Return the finding of F-TI-008 on a run."""
    return traces.judge("step_rule", Runs(trace))


def test_a_step_of_copies_is_not_recomputed() -> None:
    """Weights that are written back after the step don't follow from it."""
    name = max(copies.known_names(own()))
    lagging = of_ranks(own(), "weights", name)
    assert rule(lagging).verdict is Verdict.FALSIFIED
    assert "steps copies of the model's weights" in undecided(
        rule(traces.was(lagging, steps="copies"))
    )


def turned_nan(trace: Trace, clipping: str = "other") -> Trace:
    """Return a run whose weights are not finite after step 2, of which nothing else is known."""
    for update in trace.of(Update):
        if update.step >= 2:
            weights = {n: traces.values(float("nan")) for n in update.weights}
            at = {"rank": update.rank, "step": update.step}
            trace = altered(trace, Update, at, weights=weights, finite=False)
    return traces.was(trace, clipping=clipping)


def test_nan_is_not_equal_to_nan() -> None:
    """Two runs that diverge without clipping are compared up to there; nothing later is held."""
    runs = [turned_nan(run, "told") for run in (own(), own(1))]
    for finding in (parity(*runs), replicas(*runs)):
        assert finding.verdict is Verdict.INCONCLUSIVE
        assert finding.compared > 0
        assert "weights are not finite from step 2 on" in finding.reason
        assert "clip = {1e9" in finding.reason
    name = max(copies.known_names(runs[0]))
    off = changed(traces.one(runs[0], Update, rank=1, step=1).weights, name, by=1.0)
    drifted = altered(runs[0], Update, {"rank": 1, "step": 1}, weights=off)
    assert traces.broken(replicas(drifted, runs[1])).step == 1


def test_a_training_that_turns_nan_by_its_own_doing_is_falsified() -> None:
    """The first step, rank and tensor are named by any clause that meets them, with the origin."""
    runs = [turned_nan(run) for run in (own(), own(1))]
    struck = altered(runs[0], Shard, {"rank": 1, "step": 2}, finite=False)
    for finding in (parity(struck, runs[1]), replicas(struck, runs[1]), rule(struck)):
        found = traces.broken(finding)
        assert (found.step, found.rank) == (2, 0)
        assert found.tensor in copies.known_names(struck)
        assert "on rank 1 in step 2" in found.message


@pytest.mark.parametrize("why", ["planted", "a mask of -inf", "memory that was never written"])
def test_a_nan_that_may_not_be_the_script_s_own_is_left_open(why: str) -> None:
    """A planted value, or one that was there before the first step, is no divergence."""
    runs = [turned_nan(run) for run in (own(), own(1))]
    names = copies.known_names(runs[0])
    for number, run in enumerate(runs):
        if why == "planted":
            fault = Fault(kind="non_finite_gradient", step=2, rank=0, value="nan").to_dict()
            run = replace(run, events=(Injected(fault=fault, step=2, rank=0), *run.events))
        elif why == "a mask of -inf":
            masked = {max(names): traces.values(-math.inf)}
            for start in run.of(Start):
                weights = {**start.weights, **masked}
                run = altered(run, Start, {"rank": start.rank}, weights=weights)
        else:
            noticed = Noticed(step=0, rank=0, peculiar={"mask": "inf"})
            run = replace(run, events=(noticed, *run.events))
        runs[number] = run
    for finding in (rule(runs[0]), replicas(*runs)):
        assert finding.verdict is Verdict.INCONCLUSIVE, finding
        assert "weights are not finite from step 2 on" in finding.reason


@pytest.mark.parametrize("seeded", [False, True])
def test_a_command_without_a_seed_need_not_repeat_itself(seeded: bool) -> None:
    """Other weights in a second run are a finding only if the command was told a seed."""
    first, again = own(), replace(own(seed=5), scenario=own().scenario.with_(repeat=1))
    runs = Runs(first, {REPEATED: (traces.was(again, seeded=seeded),)})
    finding = traces.judge("determinism", runs)
    assert finding.verdict is (Verdict.FALSIFIED if seeded else Verdict.INCONCLUSIVE)
    assert seeded or "begin with different weights" in finding.reason
    calm = Runs(first, {REPEATED: (replace(first, scenario=again.scenario),)})
    traces.held("determinism", *calm)


def test_ranks_that_share_a_model_may_share_their_samples() -> None:
    """The same samples on all ranks are drawn twice only if each rank holds the whole model."""
    alone, trace = own(1), own()
    ids = {shard.step: shard.ids for shard in alone.of(Shard)}
    kept = [e for e in trace.events if not isinstance(e, Shard)]
    shared = [
        replace(traces.one(alone, Shard, step=step), rank=rank, shard=rank, ids=ids[step])
        for step in ids
        for rank in range(3)
    ]
    trace = replace(trace, events=(*kept[:-1], *shared, kept[-1]))
    for run, verdict in ((trace, Verdict.FALSIFIED), (halved(trace), Verdict.INCONCLUSIVE)):
        finding = traces.judge("coverage", Runs(run, {ALONE: (alone,)}))
        assert finding.verdict is verdict, finding
    assert 'layout={"tp": 3}' in finding.reason


@pytest.mark.parametrize(("term", "is_open"), [((8.0, 1.0), True), ((8.0, 0.125, 8.0), False)])
def test_rows_that_ranks_draw_alike_may_be_parts_of_a_sum(
    term: tuple[float, ...], is_open: bool
) -> None:
    """Twice the gradient may be right if a sum has each row once per rank, and of a mean it isn't.

    So it is in torch's example of sequence parallelism, where all ranks draw the same rows.
    """
    alone, many = own(1), own(2)
    for update in many.of(Update):
        doubled = {n: changed(update.gradient, n, times=2.0)[n] for n in update.gradient}
        where = {"step": update.step, "rank": update.rank}
        many = altered(many, Update, where, gradient=doubled)
    many = traces.was(altered(many, Shard, {}, terms=(term,)), shared=True, losses="backward")
    compared = Compared(runs=Runs(many), model=alone, trace=many)
    assert bool(copies.summed_parts(compared)) is is_open


@pytest.mark.parametrize(
    ("since", "is_wrong", "verdict"),
    [(2, False, Verdict.HELD), (2, True, Verdict.FALSIFIED), (0, False, Verdict.INCONCLUSIVE)],
)
def test_gradients_are_compared_until_a_hook_compresses_them(
    since: int, is_wrong: bool, verdict: Verdict
) -> None:
    """A low-rank hook adds the first ones as they are, and approximates later ones."""
    alone, many = own(1), own(2)
    for update in many.of(Update):
        if update.step >= 2 or is_wrong:
            rough = changed(update.gradient, max(update.gradient), times=0.5)
            where = {"step": update.step, "rank": update.rank}
            many = altered(many, Update, where, gradient=rough)
    sent = {"compressed": "powerSGD_hook", "compressed_from": since}
    assert parity(traces.was(many, **sent), traces.was(alone, **sent)).verdict is verdict


@pytest.mark.parametrize(("kinds", "is_open"), [((MERGED,), True), ((MIRRORED, MERGED), False)])
def test_a_sum_over_one_share_is_the_same_on_one_worker(
    kinds: tuple[str, ...], is_open: bool
) -> None:
    """The mean of workers' sums may be a sum over a worker's batch, unless one worker has that."""
    alone, many = own(1), own(2)
    faults = tuple(Fault(kind=kind, step=0, value="2") for kind in kinds)
    alone = replace(alone, scenario=replace(alone.scenario, faults=faults))
    for update in many.of(Update):
        halved = {n: changed(update.gradient, n, times=0.5)[n] for n in update.gradient}
        where = {"step": update.step, "rank": update.rank}
        many = altered(many, Update, where, gradient=halved)
    compared = Compared(runs=Runs(many), model=alone, trace=traces.was(many, losses="backward"))
    assert bool(copies.summed_parts(compared)) is is_open


def test_witnesses_are_found_among_stored_runs() -> None:
    """They are a second plain run, that on one worker, with nudged weights, and controlled ones."""
    usual = own().scenario
    turned = run_names.with_turned(usual, knob="permute", value="1", usual="0")
    stored = {"usual": usual, "alone": own(1).scenario, "turned": turned}
    stored["again"] = usual.with_(repeat=1)
    nudge = Fault(kind="nudged_weights", step=0, value="1e-6")
    stored["nudged"] = stored["alone"].with_(faults=(nudge,))
    stored["common"] = usual.with_(faults=(Fault(kind="common_numbers", step=0),))
    order = Fault(kind="reordered_groups", step=0)
    stored["reordered"] = stored["alone"].with_(faults=(order,))
    short = Fault(kind="shortened_epochs", step=0, value="2")
    stored["short"] = usual.with_(faults=(short,))
    for name in stored:
        check = CHECKS["step_rule"]
        told = companions.among(check.needs, name, stored, witnesses=check.witnesses)
        assert told.witnesses == {
            ALONE: ("alone",),
            REPEATED: ("usual", "again"),
            NUDGED: ("alone", "nudged"),
            step_rule.REORDERED: ("alone", "reordered"),
            CONTROLLED: ("common",),
            SHORTENED: ("short",),
        }, name
    del stored["again"], stored["alone"], stored["common"], stored["short"]
    assert not any(companions.among((), "turned", stored).witnesses.values())
    assert companions.among((), 0, {0: SUBJECT, 1: SUBJECT.with_(repeat=1)}).witnesses == {}


@pytest.mark.parametrize(
    ("times", "verdict"),
    [(2.0, Verdict.FALSIFIED), (1.0, Verdict.HELD), (0.5, Verdict.HELD), (1.3, Verdict.HELD)],
)
def test_sums_over_workers_that_clipping_hides(times: float, verdict: Verdict) -> None:
    """Gradients that are longer than the norm are clipped alike, and were sums before."""

    def unclipped(run: Trace, times: float) -> Trace:
        return altered(
            run,
            Update,
            {},
            unclipped=lambda event: {
                name: traces.values(*(times * values))
                for name, values in (evidence.vectors(event.gradient) or {}).items()
            },
        )

    finding = parity(unclipped(own(2), times), unclipped(own(1), 1.0))
    assert finding.verdict is verdict
    assert ("before it is clipped, it is 2 times" in finding.reason) == (times == 2)
