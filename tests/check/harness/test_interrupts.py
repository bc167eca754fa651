"""The first Ctrl-C waits for a safe place, the second does not, and the old handler returns."""

from __future__ import annotations

import signal
import threading

import pytest

from entrenar_py.shared import process


def press_ctrl_c() -> None:
    """Send this process a real SIGINT."""
    signal.raise_signal(signal.SIGINT)


def test_the_first_waits_for_a_safe_place() -> None:
    """The signal raises nothing on arrival, and KeyboardInterrupt once, at the next check."""
    with process.deferred_interrupts():
        process.check_interrupts()
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            process.check_interrupts()
        process.check_interrupts()


def test_the_second_does_not_wait() -> None:
    """A second Ctrl-C raises at once."""
    with process.deferred_interrupts():
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()


def test_the_handler_goes() -> None:
    """Afterwards Python's own handler is back, and a noted signal is forgotten."""
    before = signal.getsignal(signal.SIGINT)
    with process.deferred_interrupts():
        press_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is before
    process.check_interrupts()


def test_ignored_stays_ignored() -> None:
    """A signal that is ignored, as under nohup, stays ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with process.deferred_interrupts():
            press_ctrl_c()
            process.check_interrupts()
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread() -> None:
    """Outside the main thread no handler is installed, and nothing fails."""
    seen = []

    def inside() -> None:
        with process.deferred_interrupts():
            process.check_interrupts()
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [before]
