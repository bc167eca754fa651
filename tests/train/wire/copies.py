"""Copies of audited shards without data, only right or wrong, and the rules of audits."""

from __future__ import annotations

from itertools import count

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.messages import Computed, Message, TreeNode

RIGHT = 0


class Copies:
    """The copies of one step. Each wrong copy is different, so no two workers agree on it."""

    def __init__(self) -> None:
        self.concluded: set[int] = set()
        self.culprits: list[int] = []
        self.undecided = False
        self._open: dict[int, tuple[int, list[int]]] = {}  # rank -> shard, blocks that came
        self._whole: dict[int, list[tuple[int, int]]] = {}  # shard -> rank, what it got
        self._wrong: dict[int, int] = {}  # rank -> how often it will be
        self._ways = count(1)

    def go_wrong(self, rank: int, times: int = 1) -> None:
        """Make the next `times` copies of `rank` wrong, unless this was requested before."""
        self._wrong.setdefault(rank, times)

    def take(self, rank: int, message: Message) -> None:
        """A worker sends one copy at a time, of one shard."""
        if isinstance(message, Computed):
            assert rank not in self._open
            (shard,) = message.shards
            self._open[rank] = shard, []
        else:
            assert isinstance(message, TreeNode)
            self._open[rank][1].append(message.block)

    def end(self, rank: int, shard: int, num_blocks: int) -> None:
        """A complete copy has every block, from the last to the first."""
        assert self._open.pop(rank) == (shard, list(reversed(range(num_blocks))))
        got = RIGHT
        if self._wrong.get(rank, 0):
            self._wrong[rank] -= 1
            got = next(self._ways)
        self._whole.setdefault(shard, []).append((rank, got))

    def compare(self, shard: int) -> tuple[list[int], list[int]]:
        """Return the ranks that sent copies, and which copies are the same."""
        whole = self._whole.get(shard, [])
        values = [got for _, got in whole]
        return [rank for rank, _ in whole], [values.index(got) for got in values]

    def conclude(self, effect: do.Conclude) -> None:
        """No wrong copy counts against another worker's, and no right worker is caught."""
        whole = self._whole.pop(effect.shard)
        self.concluded.add(effect.shard)
        if effect.copy is None:
            self.undecided = True
            one_word = {rank for rank, _ in whole} < set(effect.disputed)
            assert one_word or len({got for _, got in whole}) > 1
            return
        wrong = set[int]()
        if len({rank for rank, _ in whole}) > 1:  # who is alone from the start is believed
            wrong = {rank for rank, got in whole if got != RIGHT}
            counted = whole[effect.copy][1]
            assert counted == RIGHT
            assert len({rank for rank, got in whole if got == counted}) > 1
        assert wrong == ({effect.culprit} - {None})
        self.culprits += sorted(wrong)

    def forget(self, rank: int) -> None:
        """Remove the copies of `rank`, which is lost."""
        self._open.pop(rank, None)
        for shard, whole in self._whole.items():
            self._whole[shard] = [one for one in whole if one[0] != rank]

    def clear(self) -> None:
        """Begin another step, or the same one again."""
        self.concluded.clear()
        self._open.clear()
        self._whole.clear()
