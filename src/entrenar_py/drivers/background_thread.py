"""Work in a thread beside the loop's, told to the loop when it is done."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

Outcome = TypeVar("Outcome")


class Task(Generic[Outcome]):
    """`work` in a thread of `executor`, then `done` with what it returned, in the running loop.

    What `work` raises goes to the loop's exception handler. It is given the task, and should return
    soon once that is `stopped`.
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
        """Returns when nothing of it goes on; `done` will not be called."""
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
    """For tasks that are done in the order in which they were given."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._tasks: deque[Task[Any]] = deque()

    def run(self, work: Callable[[], Outcome], done: Callable[[Outcome], None]) -> None:
        """Calls `work` there, then `done` in the running loop."""

        def finish(outcome: Outcome) -> None:
            self._tasks.popleft()
            done(outcome)

        self._tasks.append(Task(self._thread, lambda _: work(), finish))

    def forget(self) -> None:
        """Returns when nothing is done there; of what was given, nothing more will be heard."""
        for task in reversed(self._tasks):  # the last ones first: they are not begun
            task.stop()
        self._tasks.clear()

    def close(self) -> None:
        """Ends the thread; nothing more can be given to it."""
        self.forget()
        self._thread.shutdown()
