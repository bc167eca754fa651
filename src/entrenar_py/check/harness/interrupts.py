"""Defers Ctrl-C and requests to terminate to safe points.

An interrupt at an arbitrary place can be swallowed (by an import, by a callback of the garbage
collector) and leave modules half loaded. So the first one is only noted.
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
    """In the body, the first of the signals waits for `check()`; a second interrupts at once.

    Afterwards the old handlers are back, or with `for_good` the signals are ignored, because the
    process is about to exit. Does nothing outside the main thread, and for signals already ignored.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers if main}
    taken = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
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
    """Raise KeyboardInterrupt if a signal was noted. Call it wherever nothing is half done."""
    if _noted.is_set():
        _noted.clear()
        raise KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    if _noted.is_set():
        raise KeyboardInterrupt
    _noted.set()
