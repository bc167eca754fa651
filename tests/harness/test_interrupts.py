"""Ctrl-C: the first waits for a safe place, the second does not, and the handler goes again."""

from __future__ import annotations

import signal
import threading

import pytest

from entrenar_py.harness import interrupts


def press_ctrl_c() -> None:
    """A real SIGINT to this process."""
    signal.raise_signal(signal.SIGINT)


def test_the_first_waits_for_a_safe_place() -> None:
    """Nothing is raised where it arrives, once is raised at the next check, and then no more."""
    with interrupts.deferred():
        interrupts.check()
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.check()


def test_the_second_does_not_wait() -> None:
    """Someone who presses twice means it."""
    with interrupts.deferred():
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()


def test_the_handler_goes() -> None:
    """Afterwards Ctrl-C is Python's again, and what was noted is forgotten."""
    before = signal.getsignal(signal.SIGINT)
    with interrupts.deferred():
        press_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is before
    interrupts.check()


def test_ignored_stays_ignored() -> None:
    """Under nohup nobody asked for it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.deferred():
            press_ctrl_c()
            interrupts.check()
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread() -> None:
    """Where no handler can be installed, nothing is, and nothing fails."""
    seen = []

    def inside() -> None:
        with interrupts.deferred():
            interrupts.check()
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [before]
