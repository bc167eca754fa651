"""SIGINT and SIGTERM: they stop a run in progress, and are ignored once it is over.

asyncio's own handlers would end with the loop, so that a signal just after the run could kill the
process before it reports its exit code.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def deliver(stop: Callable[[signal.Signals], None]) -> None:
    """Make the running loop call `stop` with each signal that arrives, until `ignore` is called."""
    loop = asyncio.get_running_loop()
    for number in NUMBERS:
        signal.signal(number, partial(_pass_on, loop, stop))


def ignore() -> None:
    """Ignore the signals until this process ends. The run's result decides its exit code."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _pass_on(
    loop: asyncio.AbstractEventLoop,
    stop: Callable[[signal.Signals], None],
    number: int,
    frame: FrameType | None,
) -> None:
    if not loop.is_closed():  # a closed loop is failing already, and reports why
        loop.call_soon_threadsafe(stop, signal.Signals(number))
