"""Work on large arrays in several threads, where numpy and BLAKE3 let others run meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Aside:
    """One thread for long work, done in the order of calls; it ends with this object."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def start(self, work: Callable[[], T]) -> Callable[[], T]:
        """Begin `work`; return a function that waits for its result, or raises what it raised."""
        return self._pool.submit(work).result


def at_once(work: Callable[[], T]) -> Callable[[], T]:
    """Do `work` here, and return a function that returns its result: as `Aside.start` does."""
    result = work()
    return lambda: result


def share_out(
    items: Sequence[T], work: Callable[[Sequence[T]], None], *, threads_max: int = 8
) -> None:
    """Call `work` with a share of `items` in each of several threads, and wait for all.

    With more threads than `threads_max`, work on small items only waits for the interpreter.
    """
    threads = min(threads_max, os.cpu_count() or 1, len(items))
    if threads < 2:
        work(items)
        return
    with ThreadPoolExecutor(threads) as pool:  # not kept: a process may fork
        for done in [pool.submit(work, items[number::threads]) for number in range(threads)]:
            done.result()
