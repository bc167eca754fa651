"""The end of a run, as far as its ranks' files tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from entrenar_py.rank_files.rank_trace import RankTrace
from entrenar_py.trace import Event, Injected, Update


class LastLives:
    """The last life of each rank (`ranks`), and what all lives of all ranks came to.

    `num_steps` are the steps that each rank had made at its end, `struck` the kinds of the faults
    that were planted, `problem` the first error that a rank ended by ("" for none), and `closed`
    the ranks that came to the end of training without one.
    """

    def __init__(self, ranks: Sequence[RankTrace], events: Iterable[Event]) -> None:
        by_life = sorted(ranks, key=lambda rank: rank.life)
        self.ranks: Mapping[int, RankTrace] = {rank.rank: rank for rank in by_life}
        self.num_steps: dict[int, int] = {}
        self.struck: set[str] = set()
        for event in events:
            if isinstance(event, Update):
                made = self.num_steps.get(event.rank, 0)
                self.num_steps[event.rank] = max(made, event.step + 1)
            elif isinstance(event, Injected):
                self.struck.add(event.fault["kind"])
        self.problem = next((rank.problem for rank in self.ranks.values() if rank.problem), "")
        self.closed = {
            number for number, rank in self.ranks.items() if rank.ended and not rank.problem
        }

    @property
    def met_a_planted_value(self) -> bool:
        """True if a value that isn't finite was planted: training may stop on purpose then."""
        return any(kind.startswith("non_finite") for kind in self.struck)

    def all_made_the_same(self, world_size: int) -> bool:
        """Return whether a rank closed, and every rank has made as many steps as any other.

        The run is whole then: only taking it down failed, or hung.
        """
        steps = {self.num_steps.get(rank, 0) for rank in range(world_size)}
        return bool(self.closed) and len(steps) == 1
