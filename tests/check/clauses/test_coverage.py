"""Every sample of an epoch is drawn once, by one worker."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check import evidence
from entrenar_py.check.causes import random_draws
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import coverage
from entrenar_py.check.clauses.coverage import LISTED_MAX
from entrenar_py.check.evidence.needs import ALONE, Runs
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Membership, Selection, Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally, Verdict
from tests import traces
from tests.traces import altered, broken, falsified, left_open, scenario, undecided, was, without

SUBJECT = scenario(workload="linear")


def sampled(steps: Sequence[Sequence[Sequence[int]]], subject: Scenario) -> Trace:
    """Return a run in which `steps[step][rank]` are a rank's ids, in epochs of all samples."""
    events: list[Shard | Update] = []
    drawn = 0
    for step, by_rank in enumerate(steps):
        epoch = drawn // subject.num_samples
        for rank, ids in enumerate(by_rank):
            drawn += len(ids)
            events += [
                traces.shard(step, rank, epoch=epoch, ids=tuple(ids), weight=float(len(ids))),
                traces.update(step, rank),
            ]
    return traces.hand_written(*events, subject=subject)


def six_samples(steps: Sequence[object], **changes: Any) -> Scenario:
    """Return a run of six samples in batches of four on two workers, with the given steps."""
    usual = {"workload": "own", "num_samples": 6, "batch_size": 4, "world_size": 2}
    return scenario(**{**usual, "num_steps": len(steps), **changes})


def test_a_sample_drawn_twice_in_a_step() -> None:
    """If two workers draw the same sample, the second is named, with the sample."""
    trace = traces.run(SUBJECT)
    first = traces.one(trace, Shard, step=1, shard=0)
    second = traces.one(trace, Shard, step=1, shard=4)
    at = {"step": 1, "shard": 4}
    found = falsified("coverage", altered(trace, Shard, at, ids=first.ids[:1]))
    assert (found.step, found.rank, found.shard) == (1, second.rank, 4)
    assert found.sample_ids == first.ids[:1]


def test_a_sample_drawn_again_later_in_the_epoch() -> None:
    """The message says where it was drawn first."""
    trace = traces.run(SUBJECT)
    early = traces.one(trace, Shard, step=0, shard=0).ids
    at = {"step": 2, "shard": 0}
    found = falsified("coverage", altered(trace, Shard, at, ids=early[:1]))
    assert (found.step, found.shard, found.sample_ids) == (2, 0, early[:1])
    assert "first drawn in step 0" in found.message


class Counted(int):
    """The id of a sample, which counts how often one is compared with another."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        """Return whether the numbers are equal."""
        Counted.compared += 1
        return int.__eq__(self, other)


def test_a_step_with_a_whole_epoch() -> None:
    """A shard may have a million samples: each is looked up, not compared with all before it."""
    ids = [*map(Counted, range(2000)), Counted(0)]
    Counted.compared = 0
    assert coverage._drawn_before(ids, {5}) == (5, 0)
    assert Counted.compared < len(ids)


def test_padding_with_duplicates() -> None:
    """A short batch that is padded with its own samples is falsified."""
    subject = scenario(workload="linear", num_samples=3, batch_size=3, world_size=2, num_steps=1)
    found = falsified("coverage", sampled([[[0, 1], [2, 0]]], subject))
    assert (found.step, found.rank, found.sample_ids) == (0, 1, (0,))


def test_ranks_that_share_a_shard_draw_the_same() -> None:
    """A rank that draws other samples than the rank it shares a shard with is named."""
    steps = [[[0, 1], [2, 3]]]
    apart = six_samples(steps, num_samples=4)
    traces.held("coverage", sampled(steps, apart))
    shared = traces.was(sampled(steps, apart), shared=True)
    found = falsified("coverage", shared)
    assert (found.step, found.rank, found.sample_ids) == (0, 1, (0, 1, 2, 3))
    assert "drew different samples for shard 0 than rank 0" in found.message


def test_a_dropped_tail() -> None:
    """An epoch without its last samples is falsified in the step that lacks them."""
    trace = altered(traces.run(SUBJECT), Shard, {"step": 2}, ids=(), weight=0.0)
    found = falsified("coverage", trace)
    assert found.step == 2
    assert (found.expected, found.got) == ("2", "0")


def test_an_epoch_that_ends_early_names_what_it_missed() -> None:
    """A skipped step is reported when the next epoch begins, with the samples left out."""
    trace = traces.run(SUBJECT)
    missed = {i for s in trace.of(Shard) if s.step == 2 for i in s.ids}
    skipped = without(without(trace, Shard, step=2), Update, step=2)
    found = falsified("coverage", skipped)
    assert found.step == 2
    assert set(found.sample_ids) == missed


def test_an_id_outside_the_data_set() -> None:
    """A sample id outside the data set is falsified."""
    trace = altered(traces.run(SUBJECT), Shard, {"step": 0, "shard": 1}, ids=(12,))
    found = falsified("coverage", trace)
    assert (found.step, found.shard, found.sample_ids) == (0, 1, (12,))


def test_other_batches_with_other_workers() -> None:
    """Each step must draw the same samples with any number of workers."""
    subject = scenario(workload="linear", num_samples=4, batch_size=2, num_steps=2, world_size=2)
    one = sampled([[[0, 1]], [[2, 3]]], subject.with_(world_size=1))
    other = sampled([[[0], [2]], [[1], [3]]], subject)
    found = falsified("coverage", other, one)
    assert (found.step, found.sample_ids) == (0, (1, 2))
    assert "1 workers than with 2" in found.message


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([[[0, 2], [1, 3]], [[4], [5]], [[0, 2], [1, 3]]], id="strided"),
        pytest.param([[[0, 1, 2], [3]], [[4, 5], []], [[0], [1, 2, 3]]], id="uneven"),
        pytest.param([[[0, 1], [2, 3]], [[4], [5]]], id="one epoch"),
        pytest.param([[[3, 1], [5, 0]], [[2], [4]], [[5, 4], [3, 0]]], id="shuffled"),
    ],
)
def test_right_ways_to_share(steps: list[list[list[int]]]) -> None:
    """Strided, uneven, unshuffled and short batches hold if they are complete and disjoint."""
    subject = six_samples(steps)
    traces.held("coverage", sampled(steps, subject))


@pytest.mark.parametrize("traits", [{}, {"epochs": "untold"}, {"population": "guessed"}])
def test_an_epoch_whose_end_was_not_seen_is_open(traits: dict[str, str]) -> None:
    """A script that was ended within its first epoch is never said to draw every sample."""
    steps = [[[0, 1], [2, 3]]]
    trace = traces.was(sampled(steps, six_samples(steps)), **traits)
    finding = traces.judge("coverage", [trace])
    assert (finding.verdict, finding.compared > 0) == (Verdict.INCONCLUSIVE, True)
    assert finding.reason.startswith("no run came to the end of an epoch")
    replaced = traces.was(trace, replacement=True)
    traces.held("coverage", replaced)


def test_a_shuffled_epoch_of_all_numbers_from_0_on_has_ended() -> None:
    """A part of it would lack some of them. In order they may be the first ones of a data set."""
    order = random.Random(0).sample(range(24), 24)
    for ids, verdict in ((order, Verdict.HELD), (sorted(order), Verdict.INCONCLUSIVE)):
        steps = [[ids[at : at + 2], ids[at + 2 : at + 4]] for at in range(0, 24, 4)]
        trace = sampled(steps, six_samples(steps, num_samples=24))
        guessed = traces.was(trace, population="guessed")
        assert traces.judge("coverage", [guessed]).verdict is verdict


def test_empty_shards_are_no_alarm() -> None:
    """Empty shards, as with more shards than samples, are right."""
    subject = scenario(workload="linear", num_shards=9, num_samples=4, batch_size=3)
    traces.held("coverage", *traces.family("coverage", subject))


def test_steps_that_were_not_committed_do_not_count() -> None:
    """Shards of a step without an update, as before a halt, are not counted."""
    trace = without(traces.run(SUBJECT), Update)
    left_open("coverage", trace)


def test_the_order_of_logical_shards_is_part_of_the_bits() -> None:
    """Two workers that promise bits must draw a batch in the same order as one worker."""
    model, trace = (traces.run(scenario(num_shards=2, world_size=n)) for n in (1, 2))
    first = next(e for e in trace.events if isinstance(e, Shard) and len(e.ids) > 1)
    turned = altered(trace, Shard, {"step": first.step, "shard": first.shard}, ids=first.ids[::-1])
    finding = traces.judge("coverage", [model, turned])
    assert finding.verdict is Verdict.FALSIFIED
    assert broken(finding).step == first.step


WRAPPED = [[[0, 1], [2, 3]], [[4, 5], [5, 0]], [[1, 2], [3, 4]]]


def wrapped(steps: Sequence[Sequence[Sequence[int]]] = WRAPPED) -> Trace:
    """Return a run whose step 1 takes the end of epoch 0 and, on rank 1, the begin of epoch 1."""
    return altered(sampled(steps, six_samples(steps)), Shard, {"step": 1, "rank": 1}, epoch=1)


def test_a_batch_may_straddle_two_epochs() -> None:
    """A batch may take the end of one epoch and the begin of the next."""
    traces.held("coverage", wrapped())


@pytest.mark.parametrize(
    ("second", "step", "ids"),
    [
        pytest.param([[4, 3], [5, 0]], 1, (3,), id="again in the epoch that ends"),
        pytest.param([[4], [5, 0, 1]], 1, (5,), id="the end left out"),
        pytest.param([[4, 5], [5, 5]], 1, (5,), id="twice in the epoch that begins"),
        pytest.param([[4, 5], [5]], 1, (), id="a short batch"),
    ],
)
def test_a_batch_that_straddles_hides_nothing(
    second: list[list[int]], step: int, ids: tuple[int, ...]
) -> None:
    """Padding, gaps and lost samples are found in a batch that spans two epochs."""
    trace = wrapped([WRAPPED[0], second, WRAPPED[2]])
    found = falsified("coverage", trace)
    assert (found.step, found.sample_ids) == (step, ids)


def test_steps_that_were_rolled_back_are_drawn_again() -> None:
    """Samples drawn again after a resume from a checkpoint count once."""
    steps = [[[0, 1], [2, 3]], [[4], [5]]]
    trace = sampled(steps, six_samples(steps))
    starts = [Start(step=0, rank=rank, weights={}) for rank in (0, 1)]
    back = [replace(start, step=1, resumed=True) for start in starts]
    again = [event for event in trace.events if getattr(event, "step", 0) == 1]
    whole = replace(trace, events=(*starts, *trace.events[:-1], *back, *again, trace.events[-1]))
    traces.held("coverage", whole)
    unmarked = replace(trace, events=(*starts, *trace.events[:-1], *again, trace.events[-1]))
    assert falsified("coverage", unmarked).step == 1


DROPPED = [[[0, 1], [2, 3]], [[5, 4], [3, 2]]]


def dropping(steps: Sequence[Sequence[Sequence[int]]], **changes: Any) -> Trace:
    """Return a run of two epochs of six samples, each of one batch of four."""
    return altered(sampled(steps, six_samples(steps, **changes)), Shard, {"step": 1}, epoch=1)


def test_a_tail_that_is_dropped_on_purpose() -> None:
    """A user's trainer may drop an incomplete last batch if it declares so."""
    said = traces.was(dropping(DROPPED), drop_last=True)
    traces.held("coverage", said)
    found = falsified("coverage", dropping(DROPPED))
    assert (found.step, found.sample_ids) == (0, (4, 5))


def test_no_more_than_the_tail_may_be_dropped() -> None:
    """`drop_last` excuses neither a short batch nor a batch left out."""
    short = traces.was(dropping([[[0, 1], [2]], DROPPED[1]]), drop_last=True)
    found = falsified("coverage", short)
    assert (found.step, found.expected, found.got) == (0, "4", "3")
    lost = traces.was(dropping(DROPPED, num_samples=8), drop_last=True)
    assert falsified("coverage", lost).sample_ids == (4, 5, 6, 7)


def test_a_run_that_ends_early_is_not_completed() -> None:
    """Missing steps are named in a run with status completed, but not in a halted one."""
    trace = traces.run(SUBJECT)
    kept = tuple(event for event in trace.events if getattr(event, "step", 0) < 4)
    found = falsified("coverage", replace(trace, events=kept))
    assert found.step == 4
    assert "steps [4, 5] of num_steps=6 were never made" in found.message
    halted = (*kept[:-1], replace(trace.end, status="halted"))
    traces.held("coverage", replace(trace, events=halted))


def test_the_second_half_of_a_run_is_no_short_run() -> None:
    """A trace that begins with a resume must have the steps from there on."""
    steps = [[[0, 1], [2, 3]], [[4], [5]], [[0, 1], [2, 3]]]
    trace = sampled(steps, six_samples(steps))
    late = [event for event in trace.events if getattr(event, "step", 2) == 2]
    starts = [Start(step=2, rank=rank, weights={}, resumed=True) for rank in (0, 1)]
    half = replace(trace, events=(*starts, *late))
    assert left_open("coverage", half).startswith("no run came to the end of an epoch")


@pytest.mark.parametrize("stranger", [3, 7])
def test_a_shard_by_a_stranger(stranger: int) -> None:
    """A shard by a rank that is no worker of the scenario is falsified."""
    trace = altered(traces.run(SUBJECT), Shard, {"step": 3, "shard": 2}, rank=stranger)
    found = falsified("coverage", trace)
    assert (found.step, found.rank, found.shard) == (3, stranger, 2)
    assert "takes no part" in found.message


def test_a_shard_by_who_has_left() -> None:
    """A worker may compute in the step in which it leaves, and again once it is back."""
    subject = scenario(workload="linear", faults=(traces.leave(1, 1), traces.join(1, 4)))
    trace = traces.run(subject)
    assert trace.of(Membership)
    for step, verdict in ((1, Verdict.HELD), (2, Verdict.FALSIFIED), (4, Verdict.HELD)):
        ghost = altered(trace, Shard, {"step": step, "shard": 0}, rank=1)
        assert traces.judge("coverage", [ghost]).verdict is verdict


def test_a_worker_whose_start_was_not_recorded_is_no_stranger() -> None:
    """A scenario's worker without a start is missing evidence for F-DP-001, not for this."""
    trace = without(traces.run(SUBJECT), Start, rank=1)
    traces.held("coverage", trace)


def test_samples_that_are_counted_and_not_named() -> None:
    """A run without sample ids is inconclusive, and is not compared with one that has them."""
    trace = traces.run(SUBJECT)
    bare = altered(trace, Shard, {}, ids=())
    for found in ([bare], [bare, traces.run(SUBJECT.with_(world_size=1))]):
        reason = left_open("coverage", *found)
        unknown = "the samples of steps 0, 1, 2, 3, 4 and later are unknown"
        assert reason == f"{unknown}: record Shard.ids"


def test_updates_alone_cover_nothing() -> None:
    """Updates without shards prove nothing about samples; a rank without shards is named."""
    trace = traces.run(SUBJECT)
    assert "record a Shard with ids" in left_open("coverage", without(trace, Shard))
    found = falsified("coverage", without(trace, Shard, rank=1, step=3))
    assert found.message.endswith("; ranks 1 recorded no Shard of it")
    assert left_open("coverage", without(trace, Shard, rank=1)).startswith(
        "rank 1 made steps without a micro-batch: record a Shard"
    )


@pytest.mark.parametrize("others", [(), (1,)])
@pytest.mark.parametrize("gap", ["step", "rank", "names"])
def test_samples_that_are_unknown_in_places(gap: str, others: tuple[int, ...]) -> None:
    """Unrecorded steps, ranks or ids are gaps. A sample drawn twice after one is found."""
    own = traces.run(SUBJECT.with_(num_steps=9))
    bare = {
        "step": without(own, Shard, step=1),
        "rank": without(own, Shard, rank=1),
        "names": altered(own, Shard, {"rank": 1}, ids=()),
    }[gap]
    beside = [traces.run(SUBJECT.with_(num_steps=9, world_size=n)) for n in others]
    for family in ([bare, *beside], [*beside, bare]):
        left_open("coverage", *family)
    early = traces.one(own, Shard, step=3, rank=0).ids
    again = altered(bare, Shard, {"step": 5, "rank": 0}, ids=early)
    found = falsified("coverage", again, *beside)
    assert (found.step, found.rank) == (5, 0)


def test_steps_before_a_gap_are_counted() -> None:
    """A lost sample is found even if later steps are unknown."""
    trace = altered(traces.run(SUBJECT), Shard, {"step": 1, "rank": 1}, ids=(), weight=0.0)
    found = falsified("coverage", without(trace, Shard, step=4))
    assert found.step == 1


def test_replicas_that_draw_the_same_samples_with_replacement() -> None:
    """Each is to draw its own, and by chance they never draw alike in every step."""
    subject = six_samples([1, 2], num_samples=20, batch_size=10)
    alike = [[[1, 5, 9, 2, 7], [1, 5, 9, 2, 7]], [[3, 0, 11, 4, 12], [3, 0, 11, 4, 12]]]
    apart = [alike[0], [[3, 0, 11, 4, 12], [3, 0, 11, 4, 13]]]
    runs = [traces.was(sampled(steps, subject), replacement=True) for steps in (alike, apart)]
    found = falsified("coverage", runs[0])
    assert (found.step, found.rank) == (0, 1)
    assert "ranks 0 and 1 draw the same samples in every step" in found.message
    assert traces.judge("coverage", [runs[1]]).verdict is not Verdict.FALSIFIED
    shared = traces.was(runs[0], shared=True)
    assert traces.judge("coverage", [shared]).verdict is not Verdict.FALSIFIED


def test_samples_drawn_with_replacement() -> None:
    """With declared replacement samples may repeat, but must be of the data set and the same in a
    second run that was told its seed. With another number of workers they may differ.
    """
    steps = [[[0, 0], [3, 1]], [[0, 5], [2, 2]]]
    subject = six_samples(steps)
    assert "drawn again" in broken(judged(sampled(steps, subject))).message
    alone = replacing([[[1, 1, 2, 3]], [[4, 4, 0, 1]]], subject.with_(world_size=1))
    finding = judged(replacing(steps, subject), alone)
    assert finding.verdict is Verdict.HELD, finding.reason
    assert "drawn with replacement" in finding.notes[0]
    strange = replacing([[[0, 0], [3, 6]], steps[1]], subject)
    assert "outside 0 .. 5" in broken(judged(strange)).message
    other = replacing([[[0, 1], [3, 1]], steps[1]], subject.with_(repeat=1))
    undecided(judged(replacing(steps, subject), other))
    runs = [traces.was(run, seeded=True) for run in (replacing(steps, subject), other)]
    assert "draws different samples" in broken(judged(*runs)).message


def replacing(steps: Sequence[Sequence[Sequence[int]]], subject: Scenario) -> Trace:
    """Return a run that draws with replacement."""
    return traces.was(sampled(steps, subject), replacement=True)


def judged(*runs: Trace) -> Finding:
    return traces.judge("coverage", runs)


@pytest.mark.parametrize(
    ("steps", "is_right"),
    [
        ([[0, 1], [2, 3], [4, 2], [0, 1], [3, 4]], True),  # two epochs of five samples
        ([[0, 1], [2, 3], [3, 2], [0, 1], [3, 4]], False),
        ([[0, 1], [2, 3], [4, 2], [2, 1], [3, 4]], False),
    ],
)
def test_a_sampler_that_never_ends(steps: list[list[int]], is_right: bool) -> None:
    """One pass through its loader has epoch after epoch; a step may have samples of two."""
    own = scenario(num_samples=5, batch_size=2, num_steps=len(steps), world_size=2)
    trace = sampled([[[first], [second]] for first, second in steps], own)
    tally = Tally("F-DP-002")
    coverage._judge_without_epochs(tally, traces.was(trace, population="guessed"), trace)
    assert (tally.broken is None and not tally.missing) is is_right, tally.missing


def run(
    steps: Sequence[Sequence[Sequence[int]]], *selected: Sequence[int], contents: bool = False
) -> Trace:
    """Return a script's run in which `steps[step][rank]` are ids, all of epoch 0."""
    usual = {"system": "command", "workload": "own", "num_samples": 8, "batch_size": 4}
    size = {"world_size": len(steps[0]), "num_steps": len(steps)}
    events: list[Any] = [Selection(rank=r, ids=tuple(ids)) for r, ids in enumerate(selected)]
    for step, by_rank in enumerate(steps):
        for rank, ids in enumerate(by_rank):
            given = tuple((1.0, id_ + 9.0 * rank, float(id_)) for id_ in ids)
            facts = {"contents": given} if contents else {}
            weight = float(len(ids))
            events += [
                traces.shard(step, rank, ids=tuple(ids), weight=weight, **facts),
                traces.update(step, rank),
            ]
    return traces.hand_written(*events, subject=scenario(**{**usual, **size}))


def judged_samples(trace: Trace) -> Finding:
    return traces.judge("coverage", [trace])


EVENS, ODDS = [0, 2, 4, 6], [1, 3, 5, 7]


def test_ranks_with_parts_of_their_own() -> None:
    """Parts that together are the data set hold; a rank whose part is another is named."""
    steps = [[EVENS[:2], ODDS[:2]], [EVENS[2:], ODDS[2:]]]
    assert judged_samples(run(steps, EVENS, ODDS)).verdict is Verdict.HELD
    found = broken(judged_samples(run(steps, [0, 2, 4, 6], [1, 3, 5, 6])))
    assert (found.step, found.rank, found.sample_ids) == (-1, 1, (0, 1, 2, 3, 4, 5))
    assert "1 samples are in the data of both" in found.message
    three = run([[[0], [1], [2]]], [0, 1, 2], [0, 1, 3], [0, 1, 2])
    assert broken(judged_samples(three)).rank == 1


@pytest.mark.parametrize(
    ("steps", "verdict", "words"),
    [
        pytest.param([[0, 1, 2, 3], [0, 4, 5, 6]], "falsified", "before all 8", id="again"),
        pytest.param([[0, 1, 1, 2]], "falsified", "drawn again", id="twice in a step"),
        pytest.param([[0, 1, 2, 3], [4, 5, 6], [0, 1, 2, 3]], "inconclusive", "epoch=", id="rest"),
        pytest.param([[0, 1, 2, 3], [4, 5, 6, 7], [0, 3]], "held", "", id="a new epoch"),
        pytest.param([[0, 1, 2, 3], [4, 5, 6, 7, 0]], "inconclusive", "epoch=", id="padding?"),
    ],
)
def test_epochs_that_are_not_told(steps: list[list[int]], verdict: str, words: str) -> None:
    """A sample that comes again before the data is used up is wrong whatever the epochs are."""
    trace = was(run([[ids] for ids in steps]), epochs="untold")
    found = judged_samples(trace)
    assert (found.verdict.value, words in found.reason) == (verdict, True), found


SHORT = [[[0, 1], [2, 3]], [[0, 1], [4, 5]], [[6], [7]]]


@pytest.mark.parametrize(
    ("of_one", "verdict"),
    [
        pytest.param([[[0, 1, 2, 3]], [[0, 1, 4, 5]], [[6, 7]]], "inconclusive", id="so on one"),
        pytest.param([[[0, 1, 2, 3]], [[4, 5, 6, 7]]], "falsified", id="otherwise on one"),
    ],
)
def test_epochs_that_are_short_on_purpose(of_one: list[list[list[int]]], verdict: str) -> None:
    """A sample that comes again early is wrong if it doesn't on one worker, or samples are known.

    A curriculum, or a share of the data that is drawn anew, is the same with one worker.
    """
    told = {"epochs": "untold", "population": "guessed"}
    several, alone = was(run(SHORT), **told), was(run(of_one), **told)
    found = traces.judge("coverage", Runs(base=several, witnesses={ALONE: (alone,)}))
    assert found.verdict.value == verdict, found


REPEATED = [[[0, 0, 1], [0, 1, 1]], [[2, 2, 3], [2, 3, 3]]]


@pytest.mark.parametrize("epochs", ["told", "untold"])
@pytest.mark.parametrize(
    ("of_one", "verdict"),
    [
        pytest.param([[[0, 0, 0, 1, 1, 1]], [[2, 2, 2, 3, 3, 3]]], "inconclusive", id="so on one"),
        pytest.param([[[0, 1, 2, 3]], [[4, 5, 6, 7]]], "falsified", id="otherwise on one"),
    ],
)
def test_samples_that_are_repeated_on_purpose(
    of_one: list[list[list[int]]], verdict: str, epochs: str
) -> None:
    """A sampler of the script may repeat samples if it does so on one worker, too."""
    traits = {"epochs": epochs, "population": "guessed", "sample_ids": "seen"}
    several, alone = was(run(REPEATED), **traits), was(run(of_one), **traits)
    found = traces.judge("coverage", Runs(base=several, witnesses={ALONE: (alone,)}))
    assert found.verdict.value == verdict, found


def test_a_repeated_sample_of_many() -> None:
    """One that comes twice, also on one worker, pads a batch: an epoch that is told is wrong."""
    traits = {"population": "guessed", "sample_ids": "seen"}
    several = was(run([[[0, 1, 0], [2, 3]], [[4, 5], [6, 7]]]), **traits)
    alone = was(run([[[0, 1, 2, 3, 0]], [[4, 5, 6, 7]]]), **traits)
    found = traces.judge("coverage", Runs(base=several, witnesses={ALONE: (alone,)}))
    assert broken(found).sample_ids == (0,)


def test_one_worker_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shards are not read anew for every step that draws samples again."""
    read: list[Trace] = []
    plain = evidence.shards

    def counted(trace: Trace) -> dict[int, list[Shard]]:
        read.append(trace)
        return plain(trace)

    told = {"epochs": "untold", "population": "guessed"}
    several, alone = (was(run([*each] * 9), **told) for each in (SHORT, [[[0, 1, 2, 3]]]))
    monkeypatch.setattr(evidence, "shards", counted)
    coverage._judge_without_epochs(Tally(""), several, alone)
    assert len(read) == 2


def test_numbers_of_a_rank_s_own() -> None:
    """An id with other contents on another rank may be another sample, unless a sampler splits."""
    trace = run([[[0, 1], [1, 2]]], contents=True)
    assert "sample 1 has different contents on ranks 1 and 0" in undecided(judged_samples(trace))
    assert broken(judged_samples(was(trace, splits=True))).sample_ids == (1,)


def in_epochs(trace: Trace, *epochs: int) -> Trace:
    """Return a run whose steps belong to `epochs`."""
    return altered(trace, Shard, {}, epoch=lambda event: epochs[event.step])


def beside(trace: Trace, alone: Trace) -> Finding:
    """Return the finding on a run whose samples are a guess, next to one on one worker."""
    trace, alone = was(trace, population="guessed"), was(alone, population="guessed")
    runs = Runs(trace, witnesses={ALONE: (alone,)})
    return traces.judge("coverage", runs)


def test_a_data_set_that_is_guessed() -> None:
    """If nobody says which samples belong to it, an epoch may have some only."""
    trace = in_epochs(run([[[0, 1, 2]], [[3, 6, 7]], [[0, 1, 2]]]), 0, 0, 1)
    assert "4, 5" in broken(judged_samples(trace)).message
    assert "6 of 8 samples" in undecided(judged_samples(was(trace, population="guessed")))


@pytest.mark.parametrize(
    ("of_one", "cut_on_one", "verdict"),
    [
        pytest.param([[0, 1, 2], [0, 1, 2]], (0,), "inconclusive", id="so on one"),
        pytest.param([[0, 1, 2], [3, 4, 5]], (), "falsified", id="one goes on"),
        pytest.param([[0, 1, 2], [3, 4, 5]], (0,), "inconclusive", id="one goes on for some time"),
        pytest.param([[0, 1, 2, 3], [4, 5, 6, 7]], (0,), "falsified", id="one has all"),
    ],
)
def test_an_epoch_that_the_script_ends(
    of_one: list[list[int]], cut_on_one: tuple[int, ...], verdict: str
) -> None:
    """A script may end its passes early on purpose; the run on one worker shows if it does."""
    several = was(in_epochs(run([[[0, 1], [2]], [[5], [6, 7]]]), 0, 1), cut=(0,))
    last = 1 if cut_on_one and len({*of_one[1]} & {*of_one[0]}) else 0
    alone = was(in_epochs(run([[ids] for ids in of_one]), 0, last), cut=cut_on_one)
    found = traces.judge("coverage", Runs(several, witnesses={ALONE: (alone,)}))
    assert found.verdict.value == verdict, found
    broken(judged_samples(was(several, cut=())))
    assert "the script ends epoch 0" in undecided(judged_samples(several))


def test_some_epochs_that_the_script_ends() -> None:
    """A script may end an epoch by its loss, which need not be the same on one worker."""
    several = in_epochs(
        run([[[0, 1], [2, 3]], [[0, 2], [4, 6]], [[1, 3], [5, 7]], [[0], [1]]]), 0, 1, 1, 2
    )
    alone = in_epochs(run([[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[0, 2, 4, 6]]]), 0, 0, 1)
    found = traces.judge("coverage", Runs(was(several, cut=(0,)), witnesses={ALONE: (alone,)}))
    assert "the script ends epoch 0" in undecided(found)


def test_a_stream_that_is_numbered_from_step_to_step() -> None:
    """It has no epochs. It is held beside one worker with the same samples in each step."""
    trace = run([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    alone = run([[[0, 1, 2, 3]], [[4, 5, 6, 7]]])
    assert beside(trace, alone).verdict is Verdict.HELD
    larger = run([[[0, 1, 2, 3, 4]], [[5, 6, 7, 8, 9]]])
    assert beside(trace, larger).verdict is not Verdict.HELD
    undecided(judged_samples(was(trace, population="guessed")))
    again = run([[[0, 1], [2, 3]], [[4, 5], [4, 5]]])
    assert beside(again, alone).verdict is Verdict.FALSIFIED


def test_epochs_that_grow() -> None:
    """A curriculum is left open, unless an epoch has more on one worker."""
    growing = [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]
    alone = in_epochs(run([[ids] for ids in growing]), 0, 1, 1)
    trace = in_epochs(run([[ids[::2], ids[1::2]] for ids in growing]), 0, 1, 1)
    assert "epoch 0 has only 4 of 8 samples" in undecided(beside(trace, alone))
    whole = in_epochs(run([[ids] for ids in [*growing[1:], *growing[1:]]]), 0, 0, 1, 1)
    assert broken(beside(trace, whole)).sample_ids == (4, 5, 6, 7)


def test_a_large_batch_that_an_epoch_lacks() -> None:
    """An epoch that lacks a whole batch of one worker's is found, however large that is."""
    size = LISTED_MAX + 200
    first, second = range(size), range(size, 2 * size)
    alone = in_epochs(run([[first], [second], [first]]), 0, 0, 1)
    trace = in_epochs(run([[first[::2], first[1::2]], [second[::2], second[1::2]]]), 0, 1)
    subject = {"num_samples": 2 * size, "batch_size": size}
    runs = [replace(one, scenario=one.scenario.with_(**subject)) for one in (trace, alone)]
    assert broken(beside(*runs)).sample_ids == tuple(second[:LISTED_MAX])


def test_epochs_that_grow_and_are_not_told() -> None:
    """A sample that comes again may begin an epoch, unless one worker goes on with others."""
    growing = [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]
    trace = was(run([[ids[::2], ids[1::2]] for ids in growing]), epochs="untold")
    assert "step 1 draws samples again" in undecided(
        beside(trace, was(run([[ids] for ids in growing]), epochs="untold"))
    )
    going_on = was(run([[growing[0]], [growing[2]], [growing[0]]]), epochs="untold")
    assert broken(beside(trace, going_on)).step == 1


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        pytest.param(
            [[[0], [4]], [[1], [5]], [[2], [6]]], "step 0 has 2 samples, and 4 on 1", id="size"
        ),
        pytest.param(
            [[[1, 3], [2, 6]], [[5, 7], [0, 4]], [[7, 1], [4, 6]]], "a part of the data", id="parts"
        ),
        pytest.param(
            [[[1, 3], [2, 6]], [[5, 7], [0, 4]], [[2, 1], [4, 6]]], "a different order", id="order"
        ),
    ],
)
def test_batches_of_another_order(steps: list[list[list[int]]], words: str) -> None:
    """The likely cause is named: an order of its own on one worker, or parts of the ranks."""
    epochs = 0, 0, 1
    alone = in_epochs(run([[ids] for ids in [*ALL, ALL[0]]]), *epochs)
    compared = Compared(runs=Runs(alone), model=alone, trace=in_epochs(run(steps), *epochs))
    assert words in random_draws.other_batches(compared)


ALL = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("steps", "lost"),
    [
        pytest.param([[[0], [1, 2]], [[4, 5], [6]]], {0: [3], 1: [7]}, id="of each batch"),
        pytest.param([[[0, 1], [2, 3]], [[4, 5], [6]]], {}, id="of the last one"),
        pytest.param([[[0], [1, 2]], [[4, 5], [3]]], {}, id="moved to the next"),
    ],
)
def test_samples_that_several_workers_leave_out(
    steps: list[list[list[int]]], lost: dict[int, list[int]]
) -> None:
    """They are found by the run on one worker, whose batches are larger."""
    alone, trace = run([[ids] for ids in ALL]), was(run(steps), population="guessed")
    assert random_draws.left_out(alone, trace) == lost
    runs = Runs(trace, witnesses={ALONE: (alone,)})
    finding = traces.judge("coverage", runs)
    if lost:
        assert broken(finding).sample_ids == (3,)
        assert "step 0 leaves out samples [3], which the run on one worker" in finding.reason
    else:
        assert finding.verdict is Verdict.HELD


def both(trace: Trace, alone: Trace) -> Finding:
    runs = Runs(trace, {ALONE: (alone,)})
    return traces.judge("coverage", runs)


def test_another_order_on_one_worker_is_judged_by_itself() -> None:
    """Each sample comes once an epoch in either run; before an epoch's end that isn't known."""
    alone = in_epochs(run([[ids] for ids in [*ALL, ALL[0]]]), 0, 0, 1)
    steps = [[[1, 3], [2, 6]], [[5, 7], [0, 4]], [[2, 1], [4, 6]]]
    held = both(in_epochs(run(steps), 0, 0, 1), alone)
    assert held.verdict is Verdict.HELD, held
    assert any("the order of samples on one worker differs" in note for note in held.notes)
    twice = [[[1, 3], [2, 6]], [[5, 7], [0, 3]], steps[2]]
    assert broken(both(in_epochs(run(twice), 0, 0, 1), alone)).step == 1
    assert "one worker may have a different order" in undecided(
        both(run(steps[:1]), run([[ALL[0]]]))
    )
