"""Work on large arrays in several threads, where numpy and BLAKE3 let others run meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_THREADS_MAX = 8

T = TypeVar("T")


def share_out(items: Sequence[T], work: Callable[[Sequence[T]], None]) -> None:
    """Call `work` with a share of `items` in each of several threads, and wait for all."""
    threads = min(_THREADS_MAX, os.cpu_count() or 1, len(items))
    if threads < 2:
        work(items)
        return
    with ThreadPoolExecutor(threads) as pool:  # not kept: a process may fork
        for done in [pool.submit(work, items[number::threads]) for number in range(threads)]:
            done.result()
