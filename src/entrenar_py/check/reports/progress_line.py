"""The progress of a run, on one line of a terminal, with what is known of its verdicts."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich import progress
from rich.console import Console

from entrenar_py.check.reports import evidence
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared.verdict import Verdict


class Progress:
    """Shows the progress of a run on one line while the context is open, on a terminal only.

    Prints nothing in a pipe or a file. When the context closes, the line is removed.
    """

    def __init__(self, console: Console) -> None:
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[what]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, what="")
        self._broken: dict[str, str] = {}  # ids of clauses that did not hold, and their verdicts

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, invariant_id: str, done: int, planned: int, what: str) -> None:
        """Show that `done` of `planned` (0: unknown) pieces of work on an invariant are done.

        `what` describes the work in progress.
        """
        known = "".join(f"{id_} {verdict}, " for id_, verdict in self._broken.items())
        self._bar.update(
            self._task,
            description=evidence.one_line(f"{known}{invariant_id}"),
            completed=done,
            total=planned or None,
            what=evidence.one_line(what),
        )

    def know(self, entry: Entry) -> None:
        """Show from now on the verdict on a clause that did not hold; a later one replaces it."""
        self._broken.pop(entry.invariant.id, None)
        if entry.verdict is not Verdict.HELD:
            self._broken[entry.invariant.id] = entry.verdict.upper()
