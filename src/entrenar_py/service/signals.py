"""SIGINT and SIGTERM: they stop a run that goes on, and do nothing to one that is over.

Not asyncio's own handlers: these go with the loop, and a signal that came just after the run was
complete would kill the process before it could say so with its exit code.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def deliver(stop: Callable[[signal.Signals], None]) -> None:
    """Has the running loop call `stop` with the signal when one comes; until `ignore`."""
    loop = asyncio.get_running_loop()
    for number in NUMBERS:
        signal.signal(number, partial(_pass_on, loop, stop))


def ignore() -> None:
    """For as long as this process lives: how it ended stands, and its exit code says it."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _pass_on(
    loop: asyncio.AbstractEventLoop,
    stop: Callable[[signal.Signals], None],
    number: int,
    frame: FrameType | None,
) -> None:
    if not loop.is_closed():  # else it fails already, and says why
        loop.call_soon_threadsafe(stop, signal.Signals(number))
