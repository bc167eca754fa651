"""Standard output as a console that outlives its reader and prints any text."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from entrenar_py.untrusted import escaping, printing


class PatientConsole(Console):
    """Goes on in silence when the reader (`head`, `less`) has gone, or the disk is full.

    The exit code then still tells the verdict, and files that were asked for are still written.
    What is printed is visible, wherever it comes from: escapes are this console's own.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints; `printing.lost` tells afterwards of what could not be written."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            self.quiet = True
            printing.give_up(error)

    def on_broken_pipe(self) -> None:
        """Turns standard output into a sink, also for what the interpreter flushes at its end."""
        self.quiet = True
        printing.give_up(BrokenPipeError())

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The pieces of `renderable`, their texts visible."""
        for piece in super().render(renderable, options):
            if piece.control or piece.text == (shown := escaping.text(piece.text)):
                yield piece
            else:
                yield Segment(shown, piece.style)


def standard_output(*, color: bool) -> Console:
    """A console on standard output; `color` False leaves out colours and styles.

    Nothing in a text is taken for markup. What the encoding of standard output lacks is spelled
    out (`\\u03b1`): a name in a contract may be in any script.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return PatientConsole(
        color_system="auto" if color else None, highlight=False, markup=False, emoji=False
    )
