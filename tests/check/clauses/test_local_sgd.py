"""Workers that step alone: rounds that a script reports, and those that weights show."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from entrenar_py.check import clauses as checks
from entrenar_py.check.causes import common_steps
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import CHECKS, local_sgd
from entrenar_py.check.evidence import rounds
from entrenar_py.check.evidence.needs import Runs
from entrenar_py.check.harness import judgement
from entrenar_py.shared import systems
from entrenar_py.shared.trace import (
    End,
    Event,
    Halt,
    Shard,
    Start,
    Synchronised,
    Tensors,
    Trace,
    Update,
    record_tensor,
)
from entrenar_py.shared.verdict import Finding, Verdict
from tests import traces
from tests.check.causes.test_presuppositions import SUBJECT, own, replicas
from tests.check.clauses.test_parity import oracle
from tests.traces import altered, broken, clause, judge, left_open, one, records, run, without

NAMES = ("outer_agreement", "outer_schedule", "outer_step", "outer_parity", "outer_finiteness")


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Return a run of two workers that synchronise after each of three steps of SGD."""
    (planned,) = local_sgd.plan_parity(clause("outer_parity"))
    return run(planned.with_(world_size=2, num_steps=3))


def _nudged(tensors: Tensors, by: float) -> Tensors:
    """Return `tensors`, the first of them somewhat larger."""
    name, record = next(iter(tensors.items()))
    values = record.values()
    assert values is not None
    moved = (values * (1 + by)).astype(np.float32)
    return {**tensors, name: record_tensor(moved, values=True)}


def _place(finding: Finding) -> tuple[int | None, int | None]:
    return broken(finding).step, broken(finding).rank


def test_a_right_run_holds(trace: Trace) -> None:
    """Every clause holds, each after comparisons."""
    model = run(oracle(trace.scenario))
    for name in NAMES:
        finding = traces.held(name, trace, model)
        assert finding.compared


def test_without_rounds_nothing_is_known(trace: Trace) -> None:
    """An empty trace and one that does not promise rounds are inconclusive."""
    for name in NAMES:
        for bare in (replace(trace, events=trace.events[-1:]), replace(trace, promises=())):
            assert judge(name, [bare]).verdict is Verdict.INCONCLUSIVE, name


def test_one_rank_s_outer_weights_differ(trace: Trace) -> None:
    """Agreement detects a difference of a millionth in one tensor, the rule one of a thousandth."""
    at = {"step": 1, "rank": 1}
    weights = one(trace, Synchronised, **at).weights
    near, far = (
        altered(trace, Synchronised, at, weights=_nudged(weights, by)) for by in (1e-6, 1e-3)
    )
    assert _place(judge("outer_agreement", [near])) == (1, 1)
    assert _place(judge("outer_step", [far])) == (1, 1)
    assert _place(judge("outer_parity", [far, run(oracle(trace.scenario))])) == (1, 1)


def test_another_mean(trace: Trace) -> None:
    """The rule is checked against the mean of the workers' weights, by their samples."""
    at = {"step": 2, "rank": 1}
    moved = _nudged(one(trace, Update, **at).weights, 1e-3)
    assert _place(judge("outer_step", [altered(trace, Update, at, weights=moved)])) == (2, 0)
    heavier = altered(trace, Shard, {"step": 0, "rank": 1}, weight=9.0)
    assert _place(judge("outer_step", [heavier])) == (0, 0)


def test_without_values_the_rule_is_not_compared(trace: Trace) -> None:
    """Weights recorded as digests only can't be compared with the rule."""
    at = {"step": 1, "rank": 1}
    bare = {n: replace(r, data=None) for n, r in one(trace, Update, **at).weights.items()}
    left_open("outer_step", altered(trace, Update, at, weights=bare))


def test_a_round_that_was_not_ended(trace: Trace) -> None:
    """A worker that does not synchronise after the last step is found."""
    lacking = without(trace, Synchronised, step=2, rank=1)
    assert _place(judge("outer_schedule", [lacking])) == (2, 1)


def test_a_collective_within_a_round(trace: Trace) -> None:
    """Collectives within a round are found by torch's count, and unknown without one."""
    chatty = altered(trace, Synchronised, {"step": 1, "rank": 0}, collectives_alone=1)
    assert _place(judge("outer_schedule", [chatty])) == (1, 0)
    silent = altered(trace, Synchronised, {}, collectives_alone=None)
    left_open("outer_schedule", silent)


def test_a_nan_that_nobody_minded(trace: Trace) -> None:
    """Workers that go on after a NaN, or halt after moving by it, are falsified."""
    bad = altered(trace, Shard, {"step": 1, "rank": 1}, finite=False)
    assert _place(judge("outer_finiteness", [bad])) == (1, 1)
    shard = one(bad, Shard, step=1, rank=1)
    halt = Halt(step=1, reason="NaN", rank=1, shard=shard.shard, ids=shard.ids)
    early = [
        event
        for event in bad.events[:-1]
        if not (isinstance(event, Synchronised | Update) and event.step > 0)
    ]
    end = End(status="halted", reason="NaN")
    halted = replace(bad, events=(*early, halt, end))
    traces.held("outer_finiteness", halted)
    moved = replace(bad, events=(*early, one(trace, Update, step=1, rank=1), halt, end))
    assert _place(judge("outer_finiteness", [moved])) == (1, 1)


def test_parity_asks_for_rounds_of_one_step(trace: Trace) -> None:
    """A run with longer rounds is inconclusive, since it is another training."""
    longer = replace(trace, scenario=trace.scenario.with_(options={"inner_steps": 2}))
    assert "only with optimizer=sgd" in left_open("outer_parity", longer)


def test_what_presupposes_common_steps_does_not_apply(trace: Trace) -> None:
    """A clause that needs common steps is not judged on a stored run in rounds."""
    found = judgement.judge(
        clause("replica_identity"), checks.CHECKS["replica_identity"], Runs(trace)
    )
    assert found.finding.verdict is Verdict.INCONCLUSIVE
    assert "local-sgd-v1.yaml" in found.finding.reason


def test_plans_can_be_run() -> None:
    """The system can run every planned scenario."""
    for name in NAMES:
        for planned in checks.CHECKS[name].plan(clause(name)):
            systems.require_possible(planned)


LAST = SUBJECT.num_steps - 1


def judged_apart(check: str, trace: Trace) -> Finding:
    """Return the finding of a check on one run."""
    return traces.judge(check, Runs(trace))


def kept(event: Event, *, passes: bool) -> bool:
    """Return whether rank 1 records an event if it leaves out the last step, or its `passes`."""
    left_out = (Update, Shard) if passes else Update
    return not (isinstance(event, left_out) and (event.step, event.rank) == (LAST, 1))


def test_ranks_with_fewer_batches_are_compared_until_they_have_none() -> None:
    """What a rank without batches lacks is no fault of the others: `Join` makes it up."""
    trace = own(2)
    uneven = replace(trace, events=tuple(e for e in trace.events if kept(e, passes=True)))
    finding = replicas(uneven, None)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert f"from step {LAST} on" in finding.reason
    assert finding.compared  # the steps before
    assert judged_apart("coverage", uneven).verdict is Verdict.INCONCLUSIVE


def test_a_rank_that_leaves_out_a_step_is_found() -> None:
    """A rank that has the batch, and doesn't step, is wrong."""
    trace = own(2)
    skipping = replace(trace, events=tuple(e for e in trace.events if kept(e, passes=False)))
    assert traces.broken(replicas(skipping, None)).rank == 1


def alone(*, nearer: bool) -> Trace:
    """Return a run whose ranks step with gradients of their own, and then get `nearer` or not."""
    trace = own(2)
    name = min(traces.one(trace, Update, rank=0, step=0).gradient)
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Update) and event.step < 2:
            weights = event.weights[name].values()
            assert weights is not None
            mine = weights + event.rank
            event = replace(
                event,
                gradient={**event.gradient, name: traces.values(*(weights * 0.0 + event.rank))},
                weights={**event.weights, name: traces.values(*mine)},
            )
            if nearer and event.step == 1:
                event = replace(event, edited={name: traces.values(*(weights + event.rank / 2))})
        events.append(event)
    return replace(trace, events=tuple(events))


def test_workers_that_step_alone_are_not_compared() -> None:
    """Weights that are brought together between the steps show local SGD that nobody declared."""
    finding = replicas(alone(nearer=True), None)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "obs.synchronised(...)" in finding.reason
    assert finding.compared  # the first weights


def test_ranks_that_nothing_brings_together_are_found() -> None:
    """A trainer that forgets to reduce its gradients drifts apart."""
    assert replicas(alone(nearer=False), None).verdict is Verdict.FALSIFIED


def test_moments_that_begin_anew_are_noted() -> None:
    """A user's optimizer that is emptied between two steps follows its rule from there on."""
    trace = own(1, optimizer="momentum")
    followed = judged_apart("step_rule", trace)
    assert followed.verdict is Verdict.HELD, followed.reason
    anew = replace(trace, events=tuple(_anew(trace)))
    finding = judged_apart("step_rule", anew)
    assert finding.verdict is Verdict.HELD, finding.reason
    assert any("state was emptied before step 1" in note for note in finding.notes)


@pytest.mark.parametrize("is_counted", [True, False])
def test_moments_of_one_tensor_that_begin_anew(is_counted: bool) -> None:
    """A head and its state may be reset. Without a count of steps, moments may have been lost."""
    trace = own(1, optimizer="momentum")
    reset, *others = trace.of(Update)[0].weights
    events = _anew(trace, names=(reset,))
    if is_counted:
        made = {reset: 1, **dict.fromkeys(others, 2)}
        counts = {f"{name}/step": traces.values(count) for name, count in made.items()}
        events = [
            replace(event, optimizer=counts)
            if isinstance(event, Update) and event.step == 1
            else event
            for event in events
        ]
    finding = judged_apart("step_rule", replace(trace, events=tuple(events)))
    assert finding.verdict is (Verdict.HELD if is_counted else Verdict.FALSIFIED), finding.reason
    assert any(f"state of {reset} was emptied" in note for note in finding.notes) is is_counted


def _anew(trace: Trace, names: Collection[str] | None = None) -> list[Event]:
    """Return the events of a run with momentum, emptied before step 1 for `names` (None: all)."""
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Update) and event.step == 1:
            before = _first(trace)
            weights = {
                name: traces.values(*_plain(before, event, name))
                if names is None or name in names
                else record
                for name, record in event.weights.items()
            }
            event = replace(event, weights=weights)
        elif isinstance(event, Update) and event.step > 1:
            continue
        events.append(event)
    return events


def _first(trace: Trace) -> Update:
    return traces.one(trace, Update, step=0)


def _plain(before: Update, event: Update, name: str) -> NDArray[Any]:
    weights, gradient = before.weights[name].values(), event.gradient[name].values()
    assert weights is not None
    assert gradient is not None
    return weights - np.float32(event.learning_rate) * gradient


Vectors = Mapping[str, NDArray[np.float32]]
# Returns each rank's weights after a round, given those before it and each rank's own.
Outer = Callable[[Vectors, Sequence[Vectors]], Sequence[Vectors]]

SIZES = {"w": 9, "b": 4}
NUM_STEPS, ROUND = 8, 2


def mean(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
    """Give all ranks the mean of their weights."""
    one, other = inner
    return [{n: np.asarray((one[n] + other[n]) / 2, np.float32) for n in SIZES}] * 2


class Nesterov:
    """Steps along the pseudo-gradient, `factor` times the mean of the ranks' movements."""

    def __init__(self, rate: float, momentum: float, factor: float = 1.0, ahead: bool = True):
        self.rate, self.momentum, self.factor, self.ahead = rate, momentum, factor, ahead
        self.kept: dict[str, NDArray[np.float64]] = {}

    def __call__(self, before: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
        """Return the outer weights, for each rank."""
        after: dict[str, NDArray[np.float32]] = {}
        for name in SIZES:
            slope = self.factor * np.mean([before[name] - one[name] for one in inner], axis=0)
            self.kept[name] = self.momentum * self.kept.get(name, 0.0) + slope
            move = slope + self.momentum * self.kept[name] if self.ahead else self.kept[name]
            after[name] = (before[name] - self.rate * move).astype(np.float32)
        return [after] * len(inner)


def first_alone(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
    """Give all ranks the first one's weights."""
    return [inner[0]] * len(inner)


def best(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
    """Give all ranks the weights of another one than rank 0, as populations do."""
    return [inner[1]] * len(inner)


def added(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
    """Give all ranks the sum of their weights."""
    return [{n: inner[0][n] + inner[1][n] for n in SIZES}] * 2


def nearer(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
    """Bring ranks half of the way to their mean, as elastic averaging does."""
    middle = mean({}, inner)[0]
    return [{n: (one[n] + middle[n]) / np.float32(2) for n in SIZES} for one in inner]


def one_tensor_kept(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
    """Give all ranks the mean, but for a tensor that rank 1 keeps."""
    middle = mean({}, inner)[0]
    return [middle, {**middle, "b": inner[1]["b"]}]


def body_alone(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
    """Give all ranks the mean of one tensor; each keeps its own other one."""
    return [{**one, "w": mean({}, inner)[0]["w"]} for one in inner]


def ran(
    outer: Outer,
    *,
    samples: Sequence[int] = (4, 4),
    shared: Sequence[str] = (),
    warm: int = 0,
    options: Mapping[str, float] | None = None,
) -> Trace:
    """Return the run of two ranks with SGD and rounds of two steps; `outer` ends each round.

    The gradients of the tensors `shared` are the ranks' mean, and those of all tensors in the first
    `warm` steps. `options` are those of an outer optimizer that was seen.
    """
    drawn = np.random.default_rng(5)
    begun = {n: drawn.standard_normal(size).astype(np.float32) for n, size in SIZES.items()}
    held: list[Vectors] = [begun, begun]
    before: Vectors = begun
    events: list[Event] = [
        Start(step=0, rank=rank, weights=records(begun), trainable=(*SIZES,)) for rank in (0, 1)
    ]
    edited: list[Vectors] = [{}, {}]
    for step in range(NUM_STEPS):
        slopes = [
            {n: drawn.standard_normal(s).astype(np.float32) for n, s in SIZES.items()}
            for _ in samples
        ]
        own = [dict(slope) for slope in slopes]
        for name in SIZES if step < warm else shared:
            for slope in own:
                slope[name] = (slopes[0][name] + slopes[1][name]) / np.float32(2)
        held = [
            {n: one[n] - np.float32(0.1) * slope[n] for n in SIZES}
            for one, slope in zip(held, own, strict=True)
        ]
        for rank, count in enumerate(samples):
            ids = tuple(range(sum(samples[:rank]), sum(samples[: rank + 1])))
            events.append(
                traces.shard(
                    step,
                    rank,
                    epoch=step,
                    shard=rank,
                    ids=ids,
                    weight=count,
                    gradient=records(slopes[rank]),
                )
            )
        events += [
            traces.update(
                step,
                rank,
                loss=None,
                weight=sum(samples),
                weights=records(held[rank]),
                gradient=records(own[rank]),
                edited=records(edited[rank]),
            )
            for rank in (0, 1)
        ]
        edited = [{}, {}]
        if (step + 1) % ROUND == 0 and step + 1 > warm:
            after = outer(before, held)
            edited = [
                {n: new[n] for n in SIZES if not np.array_equal(new[n], old[n])}
                for old, new in zip(held, after, strict=True)
            ]
            held, before = [*after], after[0]
    subject = traces.scenario(
        world_size=2, num_steps=NUM_STEPS, optimizer="sgd", learning_rate=0.1, num_shards=2
    ).with_(system="command", workload="own", options=options or {})
    return local_sgd.seen(traces.hand_written(*events, subject=subject))


def judged(check: str, trace: Trace) -> Finding:
    return judgement.judge(traces.clause(check), CHECKS[check], Runs(trace)).finding


RIGHT = {
    "the mean": mean,
    "DiLoCo": Nesterov(0.7, 0.9),
    "momentum without a look ahead": Nesterov(0.8, 0.5, ahead=False),
    "a rate of the server": Nesterov(0.35, 0.0),
}


@pytest.mark.parametrize("outer", RIGHT.values(), ids=RIGHT)
def test_right_rounds_are_held(outer: Outer) -> None:
    """Ranks agree after each round, and weights are what one rule makes of all movements."""
    trace = ran(outer)
    assert sorted(rounds.synchronisations(trace)) == [1, 3, 5]
    assert trace.scenario.options["inner_steps"] == ROUND
    for check in ("replica_identity", "weighting", "outer_agreement", "outer_step"):
        finding = judged(check, trace)
        assert finding.verdict is Verdict.HELD, (check, finding.reason)
    assert "after rounds" in CHECKS["parity"].absent([trace])
    assert CHECKS["optimizer_state"].absent([traces.was(trace, saves="nothing")])


def test_a_warm_up_with_common_steps_is_none_of_a_round() -> None:
    """Post-local SGD reduces gradients at first."""
    trace = ran(mean, warm=4)
    assert sorted(rounds.synchronisations(trace)) == [5]
    assert judged("weighting", trace).verdict is Verdict.HELD


def test_shares_of_unequal_samples_are_weighed_or_left_open() -> None:
    """A mean by samples is right. Equal shares may be meant, unless the contract says otherwise."""

    def weighted(_: Vectors, inner: Sequence[Vectors]) -> Sequence[Vectors]:
        return [{n: (6 * inner[0][n] + 2 * inner[1][n]) / np.float32(8) for n in SIZES}] * 2

    right, alike = (ran(outer, samples=(6, 2)) for outer in (weighted, mean))
    assert judged("weighting", right).verdict is Verdict.HELD
    assert "have equal weight in" in judged("weighting", alike).reason
    assert judged("weighting", alike).verdict is Verdict.INCONCLUSIVE
    assert judged("outer_step", alike).verdict is Verdict.FALSIFIED


WRONG = {
    "a wrong sign": (Nesterov(0.7, 0.0, factor=-1), "weighting", "the wrong sign"),
    "rank 0's alone": (first_alone, "weighting", "went on from its own weights"),
    "a sum of weights": (added, "weighting", "weights are added, and not divided"),
    "a tensor that one rank keeps": (one_tensor_kept, "replica_identity", "b differs"),
}


@pytest.mark.parametrize(("outer", "check", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_round_is_falsified(outer: Outer, check: str, words: str) -> None:
    """The message names what the workers were given instead."""
    place = traces.broken(judged(check, ran(outer)))
    assert place.step == 1
    assert words in place.message


def test_an_error_of_a_rule_that_was_seen_is_no_other_rate() -> None:
    """Pseudo-gradients that are added look like a rate of 1.4, where the optimizer's is 0.7."""
    rule = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}
    right, wrong = (ran(Nesterov(0.7, 0.9, factor=by), options=rule) for by in (1.0, 2.0))
    assert judged("weighting", right).verdict is Verdict.HELD
    assert "are added, and not divided" in traces.broken(judged("weighting", wrong)).message


def test_what_may_be_meant_is_left_open() -> None:
    """A sum of movements may be a rate of 2, and ranks may go on from the best one of them.

    A tensor of each rank may be its own.
    """
    assert "rule of the outer step" in judged("weighting", ran(best)).reason
    twice = judged("weighting", ran(Nesterov(2.0, 0.0)))
    assert "rule of the outer step" in twice.reason
    own = judged("replica_identity", ran(body_alone))
    assert (own.verdict, own.compared > 0) == (Verdict.INCONCLUSIVE, True)
    assert "b differ between ranks" in own.reason


@pytest.mark.parametrize(
    ("outer", "shared"),
    [(nearer, ()), (mean, ("w",))],
    ids=["ranks come nearer", "one tensor is not reduced"],
)
def test_what_are_no_rounds(outer: Outer, shared: Sequence[str]) -> None:
    """Elastic averaging has no common weights; ranks that reduce gradients don't step alone."""
    trace = ran(outer, shared=shared)
    assert not rounds.are_in(trace)
    compared = Compared(runs=Runs(trace), model=trace, trace=trace)
    assert "call obs.synchronised(...)" in common_steps.brought_together(compared)


def test_declared_rounds_are_left_as_they_are() -> None:
    """What a script says counts."""
    trace = ran(mean)
    assert local_sgd.seen(trace) is trace
    assert all(event.collectives_alone is None for event in trace.of(Synchronised))
    assert judged("outer_schedule", replace(trace)).verdict is Verdict.INCONCLUSIVE
