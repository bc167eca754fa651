"""Work outside the event loop: in a thread, and in worker processes from a fork server."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.forkserver import _forkserver
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from entrenar_py.shared.errors import SystemFailure

Outcome = TypeVar("Outcome")


class Task(Generic[Outcome]):
    """Calls `work` in a thread of `executor`, then `done` with its result in the running loop.

    An exception of `work` goes to the loop's exception handler. `work` gets the task as its
    argument, and should return soon after the task is `stopped`.
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
        """Stop the work and wait until it has ended; `done` will not be called."""
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
    """One thread, which runs tasks in the order of submission."""

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
        """Stop all tasks and wait until they have ended; `done` is not called for any of them."""
        for task in reversed(self._tasks):  # the last ones first: they are not begun
            task.stop()
        self._tasks.clear()

    def close(self) -> None:
        """Stop all tasks and end the thread, which accepts no more tasks."""
        self.forget()
        self._thread.shutdown()


ENDING_S = 5.0
_OF_GROUPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # sent to all processes of a group
_FIRST = "entrenar_py.train.wire_io.fork_server"
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


class Job:
    """The worker's end of its pipe: it receives jobs, and sends notes and one answer for each.

    A job may come in several parts.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.fileno = pipe.fileno

    def next(self) -> bytes | None:
        """Return the next job or part of one; None if no more follow."""
        try:
            return self._pipe.recv_bytes()
        except EOFError:
            return None

    def note(self, text: bytes) -> None:
        """Send a note while the job is being done."""
        self._send(b"+" + text)

    def answer(self, text: bytes) -> None:
        """Send the result of the job."""
        self._send(b"=" + text)

    def _send(self, message: bytes) -> None:
        with suppress(OSError):  # the parent has ended, or no longer listens
            self._pipe.send_bytes(message)


@dataclass(eq=False)
class Hand:
    """One worker process. `answer` is the result of its job, None until it arrives."""

    process: BaseProcess
    pipe: Connection
    answer: bytes | None = None

    def add(self, part: bytes) -> None:
        """Send a further part of the job; a process that has died does not get it."""
        with suppress(OSError):
            self.pipe.send_bytes(part)

    def heard(self) -> bytes | None:
        """Return the note that the process sent; None for its answer or a closed pipe."""
        try:
            message = self.pipe.recv_bytes()
        except (EOFError, OSError):
            return None
        if message[:1] == b"+":
            return message[1:]
        self.answer = message[1:]
        return None

    @property
    def pid(self) -> int:
        """The process ID."""
        assert self.process.pid is not None, "it was started"
        return self.process.pid

    def kill(self) -> None:
        """End the process at once, even if it is stopped."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Crew:
    """Processes that run `main`. With `one_job`, each process ends after its job."""

    def __init__(
        self, main: Callable[[Connection], None], *, preload: Sequence[str], one_job: bool = False
    ) -> None:
        self._main, self._one_job = main, one_job
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([_FIRST, *preload])
        self._idle: list[Hand] = []
        self._busy: list[Hand] = []

    def give(self, job: bytes) -> Hand:
        """Return the process that gets `job`, an idle or a new one.

        Raises SystemFailure if a new process can't be started.
        """
        alive = [hand for hand in self._idle if hand.process.is_alive()]
        hand = alive[0] if alive else self._new()
        self._idle = alive[1:]
        hand.answer = None
        try:
            hand.pipe.send_bytes(job)
        except OSError as error:
            raise SystemFailure(f"a process died before it had its job ({error})") from error
        self._busy.append(hand)
        return hand

    def gather(self, timeout_s: float) -> None:
        """Wait until all busy processes have answered or died.

        Processes that still work after `timeout_s` are killed.
        """
        deadline = time.monotonic() + timeout_s
        for hand in self._busy:
            while hand.answer is None and hand.process.is_alive():
                if not hand.pipe.poll(max(0.0, deadline - time.monotonic())):
                    break
                hand.heard()
            if hand.answer is None or self._one_job:
                hand.kill()
            else:
                self._idle.append(hand)
        self._busy.clear()

    def dismiss(self) -> None:
        """End every process."""
        hands = (*self._idle, *self._busy)
        for hand in hands:
            hand.pipe.close()
        deadline = time.monotonic() + ENDING_S
        for hand in hands:
            hand.process.join(max(0.0, deadline - time.monotonic()))
            if hand.process.is_alive():
                hand.kill()
        self._idle.clear()
        self._busy.clear()

    def _new(self) -> Hand:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_run, args=(self._main, theirs), daemon=True)
        try:
            with _signals_wait():
                _start_fork_server()
                process.start()
        except (EOFError, OSError) as error:
            raise SystemFailure(
                f"no worker process starts: their fork server ended ({error}); start it again"
            ) from error
        finally:
            theirs.close()
        return Hand(process, ours)


def _start_fork_server() -> None:
    """Start the fork server if it doesn't run, and remove the name of its socket.

    `multiprocessing` gives the socket a name in a temporary folder, which would remain if this
    process were killed. On Linux, an open handle of the socket is enough to connect to it.
    """
    if sys.platform != "linux":
        _forkserver.ensure_running()
        return
    own, before = multiprocessing.current_process(), _forkserver._forkserver_address  # type: ignore[attr-defined]
    settings = own._config  # type: ignore[attr-defined]
    tempdir = settings.get("tempdir")
    with tempfile.TemporaryDirectory(prefix="fork-") as settings["tempdir"]:
        try:
            _forkserver.ensure_running()
            address = _forkserver._forkserver_address  # type: ignore[attr-defined]
            if address != before:
                handle = os.open(address, os.O_PATH | os.O_CLOEXEC)
                _forkserver._forkserver_address = f"/proc/self/fd/{handle}"  # type: ignore[attr-defined]
        finally:
            settings["tempdir"] = tempdir


def load_ahead(preload: Sequence[str]) -> None:
    """Start the fork server, which loads the modules `preload` while this process continues.

    A crew created later has the same modules, because there is only one fork server and it loads
    modules only once.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([_FIRST, *preload])
    with _signals_wait():
        _start_fork_server()
    atexit.register(_end_fork_server)


def _end_fork_server() -> None:
    """End the fork server, which otherwise would finish loading for a run that was refused."""
    pid = _forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Block signals to the whole process group, also for a fork server started during the body.

    A terminal or a service manager sends such signals, and they would end a fork server that is
    loading modules. It inherits the blocked signals. So does the resource tracker, which unblocks
    only the first two.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_GROUPS)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_GROUPS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(main: Callable[[Connection], None], pipe: Connection) -> None:
    """Run `main` in a worker process, which ends with the process that started it, even if stopped.

    A stopped process doesn't notice the end of its pipe, but the kernel kills it together with its
    parent, the fork server. The fork server ends when the last writer of its own pipe is closed.
    Every child inherits such a writer, and has to close it here.
    """
    for number in (signal.SIGINT, signal.SIGHUP):  # the process that started it handles these
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_GROUPS)
    os.close(_forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    _forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.freeze()  # loaded modules are never garbage; scanning their objects would copy their pages
    main(pipe)
