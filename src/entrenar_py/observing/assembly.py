"""The files of a run's ranks put together: the events of one run, as a trace has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from entrenar_py.errors import TraceError
from entrenar_py.observing import rank_file
from entrenar_py.observing.rank_file import SUFFIX, RankTrace
from entrenar_py.trace import Event, Halt, Injected, Membership, Shard, Start, Update


def load(folder: Path) -> tuple[list[RankTrace], list[str]]:
    """What each rank recorded in each of its lives, and what is wrong with files that can't be
    read.
    """
    ranks, problems = [], []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            ranks.append(rank_file.load(path))
        except TraceError as error:
            problems.append(str(error))
    return ranks, problems


def ordered(ranks: Sequence[RankTrace]) -> list[Event]:
    """All ranks' events step by step, those of a life after those of the life before; of one step
    starts first and updates last, but who is gone made none.
    """
    kinds = (Start, Shard, Update, Injected, Halt, Membership)

    def place(event: Event) -> tuple[int, int]:
        step = getattr(event, "step", None) or 0
        return step, kinds.index(type(event)) if type(event) in kinds else len(kinds)

    lives = sorted({one.life for one in ranks})
    return [
        event
        for life in lives
        for event in sorted((e for one in ranks if one.life == life for e in one.events), key=place)
    ]


def numbered(events: Iterable[Event], accumulation: int) -> list[Event]:
    """Shards numbered through the ranks, and updates with the weight of all shards of their step:
    a rank knows its own alone.
    """
    weights: dict[int, float] = defaultdict(float)
    found: list[Event] = []
    for event in events:
        if isinstance(event, Start):  # of who goes on from here: these steps are made again
            for step in [step for step in weights if step >= event.step]:
                del weights[step]
        elif isinstance(event, Shard):
            weights[event.step] += event.weight
        if isinstance(event, Shard | Injected | Halt) and event.shard is not None:
            number = (event.rank or 0) * accumulation + event.shard
            found.append(replace(event, shard=number))
        elif isinstance(event, Update):
            found.append(replace(event, weight=weights[event.step]))
        else:
            found.append(event)
    return found
