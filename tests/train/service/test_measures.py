"""What is measured of a run: gradients' norms and their spikes, and the times of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py import entrenar as cli
from entrenar_py.shared import trace
from entrenar_py.shared.errors import CheckpointError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.service import exit_codes, measures
from entrenar_py.train.service.measures import (
    FACTOR,
    STEPS_AVERAGED,
    STEPS_KEPT,
    STEPS_LEAST,
    GradientNorms,
    Stopwatch,
    Times,
)
from entrenar_py.train.service.run_events import Happening, Last, Noted
from entrenar_py.train.wire.effects import Finish, Stop
from tests.train.service.cluster import write_configuration
from tests.train.service.members import Noticed, host_of, meet, plan_of, record, train

CALM = [0.5, 1.0, 1.5] * STEPS_LEAST


def test_a_norm_counts_against_the_median_of_those_before() -> None:
    norms = GradientNorms(CALM)
    assert norms.exceeded(FACTOR * 1.0) is None
    assert norms.exceeded(FACTOR * 1.0 + 0.1) == 1.0


def test_the_first_norms_are_not_judged() -> None:
    """They vary much: STEPS_LEAST have to be known."""
    assert GradientNorms(CALM[: STEPS_LEAST - 1]).exceeded(1e9) is None
    assert GradientNorms(CALM[:STEPS_LEAST]).exceeded(1e9) is not None


def test_a_median_of_zero_says_nothing() -> None:
    assert GradientNorms([0.0] * STEPS_LEAST).exceeded(1.0) is None


def test_the_median_runs_along() -> None:
    """What was long ago does not count: norms that fall for good make a later one large."""
    norms = GradientNorms([100.0] * STEPS_KEPT)
    assert norms.exceeded(50.0) is None
    for _ in range(STEPS_KEPT // 2 + 1):
        norms.add(1.0)
    assert norms.exceeded(50.0) == 1.0


@given(st.lists(st.floats(min_value=0, max_value=1e30), max_size=STEPS_KEPT))
def test_a_checkpoint_keeps_them(values: list[float]) -> None:
    noted = {measures.NORMS_KEY: GradientNorms(values).to_record()}
    assert measures.of_checkpoint(noted, Path("c")).to_record() == values


@pytest.mark.parametrize("noted", ["x", [1, 2], [float("nan")], [-1.0], [1.0] * (STEPS_KEPT + 1)])
def test_a_checkpoint_with_something_else_is_refused(noted: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{measures.NORMS_KEY} is not a list of up to"):
        measures.of_checkpoint({measures.NORMS_KEY: noted}, Path("c"))


# --- in a run -------------------------------------------------------------------------------------

SPIKE_AT = STEPS_LEAST + 3


def spiking(**changes: Any) -> Scenario:
    """Return a run whose gradient is huge in step SPIKE_AT."""
    fault = Fault(kind="huge_gradient", step=SPIKE_AT, shard=0, value="1e4")
    usual: dict[str, Any] = {"num_steps": SPIKE_AT + 4, "clip_norm": 1.0}
    return Scenario.of(plan_of(**{**usual, **changes})).with_(faults=(fault,))


def test_a_spike_is_told_and_recorded(tmp_path: Path) -> None:
    """The step is made, with its gradient clipped, and said to be."""
    heard: list[Happening] = []
    host = host_of(spiking(), heard=heard)
    record(host, tmp_path / "l")
    train(meet(host), range(SPIKE_AT + 4))
    (note,) = [one for one in heard if isinstance(one, Noted) and one.what == "spike"]
    assert note.text.startswith(f"step {SPIKE_AT}: gradient norm ")
    assert note.text.endswith(f"the median of the last {SPIKE_AT} steps; clipped to 1")
    host.finish(Finish("completed"))
    (spike,) = trace.load(tmp_path / "l").of(trace.Spike)
    assert (spike.step, spike.num_steps) == (SPIKE_AT, SPIKE_AT)
    assert spike.grad_norm > FACTOR * spike.median


@pytest.mark.parametrize("workload", ["linear", "mlp", "decoder"])
def test_ordinary_runs_have_none(workload: str) -> None:
    """Neither a warm-up, nor a rate that falls to 0, is taken for one."""
    heard: list[Happening] = []
    changes: dict[str, Any] = {"optimizer": "adamw", "warmup_steps": 5, "schedule": "cosine"}
    host = host_of(plan_of(workload=workload, num_steps=40, **changes), heard=heard)
    train(meet(host), range(40))
    assert [one for one in heard if isinstance(one, Noted) and one.what == "spike"] == []


def test_the_server_objects_once_all_blocks_are_reduced() -> None:
    """The norm is that of the whole gradient, however many blocks it travels in."""
    norms: list[float] = []

    def objection(norm: float) -> str:
        norms.append(norm)
        return "too large"

    host = host_of(plan_of(workload="mlp", options={"block_bytes": 4096}))
    server: Server = host.server
    assert server.reduction.blocks.count > 1
    server._objection = objection
    hands = meet(host)
    with pytest.raises(AssertionError, match="too large"):
        train(hands, [0])
    assert norms == [server.average_held().clipped.norm]


def test_a_halted_run_goes_on_from_before_the_spike(tmp_path: Path) -> None:
    """The checkpoint has the norms too: with the option the run halts again, without it goes on."""
    scenario, path = spiking(), tmp_path / "c"
    halted = host_of(scenario, checkpoint=path, halt_on_spike=True)
    record(halted, tmp_path / "l")
    with pytest.raises(AssertionError, match="training halted before any update"):
        train(meet(halted), range(SPIKE_AT + 1))
    Noticed(halted).stop(Stop(SPIKE_AT, None, "because"))
    halted.finish(Finish("halted", "because"))
    events = trace.load(tmp_path / "l")
    assert [one.step for one in events.of(trace.Spike)] == [SPIKE_AT]
    assert [one.step for one in events.of(trace.Halt)] == [SPIKE_AT]

    again = host_of(scenario, checkpoint=path, halt_on_spike=True)
    assert again.resume() == SPIKE_AT
    with pytest.raises(AssertionError, match="training halted before any update"):
        train(meet(again, step=SPIKE_AT), [SPIKE_AT])

    resumed, straight = host_of(scenario, checkpoint=path), host_of(scenario)
    assert resumed.resume() == SPIKE_AT
    train(meet(resumed, step=SPIKE_AT), range(SPIKE_AT, scenario.num_steps))
    train(meet(straight), range(scenario.num_steps))
    ours, theirs = resumed.server, straight.server
    assert ours.replicas.state(ours.replica) == theirs.replicas.state(theirs.replica)


def test_a_mesh_can_not_halt_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its workers average: an option that would do nothing is refused."""
    (tmp_path / "secret").write_text("sixteen bytes at least", encoding="utf-8")
    training = {"workload": "linear", "world_size": 2, "seed": 0}
    path = tmp_path / "run.yaml"
    write_configuration(path, training, topology="mesh")
    assert cli.main(["coordinator", str(path), "--halt-on-spike"]) == exit_codes.INVALID
    assert "use topology: star" in capsys.readouterr().err


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def deliver(watch: Stopwatch, clock: Clock, *when: float) -> None:
    """Let worker 0 deliver after the first of these seconds, worker 1 after the second, ..."""
    began = clock.now
    for rank, seconds in sorted(enumerate(when), key=lambda pair: pair[1]):
        clock.now = began + seconds
        watch.delivered(rank)


def test_a_step_is_timed() -> None:
    """A step has its whole time, the exchange's, and the reduction's."""
    clock = Clock()
    watch = Stopwatch(clock)
    watch.begin()
    clock.now += 0.5
    watch.computed(0)
    clock.now += 0.25
    watch.exchanged()
    clock.now += 0.25
    watch.exchanged()
    unknown: dict[str, None] = {"steps_per_s": None, "tokens_per_s": None}
    expected = Times(step_ms=1000.0, exchange_ms=250.0, reduce_ms=250.0, **unknown)
    assert watch.made(reduce_s=0.25) == expected
    watch.begin()
    expected = Times(step_ms=0.0, exchange_ms=None, reduce_ms=None, **unknown)
    assert watch.made(reduce_s=0.0) == expected


def test_the_pace_is_over_the_last_steps() -> None:
    """The pace follows a lasting change, but does not jump with every step."""
    clock = Clock()
    watch = Stopwatch(clock)
    for seconds in [1.0] * 5 + [0.5] * STEPS_AVERAGED:
        clock.now += seconds
        rate = watch.made(reduce_s=0.0).steps_per_s
    assert rate == pytest.approx(2.0)


def test_tokens_are_counted_over_the_same_steps() -> None:
    """The tokens of the first step are not among them: nobody timed it."""
    clock = Clock()
    watch = Stopwatch(clock)
    for tokens in (1000, 30, 50):
        times = watch.made(reduce_s=0.0, num_tokens=tokens)
        clock.now += 2.0
    assert times.tokens_per_s == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ((1.0, 2.0, 5.0), Last(rank=2, behind_ms=3000.0)),
        ((4.0, 1.0, 2.0), Last(rank=0, behind_ms=2000.0)),
        ((1.0, 3.0), Last(rank=1, behind_ms=1000.0)),
        ((1.0,), None),
        ((), None),
    ],
)
def test_who_was_last(when: tuple[float, ...], expected: Last | None) -> None:
    """The last worker has its delay after the median of all. A single worker is not last."""
    clock = Clock()
    watch = Stopwatch(clock)
    watch.begin()
    deliver(watch, clock, *when)
    assert watch.last() == expected


def test_a_worker_that_takes_over_shards_delivers_later() -> None:
    """A worker's last delivery counts, and a new step starts from zero."""
    clock = Clock()
    watch = Stopwatch(clock)
    watch.begin()
    deliver(watch, clock, 1.0, 2.0)
    clock.now += 3.0
    watch.delivered(0)
    assert watch.last() == Last(rank=0, behind_ms=1500.0)
    watch.begin()
    assert watch.last() is None


def test_how_long_each_rank_waited() -> None:
    """A rank waits from its last shard, or from the step's start, until all are computed."""
    clock = Clock()
    watch = Stopwatch(clock)
    watch.begin()
    assert watch.waits_ms([0, 1]) == {}
    for rank, seconds in ((0, 1.0), (1, 2.0), (0, 0.5)):
        clock.now += seconds
        watch.computed(rank)
    clock.now += 9.0
    assert watch.waits_ms([0, 1, 2]) == {0: 0.0, 1: 500.0, 2: 3500.0}
    watch.begin()
    assert watch.waits_ms([0]) == {}
