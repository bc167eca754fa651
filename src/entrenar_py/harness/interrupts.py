"""Ctrl-C, and being told to end, taken where nothing is half done.

An interrupt in the middle of anything can be swallowed (by an import, by a callback of the garbage
collector) and leave modules half loaded, so the first one is only noted.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_noted = threading.Event()


@contextmanager
def deferred(
    *, numbers: Sequence[signal.Signals] = (signal.SIGINT,), for_good: bool = False
) -> Iterator[None]:
    """While inside, the first of these signals waits for `check`; a second interrupts at once.

    Afterwards all is as before; `for_good` they are ignored: the process ends next, and its exit
    code says what was found. Does nothing outside the main thread, and with a signal that is
    ignored.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers if main}
    taken = {number: one for number, one in before.items() if one is not signal.SIG_IGN}
    if taken:
        _noted.clear()
    for number in taken:
        signal.signal(number, _note)
    try:
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, signal.SIG_IGN if for_good else handler)
        if taken:
            _noted.clear()


def check() -> None:
    """Raises KeyboardInterrupt if one was noted: called before each run and each judgement, and
    while a command runs."""
    if _noted.is_set():
        _noted.clear()
        raise KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    if _noted.is_set():
        raise KeyboardInterrupt
    _noted.set()
