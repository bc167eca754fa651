"""Ctrl-C taken between runs, where nothing is half done.

An interrupt in the middle of anything can be swallowed (by an import, by a callback of the garbage
collector) and leave modules half loaded, so the first one is only noted.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_noted = threading.Event()


@contextmanager
def deferred() -> Iterator[None]:
    """While inside, the first SIGINT waits for `check`, and a second one interrupts at once.

    Does nothing outside the main thread, and where SIGINT is ignored.
    """
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or before is signal.SIG_IGN:
        yield
        return
    _noted.clear()
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _noted.clear()


def check() -> None:
    """Raises KeyboardInterrupt if one was noted: called before each run and each judgement."""
    if _noted.is_set():
        _noted.clear()
        raise KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    if _noted.is_set():
        raise KeyboardInterrupt
    _noted.set()
