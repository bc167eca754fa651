"""What a resume restores is compared with the state before the stop, and named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from entrenar_py.check.causes import resumes
from entrenar_py.check.clauses.replicas import judge_state
from entrenar_py.check.evidence.needs import SAVED, Runs
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import End, Event, Shard, Start, Tensors, Trace, Update, record_tensor
from entrenar_py.shared.verdict import Finding, Tally, Verdict
from tests import traces
from tests.traces import clause, scenario, values, was

SUBJECT = scenario(system="command", workload="own", world_size=1, num_steps=2)
MOMENTS = {"a/m": values(1.0, 2.001), "b/m": values(3.0, 4.0)}
MOVED = {"a/m": values(5.0, 6.0), "b/m": values(7.0, 8.0)}


def update(step: int, optimizer: Tensors) -> Update:
    return traces.update(step, weights={"a": values(step), "b": values(step)}, optimizer=optimizer)


def stopped(restored: Tensors, after: Tensors, held: Tensors = MOMENTS) -> Trace:
    """Return a run that stopped with `held`, resumed with `restored` and had `after` later."""
    events: list[Event] = [
        Start(step=0, rank=0, weights={}, optimizer={"a/m": values(0.5, 0.5)}),
        update(0, held),
        Start(step=1, rank=0, weights={}, optimizer=restored, resumed=True),
        update(1, after),
    ]
    return traces.hand_written(*events, subject=SUBJECT.with_(stops=(1,)))


STRAIGHT = traces.hand_written(
    Start(step=0, rank=0, weights={}), update(0, MOMENTS), update(1, MOVED), subject=SUBJECT
)


def judged(trace: Trace) -> Finding:
    """Return the finding of F-TI-002 on a stopped run."""
    return judge_state(clause("optimizer_state"), Runs(STRAIGHT, {SAVED: (trace,)}))


def test_what_was_restored_is_held() -> None:
    """The state before the stop, bit for bit."""
    finding = judged(stopped(MOMENTS, MOVED))
    assert finding.verdict is Verdict.HELD
    assert finding.compared == len(MOMENTS)


@pytest.mark.parametrize(
    ("restored", "tensor", "words"),
    [
        ({}, "a/m", "it has none, so none was loaded"),
        ({"a/m": MOMENTS["a/m"]}, "b/m", "b/m is missing now"),
        ({**MOMENTS, "a/m": values(0.0, 0.0)}, "a/m", "is zero: it was not restored"),
        ({**MOMENTS, "a/m": values(1.0, 2.0)}, "a/m", "was rounded to bfloat16"),
        ({**MOMENTS, "a/m": values(1.0, 2.5)}, "a/m", "a/m differs"),
        (
            {**MOMENTS, "a/m": values(0.5, 0.5)},
            "a/m",
            "a/m has its value from before the first step",
        ),
        (
            {"a/m": MOMENTS["b/m"], "b/m": MOMENTS["a/m"]},
            "a/m",
            "has the value of b/m: restored in a different order",
        ),
    ],
)
def test_what_was_lost_is_named(restored: dict[str, Any], tensor: str, words: str) -> None:
    """The tensor, and what became of it."""
    found = traces.broken(judged(stopped(restored, MOMENTS)))
    assert (found.step, found.rank, found.tensor) == (1, 0, tensor)
    assert words in found.message


def test_a_state_of_another_kind_is_no_other_order() -> None:
    """AMSGrad's `max_exp_avg_sq` is no `exp_avg_sq` of another tensor, though its name ends so."""
    squares, largest = values(1.0, 2.0), values(3.0, 5.0)
    held = {"a/exp_avg_sq": squares, "a/max_exp_avg_sq": largest}
    found = traces.broken(judged(stopped({**held, "a/exp_avg_sq": largest}, MOMENTS, held)))
    assert found.tensor == "a/exp_avg_sq"
    assert "another order" not in found.message


def test_a_state_that_the_script_changes_between_steps() -> None:
    """A difference that the next step doesn't have was made in the run without stops, too."""
    reset = {"a/m": values(0.5, 0.5), "b/m": values(0.5, 0.5)}
    assert judged(stopped(reset, MOVED)).verdict is not Verdict.FALSIFIED


# --- resumed data ---------------------------------------------------------------------------------
# The samples that a resumed run draws are told from those of the run without stops.


COMMAND = scenario(system="command", workload="own", world_size=1, num_steps=4)
EPOCHS = (0, 0, 0, 1)
DRAWN_STRAIGHT = ((0, 1), (2, 3), (4, 5), (6, 7))


def run(batches: Sequence[tuple[int, ...]], *, resumed: bool = False) -> Trace:
    """Return a run whose steps have the samples `batches`, and which may be resumed at step 1."""
    shards = [traces.shard(step, epoch=EPOCHS[step], ids=ids) for step, ids in enumerate(batches)]
    again = [Start(step=1, rank=0, weights={}, resumed=True)] if resumed else []
    return traces.hand_written(shards[0], *again, *shards[1:], subject=COMMAND)


AGAIN = ": samples 0 again, which this epoch had in step 0"
OTHERS = ": samples {}, which the run without stops doesn't draw in this step"


@pytest.mark.parametrize(
    ("ids", "epochs", "words"),
    [
        pytest.param((4, 3), "told", ": the rest of the epoch comes in another order", id="rest"),
        pytest.param((0, 3), "told", AGAIN, id="again"),
        pytest.param((6, 3), "told", OTHERS.format(6), id="of the next epoch"),
        pytest.param((4, 9), "told", OTHERS.format(9), id="of no epoch"),
        pytest.param((4, 3), "untold", OTHERS.format(4), id="rest of an unknown epoch"),
        pytest.param((0, 3), "untold", OTHERS.format(0), id="past of an unknown epoch"),
        pytest.param((3,), "told", ": without samples 2", id="left out"),
        pytest.param((3, 2), "told", "", id="in another order"),
        pytest.param((4, 5), "told", ": step 1 has the samples of step 2", id="goes on elsewhere"),
    ],
)
def test_other_samples_are_placed(ids: tuple[int, ...], epochs: str, words: str) -> None:
    """An order is blamed only for samples of the epoch's rest."""
    straight = was(run(DRAWN_STRAIGHT), epochs=epochs)
    tally = Tally("")
    resumes.compare_data(tally, straight, run((DRAWN_STRAIGHT[0], ids), resumed=True))
    assert tally.broken is not None
    message = tally.broken.message
    assert message.removeprefix("after the resume different samples are drawn") in (
        words,
        words or ", in another order, or by another rank",
    )


# --- summation ------------------------------------------------------------------------------------
# A resumed run may add the gradients of its workers in another order than the straight run.


WORKERS = 4


def added_up(gradients: Sequence[float], *, terms: float = 1.0, workers: int = WORKERS) -> Trace:
    """Return a run whose ranks each have the gradient `terms`, and apply those of `gradients`."""
    scenario = Scenario(
        system="command",
        workload="own",
        world_size=workers,
        seed=0,
        num_shards=4,
        num_samples=4,
        batch_size=4,
        num_steps=len(gradients),
    )
    events: list[Event] = []
    for step, value in enumerate(gradients):
        events += [_shard(step, rank, terms) for rank in range(workers)]
        events += [_update(step, rank, value) for rank in range(workers)]
    events.append(End(status="completed"))
    return Trace(scenario=scenario, environment={}, promises=(), events=tuple(events))


def _tensors(value: float) -> Tensors:
    return {"w": record_tensor(np.array([value], np.float32), values=True)}


def _shard(step: int, rank: int, term: float) -> Shard:
    return traces.shard(step, rank, shard=rank, ids=(rank,), loss_sum=None, gradient=_tensors(term))


def _update(step: int, rank: int, value: float) -> Update:
    return traces.update(step, rank, loss=None, weights=_tensors(value), gradient=_tensors(value))


def test_steps_from_the_first_rounding_on_are_left_out() -> None:
    """What comes before is still compared, and the reason says why the rest is not."""
    tally = Tally("F-TI-003")
    straight, resumed = (
        added_up([1.0, 1.0, 2.0]),
        added_up([1.0, float(np.float32(1.0) + 2**-23), 5.0]),
    )
    kept = resumes.summed_alike(tally, straight, resumed)
    assert [sorted({update.step for update in one.of(Update)}) for one in kept] == [[0], [0]]
    assert "their sum is rounded differently" in tally.finding(nothing="").reason


@pytest.mark.parametrize(
    ("resumed", "why"),
    [
        (added_up([1.0, 1.0]), "the same bits"),
        (added_up([1.0, 1.01]), "more than rounding"),
        (
            added_up([1.0, float(np.float32(1.0) + 2**-23)], terms=2.0),
            "other gradients of the ranks",
        ),
    ],
)
def test_any_other_difference_is_compared(resumed: Trace, why: str) -> None:
    """Nothing is left out of runs that are equal, or that differ by something else."""
    straight = added_up([1.0, 1.0])
    tally = Tally("F-TI-003")
    assert resumes.summed_alike(tally, straight, resumed) == (straight, resumed), why


def test_two_ranks_add_alike_in_any_order() -> None:
    """A sum of two has one rounding."""
    straight, resumed = (
        added_up([1.0], workers=2),
        added_up([float(np.float32(1.0) + 2**-23)], workers=2),
    )
    assert resumes.summed_alike(Tally("F-TI-003"), straight, resumed) == (straight, resumed)
