"""The probe `averaging` plays every schedule, and records what was really heard."""

from __future__ import annotations

import pytest

from entrenar_py import systems
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Heard
from entrenar_py.systems.probes.averaging import DIFFERENT, SCHEDULES
from entrenar_py.train.upstream import frames, server

SCENARIO = Scenario(
    system="averaging",
    workload="linear",
    world_size=3,
    num_shards=3,
    seed=1,
    num_samples=23,
    batch_size=10,
    num_steps=3,
)


def test_every_schedule_is_played() -> None:
    """Each has every part of every step, and halts where a term is not finite."""
    heard = systems.run(SCENARIO).of(Heard)
    assert {one.case for one in heard} == set(SCHEDULES)
    for case, schedule in SCHEDULES.items():
        mine = [one for one in heard if one.case == case]
        parts = {one.part for one in mine}
        assert len(parts) == (3 if schedule.in_blocks else 1)
        if schedule.poisoned is None:
            assert len(mine) == 3 * len(parts)
            assert all(one.digest and not one.poisoned for one in mine)
        else:
            assert [one.step for one in mine if one.poisoned] == [schedule.poisoned]
            assert mine[-1].digest is None


def test_repetitions_are_tried_where_shards_are_told_apart() -> None:
    """With more shards than workers nothing says to which shard a repetition belongs."""
    heard = systems.run(SCENARIO.with_(num_shards=5)).of(Heard)
    left_out = set(SCHEDULES) - {one.case for one in heard}
    assert left_out == {case for case, schedule in SCHEDULES.items() if schedule.repeats}


def test_the_same_seed_the_same_events() -> None:
    """Another seed has other terms."""
    first, again = (systems.run(SCENARIO).of(Heard) for _ in range(2))
    assert first == again
    assert first != systems.run(SCENARIO.with_(seed=2)).of(Heard)


def test_workers_that_hear_different_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recorded, and so are averages that deviate."""
    right = frames.encode
    sent: list[int] = []

    def once_wrong(message, gradients=b"", **more):  # type: ignore[no-untyped-def]
        sent.append(len(gradients))
        wrong = len(gradients) and len(sent) % 2
        return right(message, bytes(memoryview(gradients).nbytes) if wrong else gradients, **more)

    monkeypatch.setattr(server, "encode", once_wrong)
    heard = systems.run(SCENARIO).of(Heard)
    assert DIFFERENT in {one.digest for one in heard}
    assert max(one.roundings for one in heard if one.roundings is not None) > 1
