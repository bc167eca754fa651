"""The process of a command: its beginning and end, deferred interrupts, and its environment.

An interrupt (Ctrl-C) at an arbitrary place can be swallowed (by an import, by a callback of the
garbage collector) and can leave modules half loaded. So the first interrupt is only noted, and
raised at a safe point.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import platform
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import entrenar_py

_NEW_OBJECTS = 10_000


def begin() -> None:
    """Prepare this process for a command. Don't call it for a command inside another program."""
    collect_seldom()
    if sys.stderr is not None:  # None if the parent process closed it
        faulthandler.enable()  # prints the signal and the stack if native code kills this process
    atexit.register(_skip_last_collection)


def collect_seldom() -> None:
    """Collect garbage after every 10,000 new objects instead of every 700.

    Importing torch and transformers creates a million objects that stay. Scanning them again and
    again took a fifth of the import time.
    """
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])


def _skip_last_collection() -> None:
    """Skip the garbage collection at exit, which would scan all of torch for half a second.

    Does nothing if Triton is loaded, since it would report uncollected objects in a hundred lines.
    """
    if "triton" not in sys.modules:
        gc.freeze()


_noted = threading.Event()


@contextmanager
def deferred_interrupts(
    *, numbers: Sequence[signal.Signals] = (signal.SIGINT,), for_good: bool = False
) -> Iterator[None]:
    """Defer the first of these signals to `check_interrupts` in the body; a second one interrupts.

    Afterwards the old handlers are restored. With `for_good` the signals are ignored afterwards,
    because the process is about to exit. Does nothing outside the main thread, or for signals that
    are already ignored.
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


def check_interrupts() -> None:
    """Raise KeyboardInterrupt if a signal was deferred. Call this where nothing is half done.

    Only the main thread then forgets the signal, so that all threads that check are interrupted.
    """
    if _noted.is_set():
        if threading.current_thread() is threading.main_thread():
            _noted.clear()
        raise KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    if _noted.is_set():
        raise KeyboardInterrupt
    _noted.set()


def environment() -> dict[str, str]:
    """Return versions and platform of this process, and the wgpu adapters that it has opened."""
    from importlib import metadata  # imports the e-mail modules, which `--help` doesn't need

    import numpy as np
    import torch

    described = {
        "entrenar": entrenar_py.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }
    backend = sys.modules.get("entrenar_py.compute.wgpu")  # its import costs 0.2 s
    opened = [] if backend is None else backend.opened()
    if opened:
        titles = [f"{one.device}{', software' if one.software else ''}" for one in opened]
        named = "; ".join(dict.fromkeys(titles))
        described |= {"wgpu": metadata.version("wgpu"), "wgpu_adapter": named}
    return described
