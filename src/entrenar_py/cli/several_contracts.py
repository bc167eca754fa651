"""The reports of several contracts, one after the other, and one exit code for all: the worst."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from entrenar_py.reports.report import (
    EXIT_FALSIFIED,
    EXIT_HELD,
    EXIT_INCONCLUSIVE,
    EXIT_NOTHING_SELECTED,
)
from entrenar_py.untrusted import printing

Job = Callable[[], int]  # gives an exit code
_WORST_FIRST = (EXIT_FALSIFIED, EXIT_INCONCLUSIVE, EXIT_NOTHING_SELECTED, EXIT_HELD)


class Interrupted(Exception):
    """Raised by a job that was interrupted, with its exit code, once it has told what it knows."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def run(jobs: Sequence[Job]) -> int:
    """The worst exit code of all; of what comes after a job that was interrupted none is begun."""
    codes = []
    for number, job in enumerate(jobs, start=1):
        try:
            codes.append(job())
        except Interrupted as stopped:
            codes.append(stopped.code)
            if number < len(jobs):
                left = len(jobs) - number
                told = "1 other contract was" if left == 1 else f"{left} other contracts were"
                printing.warn(f"entrenar-check: interrupted: {told} not begun")
            break
    return min(codes, key=_WORST_FIRST.index)
