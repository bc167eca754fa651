"""A main thread that waits for a GPU can't end an exchange: the guard does.

Not exercised: NCCL and a driver that blocks. `test_runs_on_gpus_end_with_the_bits_of_one_process`
has both, if there are two GPUs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from entrenar_py.train.elastic import guard
from entrenar_py.train.elastic.guard import Guard

DEADLINE_S = 0.15


class FakeGroup:
    """Exchanges that are over when `idle` is set, as a driver says that answers when it is free."""

    def __init__(self, *, answers: bool = True) -> None:
        self.cuts, self.over, self._free = 0, False, threading.Event()
        if answers:
            self._free.set()

    @property
    def is_idle(self) -> bool:
        self._free.wait()
        return self.over

    def cut(self) -> None:
        self.cuts += 1
        self._free.set()


class FakeMembers:
    """A generation."""

    def __init__(self) -> None:
        self.interrupted, self.reasons = False, list[str]()

    def interrupt(self, reason: str) -> None:
        self.interrupted = True
        self.reasons.append(reason)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less."""
    for name in ("_POLL_S", "_GRACE_S", "_ANSWER_S"):
        monkeypatch.setattr(guard, name, 0.02)


@pytest.fixture
def members() -> FakeMembers:
    return FakeMembers()


@pytest.fixture
def watching(members: FakeMembers) -> Iterator[Any]:
    """Return a function that makes a guard of a group, closed after the test."""
    made: list[Guard] = []

    def watch(group: Any) -> Guard:
        made.append(Guard(group, members, DEADLINE_S))  # type: ignore[arg-type]
        return made[-1]

    yield watch
    for one in made:
        one.close()


def wait_for(group: FakeGroup, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not group.cuts and time.monotonic() < end:
        time.sleep(0.005)


def test_a_generation_has_ended_and_the_main_thread_does_not_notice(
    members: FakeMembers, watching: Any
) -> None:
    group = FakeGroup()
    watching(group)
    members.interrupted = True
    wait_for(group)
    assert (group.cuts, members.reasons) == (1, [])


@pytest.mark.parametrize("answers", [True, False])
def test_an_exchange_takes_long_and_the_main_thread_does_nothing(
    members: FakeMembers, watching: Any, answers: bool
) -> None:
    """Also if the driver doesn't answer whether it is over."""
    group = FakeGroup(answers=answers)
    watching(group)
    wait_for(group)
    assert group.cuts == 1
    (reason,) = members.reasons
    assert reason.startswith("an exchange between ranks took longer than 0.15 s")


def test_nothing_is_cut_while_the_main_thread_goes_on(members: FakeMembers, watching: Any) -> None:
    """Its own deadline holds."""
    group = FakeGroup()
    watcher = watching(group)
    for _ in range(20):
        watcher.see()
        time.sleep(DEADLINE_S / 10)
    assert not members.reasons


def test_a_script_may_compute_for_long_between_exchanges(
    members: FakeMembers, watching: Any
) -> None:
    group = FakeGroup()
    group.over = True
    watching(group)
    wait_for(group, 4 * DEADLINE_S)
    assert (group.cuts, members.reasons) == (0, [])


def test_a_main_thread_that_notices_closes_it(
    members: FakeMembers, watching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_GRACE_S", 10)
    group = FakeGroup()
    watcher = watching(group)
    members.interrupted = True
    time.sleep(0.1)
    watcher.close()
    time.sleep(0.1)
    assert group.cuts == 0
