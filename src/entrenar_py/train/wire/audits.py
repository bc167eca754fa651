"""Audits: several workers compute copies of one shard, which are compared bit for bit.

A copy counts when two workers agree on it. This module picks workers, and finds one that is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Audit:
    """The audit of one shard. `asked` holds the ranks that are computing a copy.

    `copies` holds the rank of each complete copy, in the order of completion; a rank that had to
    compute it again is there twice. `disputed` holds all ranks that disagreed, even if they have
    left. `alike` gives for each compared copy the index of the first copy with the same bits.
    """

    asked: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    disputed: set[int] = field(default_factory=set)
    alike: tuple[int, ...] = ()

    def end_copy(self, rank: int) -> None:
        """Record that the copy of `rank` is complete."""
        self.asked.remove(rank)
        self.copies.append(rank)

    def forget(self, rank: int) -> bool:
        """Remove `rank`, which has left, and its copies; return whether it took part."""
        if rank not in (*self.asked, *self.copies):
            return False
        self.asked = [other for other in self.asked if other != rank]
        self.copies = [other for other in self.copies if other != rank]
        return True

    def is_one_word(self) -> bool:
        """Return whether all copies came from one worker that took part in a dispute."""
        return len(set(self.copies)) == 1 and self.disputed.issuperset(self.copies)

    def second(self, present: Collection[int], turn: int) -> int | None:
        """Return a rank that was not asked yet; None if every rank in `present` was.

        `turn` varies with the shard and the step, so over time every worker audits every other.
        """
        others = sorted(set(present).difference(self.asked, self.copies))
        return others[turn % len(others)] if others else None

    def another(self, present: Collection[int], turn: int) -> int | None:
        """Return who computes one more copy: a third rank, else one of the two again, else None."""
        if len(set(self.copies)) > 2:
            return None
        third = self.second(present, turn)
        once = [rank for rank in self.copies if self.copies.count(rank) == 1 and rank in present]
        if len(set(self.copies)) < 2:
            once = []  # no second worker is left that could agree
        return third if third is not None else next(iter(once), None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`copy` is the index of the copy that counts, `culprit` the rank that differs, or None."""

    copy: int
    culprit: int | None


def verdict(copies: Sequence[int], alike: Sequence[int]) -> Verdict | None:
    """Return the copy that two workers agree on, and the rank that differs; None if undecided.

    `copies` holds the rank of each copy, `alike` the index of the first copy with the same bits.
    Equal copies of a single worker count, too.
    """
    if len(set(copies)) == len(set(alike)) == 1:
        return Verdict(0, None)
    for first in sorted(set(alike)):
        agreed = {rank for rank, like in zip(copies, alike, strict=True) if like == first}
        others = {rank for rank, like in zip(copies, alike, strict=True) if like != first}
        if len(agreed) > 1 and len(others) < 2:
            return Verdict(first, next(iter(others), None))
    return None
