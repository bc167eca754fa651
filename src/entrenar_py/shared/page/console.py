"""Standard output as a console that survives a closed pipe and can print any text."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from entrenar_py.shared.untrusted import escaping, printing


class PatientConsole(Console):
    """A console that stays silent once its reader (`head`, `less`) ended or the disk is full."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as `Console.print` does. `printing.lost` later reports whether output was lost."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            self.quiet = True
            printing.give_up(error)

    def on_broken_pipe(self) -> None:
        """Discard later output, including what the interpreter flushes when it exits."""
        self.quiet = True
        printing.give_up(BrokenPipeError())

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the pieces of `renderable`, with control characters in their texts made visible."""
        for piece in super().render(renderable, options):
            if piece.control or piece.text == (shown := escaping.text(piece.text)):
                yield piece
            else:
                yield Segment(shown, piece.style)


def standard_output(*, color: bool) -> Console:
    """Return a console on standard output, plain unless `color`.

    No text is interpreted as markup. Characters that the encoding of standard output lacks are
    escaped (`\\u03b1`), since a name in a contract may be in any script.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return PatientConsole(
        color_system="auto" if color else None, highlight=False, markup=False, emoji=False
    )


def nowhere() -> Console:
    """Return a console that writes nothing."""
    return Console(quiet=True)


def standard_error(*, color: bool) -> Console:
    """Return a console on standard error, without colours unless `color`. It reads no markup."""
    return Console(
        stderr=True,
        color_system="auto" if color else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
