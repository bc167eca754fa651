"""Counts how often a worker was thrown out for the same reason, to end a run that can't go on."""

from __future__ import annotations

import re
from collections import Counter

THROWN_OUT_MAX = 3  # times for one reason, with no step made in between

_NUMBER = re.compile(r"[0-9]+")


class Expulsions:
    """Counts expulsions by rank and reason. Reasons that differ only in numbers are the same."""

    def __init__(self) -> None:
        self._times: Counter[tuple[int | None, str]] = Counter()

    def count(self, rank: int | None, reason: str) -> int:
        """Count one more expulsion of `rank` for `reason`; return how many there are now."""
        key = rank, _NUMBER.sub("#", reason)
        self._times[key] += 1
        return self._times[key]

    def clear(self) -> None:
        """Reset all counts, because a step was made."""
        self._times.clear()


def problem(rank: int | None, step: int, times: int, reason: str) -> str:
    """Return the reason with which coordinator and worker give up."""
    return (
        f"worker {rank} was thrown out {times} times before step {step} was made, each time for "
        f"the same reason: {reason}"
    )
