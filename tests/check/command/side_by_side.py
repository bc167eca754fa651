"""Try many scripts, several at a time.

Each process of the pool keeps its own process with torch (`zygote`), which ends when its pipe does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

AHEAD = 4  # asked for per process, so that one slow script leaves no process idle

Item = TypeVar("Item")
Result = TypeVar("Result")


def results(
    work: Callable[[Item], Result], items: Iterable[Item], num_processes: int
) -> Iterator[Result]:
    """Yield what `work` returns of each item, in their order; items may be without end.

    With one process the work is done in this one.
    """
    if num_processes == 1:
        yield from map(work, items)
        return
    pool = ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"))
    asked: deque[Future[Result]] = deque()
    try:
        for item in items:
            asked.append(pool.submit(work, item))
            if len(asked) >= AHEAD * num_processes:
                yield asked.popleft().result()
        while asked:
            yield asked.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
