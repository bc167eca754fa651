"""One shard that several workers compute, so that a wrong value shows: whom to ask, who is wrong.

What a copy is worth shows only beside another worker's: one that two workers agree on counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Audit:
    """The ranks that compute one shard now, and those whose `copies` are whole, in that order.

    A worker may have given several copies, where nobody else is left to ask. `disputed` is who gave
    copies on which no two agreed, whoever of them is gone by now. `alike` is what was found when
    copies were compared: of each the number of the first one with the same bits.
    """

    asked: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    disputed: set[int] = field(default_factory=set)
    alike: tuple[int, ...] = ()

    def end_copy(self, rank: int) -> None:
        """The copy of `rank` is whole."""
        self.asked.remove(rank)
        self.copies.append(rank)

    def forget(self, rank: int) -> bool:
        """`rank` is gone, and what it gave with it; whether it had a part in this."""
        if rank not in (*self.asked, *self.copies):
            return False
        self.asked = [one for one in self.asked if one != rank]
        self.copies = [one for one in self.copies if one != rank]
        return True

    def is_one_word(self) -> bool:
        """Return whether all copies are of one worker, and another had another: it may be wrong."""
        return len(set(self.copies)) == 1 and self.disputed.issuperset(self.copies)

    def second(self, present: Collection[int], turn: int) -> int | None:
        """Return a rank to ask besides those that were; None where no other is `present`.

        `turn` is another for each shard and step, so that everyone audits everyone in time.
        """
        others = sorted(set(present).difference(self.asked, self.copies))
        return others[turn % len(others)] if others else None

    def another(self, present: Collection[int], turn: int) -> int | None:
        """Return a rank to ask if no two agree: a third, or each once more; None: there is none."""
        if len(set(self.copies)) > 2:
            return None
        third = self.second(present, turn)
        once = [rank for rank in self.copies if self.copies.count(rank) == 1 and rank in present]
        if len(set(self.copies)) < 2:
            once = []  # nobody is left who could agree with it
        return third if third is not None else next(iter(once), None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`copy` is the number of the copy that counts, `culprit` who gave another; None: nobody."""

    copy: int
    culprit: int | None


def verdict(copies: Sequence[int], alike: Sequence[int]) -> Verdict | None:
    """Return what two workers agree on, and which does not; None if that can't be said.

    Of each copy `copies` is the rank, `alike` the number of the first copy with the same bits. A
    worker that is alone, since nobody else is there, counts unaudited.
    """
    if len(set(copies)) == len(set(alike)) == 1:
        return Verdict(0, None)
    for first in sorted(set(alike)):
        agreed = {rank for rank, like in zip(copies, alike, strict=True) if like == first}
        others = {rank for rank, like in zip(copies, alike, strict=True) if like != first}
        if len(agreed) > 1 and len(others) < 2:
            return Verdict(first, next(iter(others), None))
    return None
