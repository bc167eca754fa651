"""Standard output as a console that outlives its reader and prints any text."""

from __future__ import annotations

import io
import os
import sys

from rich.console import Console


class PatientConsole(Console):
    """Goes on in silence when the reader (`head`, `less`) has gone.

    The exit code then still tells the verdict, and files that were asked for are still written.
    """

    def on_broken_pipe(self) -> None:
        """Turns standard output into a sink, also for what the interpreter flushes at its end."""
        self.quiet = True
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)


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
