"""Find modules beside the model that train nothing and move all the same, as a teacher may.

In training mode its normalisations compute with a batch's statistics, and its dropout draws masks,
so its outputs change from step to step. A copy of the model may be renewed after the last step that
was seen, as a target network is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from entrenar_py.check import evidence
from entrenar_py.shared.trace import Start, Trace, Update
from entrenar_py.shared.verdict import Tally

STATISTICS = ("running_mean", "running_var")
_MASKS = "masks of "  # the beginning of the names of their numbers
Event = Start | Update
_EVAL = "it is in training mode, call eval() on it, also after train() on a module that holds it"


def compare(tally: Tally, trace: Trace) -> None:
    """Check that statistics stay where the parameters of their module do."""
    names = {name for start in trace.of(Start) for name in start.weights}
    of_ranks = {rank: _moved(lives) for rank, lives in _lives(trace).items()}
    for rank, moved in of_ranks.items():
        _drawn_masks(tally, trace, rank, moved)
        for label in dict.fromkeys(name.partition("/")[0] for name in moved):
            parts = {name.partition("/")[2]: name for name in moved if name.startswith(f"{label}/")}
            statistics = [name for part, name in parts.items() if _is_statistic(part)]
            parameters = {part: name for part, name in parts.items() if not _is_statistic(part)}
            if not statistics or any(moved[name] for name in parameters.values()):
                continue
            told = f"running statistics of {label} moved, and none of its parameters did: {_EVAL}"
            other = _training_rank(of_ranks, parameters.values())
            for name in statistics:
                event = moved[name]
                if event is not None and other is not None:
                    words = (
                        f"rank {other} moves the parameters of {label}, and rank {rank} doesn't, "
                        "though running statistics of its own move: it uses weights that were "
                        "never updated; update them on each rank that uses them"
                    )
                    place = evidence.place(trace, event)
                    tally.check(False, words, tensor=name, **{**place, "rank": rank})
                elif event is not None and parameters.keys() <= names:
                    tally.miss(f"in step {event.step} {told}; or run until the script renews it")
                elif event is not None:
                    place = evidence.place(trace, event)
                    tally.check(False, told, tensor=name, **{**place, "rank": rank})
                else:
                    tally.compared += 1


def _drawn_masks(tally: Tally, trace: Trace, rank: int, moved: Mapping[str, Event | None]) -> None:
    """Check that a module whose weights stay draws no dropout masks."""
    for name, event in moved.items():
        label, _, counted = name.removeprefix(_MASKS).partition("/")
        own = [at for other, at in moved.items() if other.startswith(f"{label}/")]
        if not name.startswith(_MASKS) or counted != "num_masks" or not own or any(own):
            continue
        if event is None:
            tally.compared += 1
            continue
        told = f"dropout of {label} draws masks, and nothing of it trains: {_EVAL}"
        tally.check(False, told, tensor=label, **{**evidence.place(trace, event), "rank": rank})


def _training_rank(
    of_ranks: Mapping[int, Mapping[str, Event | None]], names: Collection[str]
) -> int | None:
    """Return the first rank on which all tensors `names` move, None if there is none."""
    moving = (rank for rank, moved in of_ranks.items() if all(map(moved.get, names)))
    return next(moving, None) if names else None


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in STATISTICS


def _lives(trace: Trace) -> Mapping[int, list[list[Event]]]:
    lives: dict[int, list[list[Event]]] = defaultdict(list)
    for event in trace.standing.events:
        if isinstance(event, Start):
            lives[event.rank].append([event])
        elif isinstance(event, Update) and lives[event.rank]:
            lives[event.rank][-1].append(event)
    return lives


def _moved(lives: list[list[Event]]) -> dict[str, Event | None]:
    """Return each tensor beside the model, with the first event after it moved within a life."""
    moved: dict[str, Event | None] = {}
    for life in lives:
        digests: dict[str, str] = {}
        for event in life:
            for name, record in event.extra.items():
                has_moved = digests.setdefault(name, record.digest) != record.digest
                moved[name] = moved.get(name) or (event if has_moved else None)
    return moved
