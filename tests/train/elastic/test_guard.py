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
    """Exchanges that are over when `over` is set."""

    def __init__(self) -> None:
        self.cuts, self.over = 0, threading.Event()

    def wait(self) -> None:
        self.over.wait()

    def cut(self) -> None:
        self.cuts += 1
        self.over.set()


class FakeEnding:
    """The end of a generation. `store_fails`: nobody answers."""

    def __init__(self, group: FakeGroup) -> None:
        self.interrupted, self.reasons, self.store_fails = False, list[str](), False
        self._group, self.voided = group, False

    def interrupt(self, reason: str) -> None:
        self.interrupted = True
        self.reasons.append(reason)
        self._answer()

    def void(self) -> None:
        assert not self._group.cuts, "cut before anybody could know"
        self.voided = True
        self._answer()

    def _answer(self) -> None:
        if self.store_fails:
            raise RuntimeError("the store has ended")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less."""
    for name in ("_POLL_S", "_GRACE_S", "_ANSWER_S"):
        monkeypatch.setattr(guard, name, 0.02)


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup()


@pytest.fixture
def ending(group: FakeGroup) -> FakeEnding:
    return FakeEnding(group)


@pytest.fixture
def watcher(group: Any, ending: Any) -> Iterator[Guard]:
    """Watch over the group, and close it after the test."""
    made = Guard(group, ending, lambda: DEADLINE_S)
    yield made
    made.close()


def wait_for_cut(group: FakeGroup, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not group.cuts and time.monotonic() < end:
        time.sleep(0.005)


@pytest.mark.usefixtures("watcher")
@pytest.mark.parametrize("store_fails", [False, True])
def test_a_generation_has_ended_and_the_main_thread_does_not_notice(
    group: FakeGroup, ending: FakeEnding, store_fails: bool
) -> None:
    """All ranks are told before, so that none commits what the cut leaves."""
    ending.store_fails = store_fails
    ending.interrupted = True
    wait_for_cut(group)
    assert (group.cuts, ending.voided, ending.reasons) == (1, True, [])


@pytest.mark.usefixtures("watcher")
@pytest.mark.parametrize("store_fails", [False, True])
def test_an_exchange_takes_long_and_the_main_thread_does_nothing(
    group: FakeGroup, ending: FakeEnding, store_fails: bool
) -> None:
    ending.store_fails = store_fails
    wait_for_cut(group)
    assert (group.cuts, ending.voided) == (1, True)
    (reason,) = ending.reasons
    assert reason.startswith("an exchange between ranks took longer than 0.15 s")


def test_the_deadline_may_change(group: Any, ending: Any) -> None:
    """It is asked for again each time: steps that save or score may take longer."""
    deadlines = [60.0]
    watcher = Guard(group, ending, lambda: deadlines[-1])
    time.sleep(2 * DEADLINE_S)
    assert not ending.reasons
    deadlines.append(DEADLINE_S)
    wait_for_cut(group)
    watcher.close()
    assert group.cuts == 1
    assert ending.reasons[0].startswith("an exchange between ranks took longer than 0.15 s")


def test_nothing_is_cut_while_the_main_thread_goes_on(ending: FakeEnding, watcher: Guard) -> None:
    """Its own deadline holds."""
    for _ in range(20):
        watcher.see()
        time.sleep(DEADLINE_S / 10)
    assert not ending.reasons


@pytest.mark.usefixtures("watcher")
def test_a_script_may_compute_for_long_between_exchanges(
    group: FakeGroup, ending: FakeEnding
) -> None:
    group.over.set()
    wait_for_cut(group, 4 * DEADLINE_S)
    assert (group.cuts, ending.reasons) == (0, [])


def test_a_process_that_was_stopped_goes_on(
    group: FakeGroup, ending: FakeEnding, watcher: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard looks again after it has asked: the main thread may have made a step meanwhile."""

    def wait() -> None:
        watcher.see()
        time.sleep(0.1)

    monkeypatch.setattr(group, "wait", wait)
    time.sleep(1.5 * DEADLINE_S)
    assert not ending.reasons


def test_a_main_thread_that_notices_closes_it(
    group: FakeGroup, ending: FakeEnding, watcher: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_GRACE_S", 10)
    ending.interrupted = True
    time.sleep(0.1)
    watcher.close()
    time.sleep(0.1)
    assert group.cuts == 0
