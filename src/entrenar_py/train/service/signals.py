"""SIGINT, SIGTERM and SIGHUP: they stop a run in progress, and don't change its result afterwards.

Before a run begins, while modules and weights are loaded, signals raise KeyboardInterrupt, because
nothing has to be saved yet. Imports can swallow the exception. A process that continues is
therefore ended a little later, unless its run has begun, which then stops. asyncio's own handlers
would end with the loop, so a signal just after the run could kill the process before it reports its
exit code.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from entrenar_py.shared.untrusted import printing
from entrenar_py.train.service import exit_codes

if TYPE_CHECKING:
    import asyncio  # slow to import, and not needed by `entrenar --help`

LOST_S = 3.0  # after an interrupt; if the process still runs then, the interrupt was swallowed
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_noted: list[signal.Signals] = []  # the signals that interrupted this process so far
_watch: list[threading.Timer] = []


def interrupt() -> None:
    """Let each signal raise KeyboardInterrupt, until `deliver` or `settle` is called."""
    settle()
    _noted.clear()
    if threading.current_thread() is threading.main_thread():
        for number in taken():
            signal.signal(number, _interrupt)


def settle() -> None:
    """Cancel the timer of `end_soon`: the interrupt has taken effect, or is a request to stop."""
    while _watch:
        _watch.pop().cancel()


def noted() -> str | None:
    """Return the name of the signal that interrupted this process; None if none did.

    A library may have swallowed the interrupt, or raised a different exception instead.
    """
    return _noted[0].name if _noted else None


def deliver(stop: Callable[[signal.Signals], None]) -> None:
    """Make the running loop call `stop` with each signal that arrives, until `ignore` is called."""
    import asyncio

    settle()
    loop = asyncio.get_running_loop()
    for number in taken():
        signal.signal(number, partial(_pass_on, loop, stop))
    for number in _noted:  # their interrupts got lost
        loop.call_soon(stop, number)


def ignore() -> None:
    """Ignore the signals until this process ends. The run's result decides its exit code."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def end_with(code: int) -> None:
    """Let each signal end this process at once with `code`, the exit code of a run that is over.

    A worker's thread may still compute something that is no longer needed.
    """
    for number in taken():
        signal.signal(number, lambda *_: _exit(code))


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, RuntimeError, ValueError):  # RuntimeError: it is being written to
            stream.flush()
    os._exit(code)


def taken() -> list[signal.Signals]:
    """Return the signals to handle. Under `nohup`, SIGHUP stays ignored."""
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [one for one in NUMBERS if one is not signal.SIGHUP or not is_kept]


class Stoppable(Protocol):
    """A server that can end its run."""

    def stop(self, reason: str, *, at_once: bool) -> None:
        """End the run for `reason`, after the current step or at once."""
        ...


class Stopper:
    """Ends a run on signals: on the first after the current step, on the second at once.

    If the current step takes longer than `grace_s` seconds, the run ends, too. `note` reports each
    signal.
    """

    def __init__(
        self, server: Stoppable, note: Callable[[str, str], None], grace_s: float | None = None
    ) -> None:
        self._server, self._note, self._grace_s = server, note, grace_s
        self._again = False

    def stop(self, number: signal.Signals) -> None:
        """Handle the signal `number`."""
        grace = "" if self._grace_s is None else f", {self._grace_s:g} s at most"
        when = "now" if self._again else f"after the current step{grace}"
        self._note("stopping", f"{number.name}: stops {when}")
        reason = f"the coordinator was stopped by {number.name}"
        self._server.stop(reason, at_once=self._again)
        if self._grace_s is not None and not self._again:
            import asyncio

            end = partial(self._server.stop, reason, at_once=True)
            asyncio.get_running_loop().call_later(self._grace_s, end)
        self._again = True


def _interrupt(number: int, frame: FrameType | None) -> None:
    end_soon(signal.Signals(number))
    raise KeyboardInterrupt


def end_soon(number: signal.Signals) -> None:
    """Note a signal; end this process in some seconds, unless it has ended or settled by then."""
    _noted.append(number)
    if not _watch:
        _watch.append(threading.Timer(LOST_S, lambda: end()))
        _watch[0].daemon = True
        _watch[0].start()


def end() -> None:
    """Print the interrupt, and end this process at once, in any thread."""
    printing.warn(say_interrupted())
    os._exit(exit_codes.STOPPED)


def say_interrupted() -> str:
    """Return the line that reports an interrupt."""
    number = noted()
    by = f" by {number}" if number else ""
    return f"entrenar: interrupted{by} before anything had begun"


def _pass_on(
    loop: asyncio.AbstractEventLoop,
    stop: Callable[[signal.Signals], None],
    number: int,
    frame: FrameType | None,
) -> None:
    if not loop.is_closed():  # a closed loop is failing already, and reports why
        loop.call_soon_threadsafe(stop, signal.Signals(number))
