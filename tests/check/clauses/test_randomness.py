"""F-TI-005 on traces broken by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from entrenar_py.check.clauses import randomness
from entrenar_py.shared.faults import MERGED, Fault
from entrenar_py.shared.scenario import OBSERVED, Scenario
from entrenar_py.shared.trace import End, Event, Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests import traces
from tests.traces import altered, broken, falsified, held, left_open, scenario

SUBJECT = scenario(dropout=0.3)
NUM_RANKS = 2
OTHER_BIAS = traces.swapping("weights", "output.bias", traces.values(1.0))


def shared(ids: Sequence[int]) -> list[list[int]]:
    """Return a contiguous half for each rank."""
    half = len(ids) // 2
    return [list(ids[:half]), list(ids[half:])]


def strided(ids: Sequence[int]) -> list[list[int]]:
    """Return every second id for each rank."""
    return [list(ids[0::2]), list(ids[1::2])]


def two_epochs(
    first: Sequence[int], second: Sequence[int], share: Callable[[Sequence[int]], list[list[int]]]
) -> Trace:
    """Return a run of two workers that visits 12 samples in this order, three a step, twice."""
    events: list[Shard | Update] = []
    halves = share(first), share(second)
    for epoch, by_rank in enumerate(halves):
        for rank, ids in enumerate(by_rank):
            for part in range(2):
                step = epoch * 2 + part
                shard = traces.shard(
                    step, rank, epoch=epoch, ids=tuple(ids[part * 3 : part * 3 + 3]), weight=3.0
                )
                update = traces.update(step, rank, weight=6.0)
                events += [shard, update]
    subject = Scenario(
        system="textbook",
        workload="linear",
        world_size=NUM_RANKS,
        seed=0,
        num_samples=12,
        batch_size=6,
    )
    return traces.hand_written(*events, subject=subject)


ASCENDING = tuple(range(12))
SHUFFLED = (7, 1, 10, 4, 0, 11, 3, 8, 5, 2, 9, 6)
OTHER = (2, 9, 6, 0, 11, 5, 1, 10, 4, 7, 3, 8)


@pytest.mark.parametrize("share", [shared, strided])
def test_the_same_order_in_every_epoch(share: Callable[[Sequence[int]], list[list[int]]]) -> None:
    """A sampler that is not told the epoch repeats its first order."""
    found = falsified("randomness", two_epochs(SHUFFLED, SHUFFLED, share))
    assert found.step == 2
    assert len(found.sample_ids) == 12
    assert found.message.endswith("could mean: sampler.set_epoch(epoch) is never called")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_same_order_for_weights_that_were_put_back(at: int) -> None:
    """Epochs 0 and 1 are the first of two trainings if the second has the weights of the first."""
    trace = two_epochs(SHUFFLED, SHUFFLED, shared)
    weights = traces.records({"w": np.ones(2)})
    starts = [Start(step=0, rank=rank, weights=weights) for rank in range(NUM_RANKS)]
    put_back = altered(trace, Update, {"step": at, "rank": 0}, edited=weights)
    begun = replace(put_back, events=(*starts, *put_back.events))
    is_found = traces.judge("randomness", [begun]).verdict is Verdict.FALSIFIED
    assert is_found is (at == 3)
    others = traces.records({"w": np.zeros(2)})
    moved = altered(begun, Update, {"step": at, "rank": 0}, edited=others)
    assert traces.judge("randomness", [moved]).verdict is Verdict.FALSIFIED


@pytest.mark.parametrize("share", [shared, strided])
def test_other_orders_and_no_shuffling(share: Callable[[Sequence[int]], list[list[int]]]) -> None:
    """A new order holds, and so does no shuffling, in whatever way ranks share the data."""
    padded = (*ASCENDING[:-1], ASCENDING[0])  # as torch's sampler does, with 11 samples
    for first, second in ((SHUFFLED, OTHER), (ASCENDING, ASCENDING), (padded, padded)):
        finding = traces.judge("randomness", [two_epochs(first, second, share)])
        assert finding.verdict is not Verdict.FALSIFIED


def test_the_same_shuffled_order_with_a_sample_again() -> None:
    """The sample that pads an epoch doesn't hide the order of the others."""
    padded = (*SHUFFLED[:-1], SHUFFLED[0])
    finding = traces.judge("randomness", [two_epochs(padded, padded, strided)])
    assert "in the order of epoch 0" in broken(finding).message


def test_the_same_order_where_a_batch_is_skipped() -> None:
    """A step with two passes has other samples than that of the epoch before, and ranks have not.

    The last step has the batch that is skipped, too.
    """
    trace = two_epochs(SHUFFLED, SHUFFLED, strided)
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Shard) and event.step == 3:
            events.append(replace(event, step=2, shard=1))
        else:
            events.append(event)
    events.sort(key=lambda event: (getattr(event, "step", 9), getattr(event, "rank", 9)))
    skipped = traces.judge("randomness", [replace(trace, events=tuple(events))])
    assert "in the order of epoch 0" in broken(skipped).message


def endless(order: Sequence[int], share: Callable[[Sequence[int]], list[list[int]]]) -> Trace:
    """Return a script's run in one pass over `order`, eight samples a step, told no epochs."""
    trace = two_epochs(SHUFFLED, OTHER, strided)
    parts = [share(order[begin : begin + 8]) for begin in range(0, len(order), 8)]
    events: list[Shard | Update] = []
    for event in trace.events:
        if isinstance(event, Shard) and event.step < len(parts):
            ids = tuple(parts[event.step][event.rank])
            events.append(replace(event, epoch=0, ids=ids))
        elif isinstance(event, Update) and event.step < len(parts):
            events.append(event)
    subject = trace.scenario.with_(system=OBSERVED, workload="own", num_steps=3, batch_size=8)
    ended = replace(trace, scenario=subject, events=(*events, End(status="completed")))
    return traces.was(ended, population="guessed")


def test_an_order_that_nothing_draws_stays() -> None:
    """A sampler of the script's may go by length: without any random order it has one for ever."""
    for trace in (two_epochs(SHUFFLED, SHUFFLED, strided), endless(SHUFFLED * 2, strided)):
        finding = traces.judge("randomness", [traces.was(trace, ordered=True)])
        assert finding.verdict is not Verdict.FALSIFIED


def test_an_endless_pass_of_merged_batches_shows_no_epochs() -> None:
    """The script counts batches, which the harness merges: it tells its sampler too late."""
    trace = endless(SHUFFLED * 2, strided)
    fault = Fault(kind=MERGED, step=0, value="2")
    merged = replace(trace, scenario=trace.scenario.with_(faults=(fault,)))
    assert traces.judge("randomness", [merged]).verdict is not Verdict.FALSIFIED


@pytest.mark.parametrize("share", [shared, strided])
def test_a_sampler_without_an_end_begins_each_order_anew(
    share: Callable[[Sequence[int]], list[list[int]]],
) -> None:
    """A step has the end of one order and the beginning of the next, which has to be another."""
    right = traces.judge("randomness", [endless((*SHUFFLED, *OTHER), share)])
    assert right.verdict is not Verdict.FALSIFIED
    assert "no two epochs" not in right.reason
    found = falsified("randomness", endless((*SHUFFLED, *SHUFFLED), share))
    assert found.step == 1
    assert "in the order of epoch 0" in found.message


@pytest.mark.parametrize(
    ("orders", "verdict"),
    [
        pytest.param((SHUFFLED, OTHER), Verdict.HELD, id="two"),
        pytest.param((SHUFFLED,), Verdict.INCONCLUSIVE, id="one"),
        pytest.param((ASCENDING,), Verdict.HELD, id="one, in order"),
    ],
)
def test_shuffled_samples_of_one_epoch_are_open(
    orders: Sequence[Sequence[int]], verdict: Verdict
) -> None:
    """A script whose second epoch was not seen is never said to shuffle it anew."""
    trace = two_epochs(orders[0], orders[-1], shared)
    weights = {"w": traces.values(1.0)}
    starts = [
        Start(rank=rank, step=0, weights=weights, trainable=("w",)) for rank in range(NUM_RANKS)
    ]
    known = [event for event in trace.events if getattr(event, "step", 0) < 2 * len(orders)]
    subject = trace.scenario.with_(system=OBSERVED, workload="own", num_steps=2 * len(orders))
    shown = replace(trace, scenario=subject, events=(*starts, *known))
    finding = traces.judge("randomness", [shown])
    assert finding.verdict is verdict, finding
    assert ("no two epochs were seen" in finding.reason) is (verdict is Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("drawn", "is_in_order"),
    [
        pytest.param(
            [range(0, 12, 2), range(1, 12, 2), range(12, 24, 2), range(13, 24, 2)], True, id="two"
        ),
        pytest.param([range(18, 24), range(6), range(6, 12), range(12, 18)], False, id="blocks"),
        pytest.param([(0, 2), (1, 3), (4, 6), (5, 7)], False, id="too few to tell"),
        pytest.param([range(5), range(4), range(5, 9), range(4, 8)], True, id="1,658,880 orders"),
        pytest.param([range(4), range(4), range(4, 8), range(4, 8)], False, id="331,776 orders"),
    ],
)
def test_workers_that_read_in_turns(drawn: list[Sequence[int]], is_in_order: bool) -> None:
    """Each worker of a loader reads its part of a stream in order; shuffled blocks are not so."""
    batches = [tuple(part) for part in drawn]
    assert randomness.in_turns(batches) is is_in_order


def test_short_orders_agree_by_chance() -> None:
    """Epochs of a few samples are not judged, since equal orders prove nothing."""
    subject = scenario(num_samples=4, batch_size=4, world_size=1, workload="linear")
    trace = traces.run(subject)
    ids = traces.one(trace, Shard, step=0, shard=0).ids
    same = altered(trace, Shard, {"shard": 0}, ids=ids)
    assert traces.judge("randomness", [same]).verdict is not Verdict.FALSIFIED


def test_two_shards_with_one_mask() -> None:
    """Equal streams on two ranks are found, and both places are named."""
    trace = traces.run(SUBJECT)
    first = traces.one(trace, Shard, step=1, shard=0)
    changed = altered(trace, Shard, {"step": 1, "shard": 4}, draws=first.draws)
    found = falsified("randomness", changed)
    assert (found.step, found.rank, found.shard) == (1, 2, 4)
    assert "shard 0 of step 1 (rank 0)" in found.message


def test_a_mask_again_in_a_later_step() -> None:
    """A stream that restarts in every step is found."""
    trace = traces.run(SUBJECT)
    first = traces.one(trace, Shard, step=0, shard=2)
    changed = altered(trace, Shard, {"step": 3, "shard": 2}, draws=first.draws)
    found = falsified("randomness", changed)
    assert (found.step, found.shard) == (3, 2)


def test_ranks_that_start_apart() -> None:
    """Initial weights that ranks draw differently are found at step -1."""
    trace = traces.run(SUBJECT)
    found = falsified("randomness", altered(trace, Start, {"rank": 1}, **OTHER_BIAS))
    assert (found.step, found.rank, found.tensor) == (-1, 1, "output.bias")


def test_masks_that_depend_on_the_workers() -> None:
    """A trainer that promises bits draws a shard's masks alike for any number of workers."""
    many, one = traces.family("randomness", SUBJECT)
    changed = altered(many, Shard, {"step": 2, "shard": 1}, draws="other")
    found = falsified("randomness", one, changed)
    assert (found.step, found.shard, found.got) == (2, 1, "other")
    free = [replace(trace, promises=()) for trace in (one, changed)]
    held("randomness", *free)


def test_nothing_random() -> None:
    """One worker, one epoch and no dropout are inconclusive."""
    subject = scenario(world_size=1, num_steps=2)
    left_open("randomness", traces.run(subject))


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("system", ["reference", "textbook"])
def test_small_masks_do_not_collide(system: str, width: int) -> None:
    """Masks of two elements are often equal, but the recorded draws are not."""
    subject = scenario(system=system, dropout=0.3, width=width, num_shards=12, batch_size=6)
    held("randomness", *traces.family("randomness", subject))


def test_initial_weights_that_were_not_recorded() -> None:
    """Ranks without initial weights are missing; two that differ are still found."""
    trace = traces.run(SUBJECT)
    for bare in (
        traces.without(trace, Start, rank=2),
        altered(trace, Start, {"rank": 2}, weights={}),
    ):
        assert left_open("randomness", bare) == (
            "initial weights of rank 2 were not recorded: record Start.weights on every rank"
        )
        apart = altered(bare, Start, {"rank": 1}, **OTHER_BIAS)
        found = falsified("randomness", apart)
        assert (found.step, found.rank, found.tensor) == (-1, 1, "output.bias")
    first = altered(trace, Start, {"rank": 0}, weights={})
    assert "weights of rank 0" in traces.judge("randomness", [first]).reason


def test_draws_of_the_model_that_nobody_recorded() -> None:
    """Unrecorded draws are unknown, not different."""
    many, one = traces.family("randomness", SUBJECT)
    assert "record Shard.draws" in left_open(
        "randomness", many, altered(one, Shard, {}, draws=None)
    )


def test_draws_that_nobody_recorded() -> None:
    """With dropout and unrecorded draws the run is inconclusive."""
    assert "dropout=0.3 and no shard drew a random number: record Shard.draws" in left_open(
        "randomness", altered(traces.run(SUBJECT), Shard, {}, draws=None)
    )
