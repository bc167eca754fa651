"""F-DP-002 on what scripts leave open: epochs, the data set, and numbers of each rank's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check import evidence
from entrenar_py.check.causes import random_draws
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import CHECKS, untold_epochs
from entrenar_py.check.clauses.coverage import LISTED_MAX
from entrenar_py.check.evidence.needs import ALONE, Runs
from entrenar_py.shared.trace import Selection, Shard, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally, Verdict
from tests.check.clauses import traces
from tests.check.clauses.traces import broken, scenario, was


def run(
    steps: Sequence[Sequence[Sequence[int]]], *selected: Sequence[int], **subject: Any
) -> Trace:
    """Return a script's run in which `steps[step][rank]` are ids, all of epoch 0."""
    usual = {"system": "command", "workload": "own", "num_samples": 8, "batch_size": 4}
    size = {"world_size": len(steps[0]), "num_steps": len(steps)}
    events: list[Any] = [Selection(rank=r, ids=tuple(ids)) for r, ids in enumerate(selected)]
    fields: dict[str, Any] = {"loss_sum": 1.0, "finite": True, "shard": 0}
    for step, by_rank in enumerate(steps):
        for rank, ids in enumerate(by_rank):
            weight = float(len(ids))
            given = tuple((1.0, float(id_), float(id_)) for id_ in ids)
            events.append(
                Shard(step=step, epoch=0, rank=rank, ids=tuple(ids), weight=weight, **fields)
                if not subject.get("contents")
                else Shard(
                    step=step,
                    epoch=0,
                    rank=rank,
                    ids=tuple(ids),
                    weight=weight,
                    contents=tuple((size, norm + 9 * rank, total) for size, norm, total in given),
                    **fields,
                )
            )
            events.append(
                Update(
                    step=step,
                    rank=rank,
                    loss=1.0,
                    weight=1.0,
                    learning_rate=0.1,
                    finite=True,
                    weights={},
                )
            )
    return traces.hand_written(*events, subject=scenario(**{**usual, **size}))


def judged(trace: Trace) -> Finding:
    """Return the finding on a run."""
    return traces.judge("coverage", [trace])


EVENS, ODDS = [0, 2, 4, 6], [1, 3, 5, 7]


def test_ranks_with_parts_of_their_own() -> None:
    """Parts that together are the data set hold; a rank whose part is another is named."""
    steps = [[EVENS[:2], ODDS[:2]], [EVENS[2:], ODDS[2:]]]
    assert judged(run(steps, EVENS, ODDS)).verdict is Verdict.HELD
    found = broken(judged(run(steps, [0, 2, 4, 6], [1, 3, 5, 6])))
    assert (found.step, found.rank, found.sample_ids) == (-1, 1, (0, 1, 2, 3, 4, 5))
    assert "1 samples are in the data of both" in found.message
    three = run([[[0], [1], [2]]], [0, 1, 2], [0, 1, 3], [0, 1, 2])
    assert broken(judged(three)).rank == 1


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
    found = judged(trace)
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
    found = CHECKS["coverage"].judge(
        traces.clause("coverage"), Runs(base=several, witnesses={ALONE: (alone,)})
    )
    assert found.verdict.value == verdict, found


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
    untold_epochs.judge(Tally(""), several, alone)
    assert len(read) == 2


def test_numbers_of_a_rank_s_own() -> None:
    """An id with other contents on another rank may be another sample, unless a sampler splits."""
    trace = run([[[0, 1], [1, 2]]], contents=True)
    found = judged(trace)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "sample 1 has other contents on rank 1 than on rank 0" in found.reason
    assert broken(judged(was(trace, splits=True))).sample_ids == (1,)


def in_epochs(trace: Trace, *epochs: int) -> Trace:
    """Return a run whose steps belong to `epochs`."""
    events = (
        replace(event, epoch=epochs[event.step]) if isinstance(event, Shard) else event
        for event in trace.events
    )
    return replace(trace, events=tuple(events))


def beside(trace: Trace, alone: Trace) -> Finding:
    """Return the finding on a run whose samples are a guess, next to one on one worker."""
    trace, alone = was(trace, population="guessed"), was(alone, population="guessed")
    runs = Runs(trace, witnesses={ALONE: (alone,)})
    return CHECKS["coverage"].judge(traces.clause("coverage"), runs)


def test_a_data_set_that_is_guessed() -> None:
    """If nobody says which samples belong to it, an epoch may have some only."""
    trace = in_epochs(run([[[0, 1, 2]], [[3, 6, 7]], [[0, 1, 2]]]), 0, 0, 1)
    assert "4, 5" in broken(judged(trace)).message
    found = judged(was(trace, population="guessed"))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "6 of 8 samples" in found.reason


def test_a_stream_that_is_numbered_from_step_to_step() -> None:
    """It has no epochs. It is held beside one worker with the same samples in each step."""
    trace = run([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    alone = run([[[0, 1, 2, 3]], [[4, 5, 6, 7]]])
    assert beside(trace, alone).verdict is Verdict.HELD
    larger = run([[[0, 1, 2, 3, 4]], [[5, 6, 7, 8, 9]]])
    assert beside(trace, larger).verdict is not Verdict.HELD
    found = judged(was(trace, population="guessed"))
    assert found.verdict is Verdict.INCONCLUSIVE
    again = run([[[0, 1], [2, 3]], [[4, 5], [4, 5]]])
    assert beside(again, alone).verdict is Verdict.FALSIFIED


def test_epochs_that_grow() -> None:
    """A curriculum is left open, unless an epoch has more on one worker."""
    growing = [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]
    alone = in_epochs(run([[ids] for ids in growing]), 0, 1, 1)
    trace = in_epochs(run([[ids[::2], ids[1::2]] for ids in growing]), 0, 1, 1)
    found = beside(trace, alone)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "epoch 0 has only 4 of 8 samples" in found.reason
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
    found = beside(trace, was(run([[ids] for ids in growing]), epochs="untold"))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "step 1 draws samples again" in found.reason
    going_on = was(run([[growing[0]], [growing[2]], [growing[0]]]), epochs="untold")
    assert broken(beside(trace, going_on)).step == 1


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        pytest.param([[[0], [4]], [[1], [5]], [[2], [6]]], "step 0 has 2, and 4 there", id="size"),
        pytest.param(
            [[[1, 3], [2, 6]], [[5, 7], [0, 4]], [[7, 1], [4, 6]]], "a part of the data", id="parts"
        ),
        pytest.param(
            [[[1, 3], [2, 6]], [[5, 7], [0, 4]], [[2, 1], [4, 6]]], "another order", id="order"
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
    finding = CHECKS["coverage"].judge(traces.clause("coverage"), runs)
    if lost:
        assert broken(finding).sample_ids == (3,)
        assert "step 0 leaves out samples [3], which the run on one worker" in finding.reason
    else:
        assert finding.verdict is Verdict.HELD


def both(trace: Trace, alone: Trace) -> Finding:
    """Return the finding on a run and on that of one worker."""
    runs = Runs(trace, {ALONE: (alone,)})
    return CHECKS["coverage"].judge(traces.clause("coverage"), runs)


def test_another_order_on_one_worker_is_judged_by_itself() -> None:
    """Each sample comes once an epoch in either run; before an epoch's end that isn't known."""
    alone = in_epochs(run([[ids] for ids in [*ALL, ALL[0]]]), 0, 0, 1)
    steps = [[[1, 3], [2, 6]], [[5, 7], [0, 4]], [[2, 1], [4, 6]]]
    held = both(in_epochs(run(steps), 0, 0, 1), alone)
    assert held.verdict is Verdict.HELD, held
    assert any("another order of samples" in note for note in held.notes)
    twice = [[[1, 3], [2, 6]], [[5, 7], [0, 3]], steps[2]]
    assert broken(both(in_epochs(run(twice), 0, 0, 1), alone)).step == 1
    unended = both(run(steps[:1]), run([[ALL[0]]]))
    assert unended.verdict is Verdict.INCONCLUSIVE
    assert "one worker may have another order" in unended.reason
