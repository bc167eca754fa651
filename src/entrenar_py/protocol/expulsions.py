"""Counts how often a worker was thrown out for the same reason, so that a loop can be ended."""

from __future__ import annotations

import re
from collections import Counter

THROWN_OUT_MAX = 3  # times, of the same worker, with no step made in between

_NUMBER = re.compile(r"[0-9]+")


class Expulsions:
    """Counts by rank and reason; numbers in a reason, such as sizes, make no other one of it."""

    def __init__(self) -> None:
        self._times: Counter[tuple[int | None, str]] = Counter()

    def count(self, rank: int | None, reason: str) -> int:
        """Once more; how often that makes."""
        key = rank, _NUMBER.sub("#", reason)
        self._times[key] += 1
        return self._times[key]

    def clear(self) -> None:
        """A step was made."""
        self._times.clear()


def problem(rank: int | None, step: int, times: int, reason: str) -> str:
    """Return what both sides say when they give up."""
    return (
        f"worker {rank} was thrown out {times} times before step {step} was made, each time for "
        f"the same reason: {reason}"
    )
