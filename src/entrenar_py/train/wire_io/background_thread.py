"""Runs work in a thread, and calls back in the event loop when it is done."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

Outcome = TypeVar("Outcome")


class Task(Generic[Outcome]):
    """Calls `work` in a thread of `executor`, then `done` with its result in the running loop.

    An exception of `work` goes to the loop's exception handler. `work` gets the task as its
    argument, and should return soon once the task is `stopped`.
    """

    def __init__(
        self,
        executor: Executor,
        work: Callable[[Task[Outcome]], Outcome],
        done: Callable[[Outcome], None],
    ) -> None:
        self.stopped = False
        self._work, self._done = work, done
        self._loop = asyncio.get_running_loop()
        self._future = executor.submit(self._run)

    def stop(self) -> None:
        """Stop the work and wait for its end; `done` will not be called."""
        self.stopped = True
        if not self._future.cancel():
            wait([self._future])

    def _run(self) -> Outcome:
        try:
            return self._work(self)
        finally:
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if not self.stopped:
            self._done(self._future.result())


class Thread:
    """One thread, which runs tasks in the order in which they were given."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._tasks: deque[Task[Any]] = deque()

    def run(self, work: Callable[[], Outcome], done: Callable[[Outcome], None]) -> None:
        """Call `work` in the thread, then `done` in the running loop."""

        def finish(outcome: Outcome) -> None:
            self._tasks.popleft()
            done(outcome)

        self._tasks.append(Task(self._thread, lambda _: work(), finish))

    def forget(self) -> None:
        """Stop all tasks and wait for their end; `done` is not called for any of them."""
        for task in reversed(self._tasks):  # the last ones first: they are not begun
            task.stop()
        self._tasks.clear()

    def close(self) -> None:
        """Stop all tasks and end the thread; it takes no more tasks."""
        self.forget()
        self._thread.shutdown()
