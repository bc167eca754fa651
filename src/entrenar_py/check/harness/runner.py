"""Runs of scenarios: each is made once, stopped if it stalls, kept on request, and judged.

A run takes place in this process, because loading torch in a new process takes as long as hundreds
of small runs. A stalled run is interrupted by an exception, but never while a module is being
loaded, since that would leave half a module. Even so, the exception leaves this process in an
unknown state: a lock may be held, a table half filled. So this process makes no more runs. Later
runs take place in a child process, which is killed and replaced if it stalls, too.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_uint64
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from types import FrameType
from typing import Any

from entrenar_py import systems
from entrenar_py.check.clauses import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.harness import companions
from entrenar_py.check.harness.judgement import Judgement, Listener, ignore, judge
from entrenar_py.shared import patience, process, trace
from entrenar_py.shared.errors import SystemFailure
from entrenar_py.shared.patience import Patience
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.untrusted import json_text
from entrenar_py.shared.verdict import Finding

_LOADER = "<frozen importlib._bootstrap>"  # the file name of frames that load modules
_distrusted = threading.Event()


def run_patiently(scenario: Scenario, *, patience_s: float) -> trace.Trace:
    """Return the trace of `scenario`. It is failed if the run made no progress for `patience_s`.

    Only the main thread receives signals. In other threads, and on systems without SIGALRM, a run
    is never stopped.
    """
    if _distrusted.is_set():
        return _elsewhere().run(scenario, patience_s=patience_s)
    systems.load(scenario)
    with _interrupted(patience_s):
        return systems.run(scenario)


def _stalled(seconds: float) -> SystemFailure:
    return SystemFailure(f"the run made no progress for {seconds:g} s and was stopped")


@contextmanager
def _interrupted(seconds: float) -> Iterator[None]:
    """Interrupt a run in the body if it stalls for `seconds`.

    `systems.run` then returns a failed trace.

    A callback of the garbage collector may swallow the exception, so it is raised again later.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return
    waiting: Patience | None = None
    interval_s = patience.interval_s(seconds)
    is_over = False

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal waiting
        # A signal that arrives just before the timer is stopped is handled after that. It must not
        # start the timer again, since the next signal would end this process.
        if is_over:
            return
        try:
            if waiting is None:  # created late, since it scans all processes
                waiting = Patience(seconds, sign=patience.of_this_process)
            elif waiting.look() and not _is_loading(frame):
                _distrusted.set()
                raise _stalled(seconds)
        finally:  # last, since a signal within the handler would call the handler again
            signal.setitimer(signal.ITIMER_REAL, interval_s)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, interval_s)
    try:
        yield
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_loading(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _LOADER:
            return True
        frame = frame.f_back
    return False


class Elsewhere:
    """A child process that makes one run after another. It is replaced if it stalls or dies."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._process: SpawnProcess | None = None
        self._pipe: Any = None
        self._marks = RawValue(c_uint64, 0)

    def run(self, scenario: Scenario, *, patience_s: float) -> trace.Trace:
        """Return the trace of `scenario`. It is failed if the child process stalls or dies."""
        try:
            pipe = self._ready()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.jsonl"
                order = {"scenario": scenario.to_dict(), "path": str(path)}
                pipe.send_bytes(json.dumps(order).encode())
                waiting = Patience(patience_s, sign=lambda: self._marks.value)
                while not pipe.poll(waiting.interval_s):
                    if waiting.look():
                        raise _stalled(patience_s)
                pipe.recv_bytes()
                return trace.load(path)
        except (EOFError, OSError):
            self.end()
            return systems.failed(scenario, "SystemFailure: the process of the run died")
        except BaseException as error:
            self.end()
            if not isinstance(error, SystemFailure):  # such as KeyboardInterrupt
                raise
            return systems.failed(scenario, f"SystemFailure: {error}")

    def end(self) -> None:
        """End the child process, if there is one."""
        if self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            self._process = None

    def _ready(self) -> Any:
        if self._process is None:
            self._pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_serve, args=(theirs, self._marks))
            self._process.start()
            theirs.close()
        return self._pipe


@cache
def _elsewhere() -> Elsewhere:
    made = Elsewhere()
    atexit.register(made.end)
    return made


def _serve(pipe: Connection, marks: Any) -> None:
    """Make the runs that are requested over `pipe`, until it is closed.

    This is the child's main loop.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles interrupts
    patience.share(marks)
    while True:
        try:
            order = json_text.load(pipe.recv_bytes())
        except EOFError:
            return
        trace.save(systems.run(Scenario.from_dict(order["scenario"])), Path(order["path"]))
        pipe.send_bytes(b"saved")


# Longer than the patience of systems that start processes, since these end their own processes
# without harm to this one.
RUN_PATIENCE_S = 180.0
REMEMBERED = 400  # traces; a baseline is needed again soon or never


class Runner:
    """Runs scenarios and remembers their traces.

    Saves each trace in `trace_folder` unless it is None.
    """

    def __init__(
        self,
        trace_folder: Path | None = None,
        *,
        patience_s: float = RUN_PATIENCE_S,
        on_judged: Listener = ignore,
    ) -> None:
        self._folder = trace_folder
        self._on_judged = on_judged
        self._patience_s = patience_s
        self._known: dict[Scenario, trace.Trace] = {}

    def run(self, scenario: Scenario) -> trace.Trace:
        """Return the trace of `scenario`, from memory if it was run before."""
        process.check_interrupts()
        if scenario not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.pop(next(iter(self._known)))
            result = run_patiently(scenario, patience_s=self._patience_s)
            if self._folder is not None:
                trace.save(result, self._folder / f"{scenario.digest}.jsonl")
            self._known[scenario] = result
        return self._known[scenario]

    def attempt(self, invariant: Invariant, check: Check, scenario: Scenario) -> Judgement:
        """Run `scenario` and the runs that it is compared with; return the check's judgement."""
        own = self.run(scenario)
        runs = companions.of(check.needs, scenario).chosen(self.run)
        self._on_judged([own, *(trace for trace in runs if trace is not own)])
        return judge(invariant, check, runs)

    def try_scenario(self, invariant: Invariant, check: Check, scenario: Scenario) -> Finding:
        """Return the finding of `attempt`, without the rest of the judgement."""
        return self.attempt(invariant, check, scenario).finding
