"""The progress of a run on standard error: a line on a terminal, else a plain line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from types import TracebackType
from typing import Self

from rich import progress
from rich.console import Console

from entrenar_py.check.reports import evidence
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared.verdict import Verdict

EVERY_S = 10.0  # between two plain lines


class Progress:
    """A line that shows the progress of a run while the context is open.

    On a terminal it is erased when the context closes. Elsewhere nothing is printed, or a plain
    line every EVERY_S seconds by `write`, if that is given. If it `is_quiet`, nothing is printed.
    """

    def __init__(
        self,
        console: Console,
        *,
        write: Callable[[str], object] | None = None,
        is_quiet: bool = False,
    ) -> None:
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[what]}", markup=False),
            console=console,
            transient=True,
            redirect_stdout=False,
            disable=is_quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, what="")
        self._broken: dict[str, str] = {}  # ids of clauses that did not hold, and their verdicts
        self._write = None if is_quiet or console.is_terminal else write
        self._line, self._over = "", Event()
        self._writer = Thread(target=self._write_lines, daemon=True)

    def __enter__(self) -> Self:
        self._bar.start()
        if self._write is not None:
            self._writer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
        self._over.set()
        if self._write is not None:
            self._writer.join()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Remove the line while something else is printed."""
        self._bar.stop()
        yield
        self._bar.start()

    def show(self, invariant_id: str, done: int, planned: int, what: str) -> None:
        """Show that `done` of `planned` (0: unknown) pieces of work on a clause are done.

        `what` describes the work in progress.
        """
        known = "".join(f"{id_} {verdict}, " for id_, verdict in self._broken.items())
        self._line = f"{known}{invariant_id} {done + 1} of {planned}: {what}"
        self._bar.update(
            self._task,
            description=evidence.one_line(f"{known}{invariant_id}"),
            completed=done,
            total=planned or None,
            what=evidence.one_line(what),
        )

    def know(self, entry: Entry) -> None:
        """From now on show the verdict of `entry` in the line, if its clause did not hold.

        A later verdict on the clause replaces it.
        """
        self._broken.pop(entry.invariant.id, None)
        if entry.verdict is not Verdict.HELD:
            self._broken[entry.invariant.id] = entry.verdict.upper()

    def _write_lines(self) -> None:
        assert self._write is not None
        while not self._over.wait(EVERY_S):
            if self._line:
                self._write(self._line)


class Pace:
    """The runs of a command that are done, and the time that the remaining ones will take.

    `foreseen` is the number of runs that are expected before the first one shows more.
    """

    foreseen = 0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._begun, self._num_begun = clock, clock(), 0

    def begins(self, num_left: int) -> tuple[int, int, str]:
        """Return the numbers of runs that are done and planned, and the time left in words.

        A run begins now, with `num_left` planned runs after it, as far as is known.
        """
        done, self._num_begun = self._num_begun, self._num_begun + 1
        each = (self._clock() - self._begun) / done if done else 0.0
        left = f"about {each * (num_left + 1):.0f} s left" if done else ""
        return done, max(done + 1 + num_left, 0 if done else self.foreseen), left
