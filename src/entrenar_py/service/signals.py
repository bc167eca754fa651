"""SIGINT, SIGTERM and SIGHUP: they stop a run in progress, and are ignored once it is over.

Before a run begins, while modules and weights are loaded, they interrupt: nothing is there that
would have to be saved. asyncio's own handlers would end with the loop, so that a signal just after
the run could kill the process before it reports its exit code.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio  # takes a while, and `entrenar --help` has no use for it

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_noted: list[signal.Signals] = []  # the signals that interrupted this process


def interrupt() -> None:
    """Let each signal raise KeyboardInterrupt, until `deliver` is called."""
    _noted.clear()
    if threading.current_thread() is threading.main_thread():
        for number in taken():
            signal.signal(number, _interrupt)


def noted() -> str | None:
    """Return the name of the signal that interrupted; None if none did.

    A library may have swallowed the interrupt, or made another exception of it.
    """
    return _noted[0].name if _noted else None


def deliver(stop: Callable[[signal.Signals], None]) -> None:
    """Make the running loop call `stop` with each signal that arrives, until `ignore` is called."""
    import asyncio

    loop = asyncio.get_running_loop()
    for number in taken():
        signal.signal(number, partial(_pass_on, loop, stop))
    for number in _noted:  # whose interrupt got lost
        loop.call_soon(stop, number)


def ignore() -> None:
    """Ignore the signals until this process ends. The run's result decides its exit code."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def taken() -> list[signal.Signals]:
    """Return the signals to handle: `nohup` has it that a hang-up is ignored."""
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [one for one in NUMBERS if one is not signal.SIGHUP or not is_kept]


def _interrupt(number: int, frame: FrameType | None) -> None:
    _noted.append(signal.Signals(number))
    raise KeyboardInterrupt


def _pass_on(
    loop: asyncio.AbstractEventLoop,
    stop: Callable[[signal.Signals], None],
    number: int,
    frame: FrameType | None,
) -> None:
    if not loop.is_closed():  # a closed loop is failing already, and reports why
        loop.call_soon_threadsafe(stop, signal.Signals(number))
