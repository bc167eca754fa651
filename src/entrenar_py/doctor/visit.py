"""`entrenar doctor`: examines, prints, and writes what it found."""

from __future__ import annotations

from pathlib import Path

from entrenar_py.cli import console
from entrenar_py.doctor import Examination, machine, reach, screen
from entrenar_py.reports import output_file


def run(path: Path | None, *, color: bool) -> None:
    """Prints the examination of this machine, and writes it to `path` as JSON if there is one.

    UsageError if that can't be written.
    """
    if path is not None:
        output_file.require_writable(path, "json")
    examined = examine()
    screen.show(examined, console.standard_output(color=color))
    if path is not None:
        output_file.write(examined.to_dict(), path)


def examine() -> Examination:
    """What is here; opens every device that it finds."""
    found = machine.found()
    return Examination(
        versions=machine.versions(),
        backends=found,
        trainers=reach.trainers(found),
        clauses=reach.clauses(found),
    )
