"""Samples without ids are told apart by their rows; losses that couple them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check import evidence
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.evidence.needs import ALONE, Runs
from entrenar_py.shared.scenario import OBSERVED
from entrenar_py.shared.trace import Event, Shard, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests import traces
from tests.check.causes.test_presuppositions import changed, own, parity
from tests.traces import altered, falsified, left_open, scenario, undecided

SUBJECT = scenario(workload="linear", world_size=2, num_shards=2, num_samples=12, batch_size=4)


def given_alike(**traits: Any) -> Trace:
    """Return a run on two ranks that are given the same rows, other ones in each step."""
    trace = traces.was(traces.run(SUBJECT), sample_ids="content", **traits)
    for step in range(SUBJECT.num_steps):
        trace = altered(trace, Shard, {"step": step}, ids=(10 * step, 10 * step + 1))
    return trace


@pytest.mark.parametrize("traits", [{}, {"shared": True}])
def test_replicas_are_given_the_same_rows(traits: dict[str, Any]) -> None:
    """Ranks with shards of their own are to be given other rows, as under fully_shard."""
    found = falsified("coverage", given_alike(**traits))
    assert found.message.startswith("ranks 0, 1 are given the same rows in every step, though")
    assert (found.step, found.rank) == (0, 1)


def test_nothing_shows_how_ranks_are_arranged() -> None:
    """Ranks may share the work on the rows if nothing shows that they don't."""
    assert "it is unknown whether they share the work on these rows" in left_open(
        "coverage", given_alike(arranged="guessed")
    )


def test_ranks_share_a_shard() -> None:
    """Ranks of a tensor-parallel group are given the same rows, rightly."""
    trace = altered(given_alike(shared=True), Shard, {"rank": 1}, shard=0)
    assert traces.judge("coverage", [trace]).verdict is not Verdict.FALSIFIED


def test_ranks_that_share_a_shard_are_given_other_rows() -> None:
    """They may be parts of a batch, or other batches; the run on one worker tells."""
    trace = traces.was(traces.run(SUBJECT), sample_ids="content", shared=True)
    alone = traces.was(traces.run(SUBJECT.with_(world_size=1)), sample_ids="content", shared=True)
    trace = altered(trace, Shard, {"rank": 1}, shard=0)
    for runs, is_open in ((Runs(trace), True), (Runs(trace, witnesses={ALONE: (alone,)}), False)):
        finding = traces.judge("coverage", runs)
        assert ("call obs.samples(ids) on all of them" in finding.reason) is is_open


@pytest.mark.parametrize(("order", "is_open"), [([0, 1, 0, 1], False), ([0, 0, 1, 2], True)])
def test_rows_that_come_again(order: list[int], is_open: bool) -> None:
    """Rows come again when all have come; before that they may be one sample, given twice."""
    trace = traces.was(traces.run(SUBJECT), sample_ids="content")
    steps = sorted({shard.step for shard in trace.of(Shard)})
    for step, batch in zip(steps, order, strict=False):
        for shard in range(2):
            ids = (10 * batch + shard, 100 + 10 * batch + shard)
            trace = altered(trace, Shard, {"step": step, "shard": shard}, ids=ids)
    reason = traces.judge("coverage", [trace]).reason
    assert ("rows are used again in step 1 before all others were used" in reason) is is_open


def test_rows_with_other_contents_are_not_called_other_samples() -> None:
    """Noise or padding may be in a row: that runs draw other samples isn't known."""
    alone, trace = (
        traces.was(traces.run(SUBJECT.with_(world_size=size)), sample_ids="content")
        for size in (1, SUBJECT.world_size)
    )
    for shard in trace.of(Shard):
        at = {"rank": shard.rank, "step": shard.step, "shard": shard.shard}
        trace = altered(trace, Shard, at, ids=tuple(id_ + 1000 for id_ in shard.ids))
    trace, alone = (
        replace(run, scenario=run.scenario.with_(system=OBSERVED, workload="own"))
        for run in (trace, alone)
    )
    for check in ("coverage", "parity"):
        reason = left_open(check, *Runs(trace, {ALONE: (alone,)}))
        assert "different rows" in reason
        assert "other samples" not in reason


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "held"), (2.0, "inconclusive")])
def test_other_rows_with_the_same_gradients_are_the_same_samples(
    factor: float, verdict: str
) -> None:
    """Rows are padded to the longest of their batch, which may be another on several workers."""
    size = {"num_samples": 12, "batch_size": 4, "num_shards": 2}
    subject = scenario(detail="values", world_size=2, **size)
    alone, trace = (
        traces.was(traces.run(subject.with_(world_size=size)), sample_ids="content")
        for size in (1, 2)
    )
    for shard in trace.of(Shard):
        at = {"rank": shard.rank, "step": shard.step, "shard": shard.shard}
        trace = altered(trace, Shard, at, ids=tuple(id_ + 1000 for id_ in shard.ids))
    for update in trace.of(Update):
        at = {"rank": update.rank, "step": update.step}
        trace = altered(trace, Update, at, gradient=evidence.times(update.gradient, factor))
    trace, alone = (
        replace(run, scenario=run.scenario.with_(system=OBSERVED, workload="own"))
        for run in (trace, alone)
    )
    finding = traces.judge("coverage", Runs(trace, {ALONE: (alone,)}))
    assert finding.verdict.value == verdict, finding.reason


@pytest.mark.parametrize(("is_other", "verdict"), [(False, "falsified"), (True, "inconclusive")])
def test_other_rows_whose_gradients_add_up_are_the_same_samples(
    is_other: bool, verdict: str
) -> None:
    """One worker's gradient is a sum of the micro-batches' if it is given their samples."""
    size = {"num_samples": 12, "batch_size": 4, "num_shards": 2}
    subject = scenario(detail="values", world_size=2, **size)
    alone, trace = (
        traces.was(traces.run(subject.with_(world_size=size)), sample_ids="content")
        for size in (1, 2)
    )
    weights = trace.of(Update)[0].weights
    for shard in trace.of(Shard):
        at = {"rank": shard.rank, "step": shard.step, "shard": shard.shard}
        gradient = {n: weights[n] for n in shard.gradient} if is_other else shard.gradient
        ids = tuple(id_ + 1000 for id_ in shard.ids)
        trace = altered(trace, Shard, at, ids=ids, gradient=gradient)
    for update in trace.of(Update):
        at = {"rank": update.rank, "step": update.step}
        parts = {"gradient": update.gradient, "weights": update.weights}
        twice = {name: evidence.times(tensors, 2.0) for name, tensors in parts.items()}
        trace = altered(trace, Update, at, **twice)
    trace, alone = (
        replace(run, scenario=run.scenario.with_(system=OBSERVED, workload="own"), promises=())
        for run in (trace, alone)
    )
    finding = traces.judge("parity", Runs(trace, {ALONE: (alone,)}))
    assert finding.verdict.value == verdict, finding.reason


def test_rows_that_come_again_on_one_worker_too() -> None:
    """An epoch that grows, or draws with replacement: the order is the script's own."""
    alone, trace = (
        traces.was(traces.run(SUBJECT.with_(world_size=size)), sample_ids="content")
        for size in (1, 2)
    )
    for step in range(1, SUBJECT.num_steps):
        for shard in range(2):
            ids = next(s.ids for s in trace.of(Shard) if (s.step, s.shard) == (0, shard))
            again = (ids[0], *(100 * step + 10 * shard + at for at in range(1, len(ids))))
            trace = altered(trace, Shard, {"step": step, "shard": shard}, ids=again)
            alone = altered(alone, Shard, {"step": step, "shard": shard}, ids=again)
    for runs, is_open in ((Runs(trace), True), (Runs(trace, witnesses={ALONE: (alone,)}), False)):
        finding = traces.judge("coverage", runs)
        assert ("rows are used again in step 1" in finding.reason) is is_open, finding.reason


PASS = ((0, 1, 2, 3), (4, 5, 6, 7))  # the rows of a pass through the data, by step
AGAIN = ((0, 21, 22, 23), (24, 25, 26, 27))  # of another pass, with other contents


def in_passes(size: int, batches: Sequence[tuple[int, ...]], **traits: Any) -> Trace:
    """Return a script's run with these rows in its steps, over and over; each shard has a half."""
    subject = SUBJECT.with_(world_size=size, num_steps=max(SUBJECT.num_steps, len(batches)))
    trace = traces.run(subject)
    for step in range(subject.num_steps):
        rows = batches[step % len(batches)]
        for shard, ids in enumerate((rows[:2], rows[2:])):
            trace = altered(trace, Shard, {"step": step, "shard": shard}, ids=ids)
    own = trace.scenario.with_(system=OBSERVED, workload="own", num_samples=4)
    trace = replace(trace, scenario=own, promises=())
    return traces.was(trace, sample_ids="content", **traits)


@pytest.mark.parametrize(
    ("batches", "verdict", "words"),
    [
        (PASS, "held", ""),
        (PASS[::-1], "held", ""),
        (((0, 1, 1, 2), PASS[1]), "falsified", "rank 1 is given 1 rows"),
        ((PASS[0], (4, 5, 2, 7)), "falsified", "first to rank 1 in step 0"),
        (((0, 1, 2, 13), PASS[1]), "inconclusive", "different rows"),
    ],
)
def test_rows_that_one_worker_is_given_in_passes(
    batches: tuple[tuple[int, ...], ...], verdict: str, words: str
) -> None:
    """If one worker is given each row once in a pass, so are several, in any order."""
    alone, trace = in_passes(1, PASS), in_passes(2, batches)
    runs = Runs(trace, {ALONE: (alone,)}, witnesses={ALONE: (alone,)})
    finding = traces.judge("coverage", runs)
    assert finding.verdict.value == verdict, finding.reason
    assert words in finding.reason
    without = traces.judge("coverage", Runs(trace))
    assert without.verdict is not Verdict.FALSIFIED, without.reason


@pytest.mark.parametrize(
    ("batches", "verdict"),
    [
        ((*PASS[::-1], *AGAIN), "held"),
        ((*PASS[::-1], AGAIN[1], AGAIN[0]), "held"),
        (((4, 5, 6, 7), (0, 1, 2, 9), *AGAIN), "inconclusive"),  # another row in the first pass
        ((*PASS[::-1], (0, 1, 1, 3), AGAIN[1]), "inconclusive"),  # and in the second one
    ],
)
def test_rows_that_come_as_often_in_a_pass_in_another_order(
    batches: tuple[tuple[int, ...], ...], verdict: str
) -> None:
    """Rows may be drawn anew in each pass (neighbours of a node), and one of them come twice."""
    alone, trace = in_passes(1, (*PASS, *AGAIN)), in_passes(2, batches)
    runs = Runs(trace, {ALONE: (alone,)}, witnesses={ALONE: (alone,)})
    finding = traces.judge("coverage", runs)
    assert finding.verdict.value == verdict, finding.reason


@pytest.mark.parametrize(
    ("alone", "tail", "verdict"),
    [
        ((20, 21, 22, 23), (20, 22, 21, 23), "held"),
        ((0, 1, 2, 3), (4, 0, 5, 6), "held"),  # of the same rows in another order
        ((20, 21, 22, 23), (20, 21, 20, 21), "inconclusive"),
        ((20, 21, 22, 23), (31, 31, 31, 31), "inconclusive"),
        ((0, 1, 2, 3), (4, 0, 5, 0), "falsified"),
    ],
)
def test_a_pass_that_is_cut_short(
    alone: tuple[int, ...], tail: tuple[int, ...], verdict: str
) -> None:
    """Its rows are those of a pass, and none comes more often than there."""
    one, two = in_passes(1, (*PASS, alone)), in_passes(2, (*PASS[::-1], tail))
    one, two = (
        replace(
            trace,
            events=tuple(e for e in trace.events if getattr(e, "step", 0) < 3),
            scenario=trace.scenario.with_(num_steps=3),
        )
        for trace in (one, two)
    )
    runs = Runs(two, {ALONE: (one,)}, witnesses={ALONE: (one,)})
    finding = traces.judge("coverage", runs)
    assert finding.verdict.value == verdict, finding.reason


@pytest.mark.parametrize(("is_same", "verdict"), [(True, "falsified"), (False, "inconclusive")])
def test_ranks_that_do_the_same_share_no_work(is_same: bool, verdict: str) -> None:
    """Ranks with the same rows, losses and gradients do all of the work, each for itself."""
    trace = in_passes(2, ((0, 1, 0, 1), (4, 5, 4, 5)), arranged="guessed")
    for step in range(SUBJECT.num_steps):
        mine, other = (traces.one(trace, Shard, step=step, shard=shard) for shard in range(2))
        gradient = mine.gradient if is_same else other.gradient
        at = {"step": step, "shard": other.shard}
        trace = altered(trace, Shard, at, gradient=gradient, loss_sum=mine.loss_sum)
    finding = traces.judge("coverage", Runs(trace))
    assert finding.verdict.value == verdict, finding.reason
    assert "ranks 0, 1 are given the same rows in every step" in finding.reason


def test_micro_batches_that_come_twice_on_one_worker_are_no_order() -> None:
    """Each worker of a loader that doesn't split its stream hands out all data."""
    trace = traces.was(traces.run(SUBJECT), sample_ids="content")
    alone = traces.run(SUBJECT.with_(world_size=1, num_shards=1))
    alone = traces.was(alone, sample_ids="content")
    for step in range(SUBJECT.num_steps):
        batch = tuple(100 * (step // 2) + row for row in range(4))
        alone = altered(alone, Shard, {"step": step}, ids=batch)
        for shard in range(2):
            at = {"step": step, "shard": shard}
            trace = altered(trace, Shard, at, ids=batch[2 * shard : 2 * shard + 2])
    finding = traces.judge("coverage", Runs(trace, witnesses={ALONE: (alone,)}))
    assert "rows are used again in step 1" in finding.reason


BLOCK = ((50, 51, 52, 53), (54, 55, 56, 57))  # the rows of another block, by step


@pytest.mark.parametrize(
    ("batches", "is_open"),
    [
        ((*PASS, *PASS[::-1], *BLOCK, *BLOCK), False),
        ((*PASS, (0, 1, 2, 13), PASS[1], *BLOCK), True),  # a row of another block
        ((*PASS, PASS[0], *BLOCK), True),  # the second pass is cut
        ((PASS[0], PASS[0], PASS[1], PASS[1], *BLOCK), True),  # each batch twice
        ((*PASS, (0, 1, 1, 2), *BLOCK), True),  # a row twice within a batch
    ],
)
def test_rows_that_come_again_in_whole_passes(
    batches: tuple[tuple[int, ...], ...], is_open: bool
) -> None:
    """A trainer may go several times through what it has played, and then play again."""
    trace = in_passes(2, (*batches, (90, 91, 92, 93)))
    finding = traces.judge("coverage", Runs(trace))
    assert ("before all others were used" in finding.reason) is is_open, finding.reason


@pytest.mark.parametrize(
    ("other", "verdict"), [((20, 21), "falsified"), ((21, 20), "held"), ((20, 29), "held")]
)
def test_ranks_that_select_rows_by_the_same_random_numbers(
    other: tuple[int, ...], verdict: str
) -> None:
    """Many micro-batches of rows that hardly come again are alike by no chance, in any step."""
    subject = SUBJECT.with_(num_samples=400, num_steps=40)
    trace = traces.was(traces.run(subject), sample_ids="content", selects="train.py:9")
    for step in range(subject.num_steps):
        for shard in range(2):
            first = 10 * step + 4 * shard
            at = {"step": step, "shard": shard}
            trace = altered(trace, Shard, at, ids=(first, first + 1))
        behind = 10 * (step - 2) - 20
        again = tuple(behind + row for row in other)
        if step > 2:  # rank 1 is two steps behind rank 0
            trace = altered(trace, Shard, {"step": step, "shard": 1}, ids=again)
    finding = traces.judge("coverage", Runs(trace))
    assert finding.verdict.value == verdict, finding.reason
    if verdict == "falsified":
        assert "rank 1 selects for step 3 the rows that rank 0 selects for step 1" in finding.reason


def test_rows_that_are_selected_at_random_come_as_often_as_they_do() -> None:
    """No pass is meant: other rows on one worker, and rows that come again, are no error."""
    trace = in_passes(2, (*PASS, (0, 1, 2, 13), *BLOCK))
    alone = in_passes(1, (*BLOCK, *PASS))
    for selects, verdict in (("train.py:9", "held"), ("", "inconclusive")):
        model, other = (traces.was(one, selects=selects) for one in (trace, alone))
        finding = traces.judge("coverage", Runs(model, {ALONE: (other,)}))
        assert finding.verdict.value == verdict, finding.reason


def coupled(trace: Trace, step: int, *, loss: float | None = None) -> Trace:
    """Return a run of one micro-batch a step, in which one has a gradient of another direction.

    Its loss is `loss`, or the same as before.
    """
    name = min(traces.one(trace, Update, step=step, rank=0).gradient)
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Shard):
            continue
        if isinstance(event, Update):
            shards = [shard for shard in trace.of(Shard) if shard.step == event.step]
            whole = traces.shard(
                event.step,
                epoch=shards[0].epoch,
                ids=tuple(id_ for shard in shards for id_ in shard.ids),
                loss_sum=sum(shard.loss_sum or 0.0 for shard in shards),
                weight=sum(shard.weight for shard in shards),
                gradient=event.gradient,
            )
            if event.step == step:
                gradient = changed(event.gradient, name, by=1.0)
                event = replace(event, gradient=gradient, loss=loss or event.loss)
                whole = replace(whole, gradient=gradient)
            events.append(whole)
        events.append(event)
    return replace(trace, events=tuple(events))


def test_a_loss_that_couples_samples_is_not_compared() -> None:
    """No combination of the ranks' gradients is that of one worker, and the loss is another."""
    reason = undecided(parity(own(2), coupled(own(1), 0, loss=99.0)))
    assert "may not be a sum over its samples" in reason
    assert 'observe(..., loss_over="batch")' in reason


def over_elements(trace: Trace, counts: dict[frozenset[int], int]) -> Trace:
    """Return the run whose micro-batches of these samples have losses over so many elements."""
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Shard) and (count := counts.get(frozenset(event.ids))):
            event = replace(event, terms=((float(count), 0.1),))
        events.append(event)
    return replace(trace, events=tuple(events))


@pytest.mark.parametrize(("whole", "is_padded"), [(7, True), (4 + 7, False), (None, False)])
def test_a_loss_over_padding_is_found(whole: int | None, is_padded: bool) -> None:
    """Samples that are batched with longer ones have more elements; pairs of them are no padding.

    `whole` is the number of elements a sample in the run on one worker, where ranks have 4 and 7.
    """
    several, alone = own(2), coupled(own(1), 0, loss=99.0)
    parts = [shard for shard in several.of(Shard) if shard.step == 0]
    counts = {frozenset(p.ids): w * len(p.ids) for p, w in zip(parts, (4, 7), strict=False)}
    counts |= {frozenset(p.ids): 7 * len(p.ids) for p in parts[2:]}
    ids = frozenset(id_ for part in parts for id_ in part.ids)
    counts[ids] = (whole or 0) * len(ids)
    steps = [
        replace(run, events=tuple(e for e in run.events if getattr(e, "step", 0) < 1))
        for run in (several, alone)
    ]
    finding = parity(*(over_elements(run, counts) for run in steps))
    if not is_padded:
        assert finding.verdict is Verdict.INCONCLUSIVE, finding
        return
    broken = traces.broken(finding)
    assert broken.step == 0
    assert "padding up to the longest sample counts" in broken.message


def declared(trace: Trace, over: str) -> Trace:
    """Return the run of a script that declares of which samples its loss is."""
    return replace(trace, traits=replace(trace.traits, loss_over=over))


@pytest.mark.parametrize("over", ["batch", "micro-batch"])
def test_a_declared_loss_is_compared(over: str) -> None:
    """If all ranks are to compute one loss, other gradients are wrong."""
    several, alone = own(5), coupled(own(1), 0, loss=99.0)  # a micro-batch a rank
    assert traces.broken(parity(declared(several, over), declared(alone, over))).step == 0


def test_micro_batches_of_all_ranks_are_compared_if_they_are_the_same() -> None:
    """If each micro-batch has a loss of its own, all runs have to cut the same ones."""
    several, alone = own(2), coupled(own(1), 0, loss=99.0)
    assert "cut different micro-batches: cut the same" in undecided(
        parity(declared(several, "micro-batch"), declared(alone, "micro-batch"))
    )
    assert traces.broken(parity(declared(several, "batch"), declared(alone, "batch"))).step == 0


@pytest.mark.parametrize("over", [("batch", ""), ("", "micro-batch"), ("micro-batch", "batch")])
def test_runs_that_declare_their_losses_differently(over: tuple[str, str]) -> None:
    """The reason says so, and not that micro-batches are cut otherwise."""
    several, alone = own(2), coupled(own(1), 0, loss=99.0)
    assert "the runs declare loss_over differently: declare the same" in undecided(
        parity(declared(several, over[0]), declared(alone, over[1]))
    )


def test_the_difference_of_two_runs_is_looked_for_once() -> None:
    """Several presuppositions ask for it, and each comparison takes long."""
    compared = Compared(runs=Runs(base=own(2)), model=coupled(own(1), 0), trace=own(2))
    assert compared.difference is not None
    assert compared.difference is compared.difference


def test_other_gradients_of_the_same_loss_are_found() -> None:
    """If the losses agree the gradients should, too."""
    broken = traces.broken(parity(own(2), coupled(own(1), 0)))
    assert broken.step == 0


def test_a_combination_of_the_ranks_gradients_is_found() -> None:
    """Gradients that are weighted wrongly, or of one rank alone, are compared."""
    trace = own(2)
    name = min(traces.one(trace, Update, step=0, rank=0).gradient)
    gradient = changed(traces.one(trace, Update, step=0, rank=0).gradient, name, times=0.5)
    wrong = traces.altered(trace, Update, {"step": 0}, gradient=gradient)
    assert traces.broken(parity(wrong, own(1))).tensor == name
