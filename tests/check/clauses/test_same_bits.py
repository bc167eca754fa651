"""F-TI-006 and F-TI-007 on traces broken by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.evidence.needs import COUNTS
from entrenar_py.check.harness import companions
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import Attempt, Shard, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses import traces
from tests.check.clauses.traces import altered, broken, scenario, without

SUBJECT = scenario()
BAD = traces.values(1.0)


def pair() -> tuple[Trace, Trace]:
    """Return two runs of SUBJECT."""
    first, second = traces.family("determinism", SUBJECT)
    return first, second


@pytest.mark.parametrize("part", ["gradient", "weights", "buffers"])
def test_other_bits_with_more_workers(part: str) -> None:
    """A tensor that differs on one rank of the larger run is named."""
    many = traces.run(SUBJECT)
    tensors = getattr(many.of(Update)[0], part)
    name = next(iter(tensors))
    at = {"step": 3, "rank": 2}
    many = altered(many, Update, at, **{part: traces.swapped(tensors, name, BAD)})
    one = traces.run(SUBJECT.with_(world_size=1))
    found = broken(traces.judge("worker_count", [many, one]))
    assert (found.step, found.rank) == (3, 2)
    assert found.message.startswith(f"3 workers give other bits than 1 ({part})")


def test_another_loss_with_more_workers() -> None:
    """A difference in the last bit of a loss is found."""
    many, one = traces.run(SUBJECT), traces.run(SUBJECT.with_(world_size=1))
    loss = many.of(Update)[0].loss or 0.0
    at = {"step": 0, "rank": 1}
    many = altered(many, Update, at, loss=math.nextafter(loss, 9.0))
    found = broken(traces.judge("worker_count", [one, many]))
    assert (found.step, found.rank, found.expected) == (0, 1, str(loss))


def test_steps_of_one_run_only() -> None:
    """A run that makes fewer steps is falsified, with the first step it lacks."""
    many, one = traces.run(SUBJECT), traces.run(SUBJECT.with_(world_size=1))
    found = broken(traces.judge("worker_count", [one, without(many, Update, step=4)]))
    assert found.step == 4


def test_one_world_size_compares_nothing() -> None:
    """Runs with the same number of workers are inconclusive."""
    finding = traces.judge("worker_count", list(pair()))
    assert finding.verdict is Verdict.INCONCLUSIVE


def test_a_planted_value_is_another_training() -> None:
    """A run halted by a NaN is not compared with runs without one."""
    fault = Fault(kind="non_finite_gradient", step=1, rank=1, value="nan")
    family = traces.family("worker_count", scenario(faults=(fault,)))
    assert traces.judge("worker_count", family).verdict is Verdict.HELD


def test_world_sizes_fit_shards_and_samples() -> None:
    """No scenario of the family has more workers than shards or samples."""
    few = scenario(world_size=2, num_shards=4, num_samples=3, batch_size=3)
    assert [s.world_size for s in companions.of((COUNTS,), few)] == [2, 1, 3]


def test_two_runs_differ_in_an_update() -> None:
    """A repetition with another gradient is found."""
    first, second = pair()
    gradient = traces.swapped(traces.one(second, Update, step=2).gradient, "output.bias", BAD)
    changed = altered(second, Update, {"step": 2, "rank": 1}, gradient=gradient)
    found = broken(traces.judge("determinism", [first, changed]))
    assert (found.step, found.rank, found.tensor) == (2, 1, "output.bias")


def test_ranks_that_differ_alike_in_both() -> None:
    """A rank is compared with itself: ranks that differ from each other may repeat exactly."""
    weights = traces.swapped(traces.one(pair()[1], Update, step=2).weights, "output.bias", BAD)
    place = {"step": 2, "rank": 1}
    first, second = (altered(one, Update, place, weights=weights) for one in pair())
    assert traces.judge("determinism", [first, second]).verdict is Verdict.HELD


@pytest.mark.parametrize(
    "change", [{"ids": (0,)}, {"loss_sum": 0.5}, {"draws": "other"}, {"gradient": {"w": BAD}}]
)
def test_two_runs_differ_in_a_shard(change: dict[str, object]) -> None:
    """Samples, loss, random draws and local gradient of every shard must repeat."""
    first, second = pair()
    changed = altered(second, Shard, {"step": 4, "shard": 3}, **change)
    found = broken(traces.judge("determinism", [first, changed]))
    assert (found.step, found.shard) == (4, 3)


def test_the_order_of_recording_is_free() -> None:
    """The events of several processes may be recorded in another order in each run."""
    first, second = pair()
    shuffled = replace(second, events=(*reversed(second.events[:-1]), second.events[-1]))
    assert traces.judge("determinism", [first, shuffled]).verdict is Verdict.HELD


def test_a_shard_may_move_to_another_worker() -> None:
    """A shard may be computed by another worker in the second run."""
    first, second = pair()
    moved = altered(second, Shard, {"step": 1, "shard": 4}, rank=0)
    assert traces.judge("determinism", [first, moved]).verdict is Verdict.HELD


def test_a_nan_repeats() -> None:
    """Two runs that halt at the same NaN are equal."""
    fault = Fault(kind="non_finite_loss", step=1, rank=1, value="nan")
    finding = traces.judge("determinism", traces.family("determinism", scenario(faults=(fault,))))
    assert finding.verdict is Verdict.HELD


def test_one_run_repeats_nothing() -> None:
    """A single run is inconclusive."""
    finding = traces.judge("determinism", [traces.run(SUBJECT)])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "run twice" in finding.reason


def test_without_the_promise_nothing_is_said() -> None:
    """A trainer that promises rounding only is not judged here, but by parity."""
    runs = [traces.run(scenario(system="textbook", world_size=n)) for n in (1, 3)]
    finding = traces.judge("worker_count", runs)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "promises rounding, not bits" in finding.reason


def test_the_devices_that_served_are_named() -> None:
    """Reasons name the devices that computed, since a service's scenario always says cpu."""
    run = traces.run(scenario(world_size=2))
    served = Attempt(backend="wgpu", served=True, device="a GPU")
    ledger = replace(run, promises=(), events=(served, *run.events))
    finding = traces.judge("worker_count", [ledger])
    assert finding.reason.startswith("reference on wgpu promises rounding")


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("part", ["gradient", "weights", "buffers"])
def test_what_one_run_did_not_record(part: str, silent: int) -> None:
    """A part that only one run recorded is missing, not different."""
    runs = list(pair())
    runs[silent] = altered(runs[silent], Update, {}, **{part: {}})
    finding = traces.judge("determinism", runs)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert (
        finding.reason
        == f"one run only recorded the {part} of step 0: record Update.{part} in both"
    )


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("part", ["optimizer", "buffers"])
def test_state_that_is_gone(part: str, silent: int) -> None:
    """State recorded after some steps of a run and not after others was lost."""
    subject = scenario(optimizer="momentum")
    runs = list(traces.family("determinism", subject))
    runs[silent] = altered(runs[silent], Update, {"step": 4}, **{part: {}})
    found = broken(traces.judge("determinism", runs))
    assert found.step == 4
    assert f"({part}): only" in found.message


def test_shards_that_one_run_did_not_record() -> None:
    """Samples of a step, or gradients of all shards, that only one run recorded are missing."""
    first, second = pair()
    finding = traces.judge("determinism", [first, without(second, Shard, step=3)])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "only one run has micro-batches of step 3: record a Shard of each step in both" in (
        finding.reason
    )
    many, one = traces.run(SUBJECT), traces.run(SUBJECT.with_(world_size=1))
    finding = traces.judge("worker_count", [many, altered(one, Shard, {}, gradient={})])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "record Shard.gradient in both" in finding.reason


def test_two_runs_that_recorded_no_weights() -> None:
    """Equal losses without weights are inconclusive, and so are runs without steps."""
    bare = [altered(one, Update, {}, weights={}) for one in pair()]
    for found, missing in (
        (bare, "neither run recorded the weights of step 0: record Update.weights in both"),
        ([without(one, Update) for one in pair()], "record an Update for every rank and step"),
    ):
        finding = traces.judge("determinism", found)
        assert finding.verdict is Verdict.INCONCLUSIVE
        assert missing in finding.reason


def test_the_run_that_is_missing_is_named() -> None:
    """The reason says which field a second run needs, and how the nearest trace differs."""
    one = traces.run(SUBJECT)
    other = replace(one, scenario=SUBJECT.with_(repeat=1, num_steps=9))
    finding = traces.judge("determinism", [one, other])
    assert "a second run of it, its scenario with repeat=1 and all else equal" in finding.reason
    assert finding.reason.endswith("differs in num_steps (9, needed 6)")
    fewer = replace(one, scenario=SUBJECT.with_(world_size=1, seed=9))
    finding = traces.judge("worker_count", [one, fewer])
    assert "record another with world_size=1" in finding.reason
    assert finding.reason.endswith("differs in seed (9, needed 4)")


def test_rounding_on_a_gpu_is_named_and_only_advice() -> None:
    """Kernels that add in any order are named; a larger difference, or one on CPUs, is not that."""
    gpu = {"accelerator": "a GPU"}
    on_gpu = [replace(one, environment={**one.environment, **gpu}) for one in pair()]
    messages = {}
    for name, (first, second), step, changes in [
        ("rounding", on_gpu, 2, math.nextafter),
        ("larger", on_gpu, 2, lambda value, _: value * 1.5),
        ("larger, later", on_gpu, 4, lambda value, _: value * 1.5),
        ("on CPUs", pair(), 2, math.nextafter),
    ]:
        loss = traces.one(second, Update, step=step).loss or 0.0
        changed = altered(second, Update, {"step": step}, loss=changes(loss, 9.0))
        found = broken(traces.judge("determinism", [first, changed]))
        messages[name] = found.message
        assert bool(CHECKS["determinism"].advice(found)) == (name == "rounding")
    assert "kernels may add in any order" in messages.pop("rounding")
    assert set(messages.values()) == {"two runs of one scenario differ (loss)"}


@pytest.mark.parametrize("kind", ["a step less", "other draws", "a buffer"])
def test_what_no_kernel_does_is_no_advice_on_a_gpu(kind: str) -> None:
    """Steps, random numbers and buffers of two runs don't differ by an order of additions."""
    first, second = (replace(one, environment={"accelerator": "a GPU"}) for one in pair())
    if kind == "a step less":
        second = without(second, Update, step=2)
    elif kind == "other draws":
        second = altered(second, Shard, {"step": 2, "shard": 3}, draws="other")
    else:
        buffers = traces.one(second, Update, step=2).buffers
        changed = traces.swapped(buffers, next(iter(buffers)), BAD)
        second = altered(second, Update, {"step": 2}, buffers=changed)
    found = broken(traces.judge("determinism", [first, second]))
    assert not CHECKS["determinism"].advice(found)
