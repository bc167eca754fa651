"""Averages and copies of a model's weights, recognised by how they move.

An average a of weights w moves to a + c (w - a). All tensors of the average have the same fraction
c, which may differ from move to move (a warm-up, a mean of all steps). An average that is recorded
with a step has not made its move after that step yet. Lists of gradients, and snapshots, don't move
in this way.

A module that trains nothing may still change, like a teacher in training mode: its normalisations
compute with a batch's statistics, and its dropout draws masks, so its outputs change from step to
step. A copy of the model may be renewed after the last recorded step, like a target network.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.evidence import closeness, precision
from entrenar_py.shared.trace import Declared, Start, TensorRecord, Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally

Shares = Mapping[int, float]  # step -> the fraction c by which an average moves after it
Event = Start | Update
Life = Sequence[Event]
Holder = tuple[str, int]  # an average's label, and the rank that keeps it

_ROUNDINGS = 8.0  # roundings of an element, in a product and a sum
_SEEN = 4.0  # times the error of rounding; a shorter move proves nothing
_WHOLE = 1 - 1e-4  # a larger fraction means that the copy became the weights
_ALIKE = 1e-3


def of(trace: Trace) -> dict[Holder, Shares]:
    """Return (label, rank) -> the fractions of its moves, for the averages that a script keeps.

    These are averages that the script declares, and copies that only move like an average.
    """
    declared = {label for event in trace.of(Declared) for label in event.averages}
    averages: dict[Holder, Shares] = {}
    for rank, lives in _lives(trace).items():
        for label in {name.partition("/")[0] for life in lives for at in life for name in at.extra}:
            shares = _shares(lives, label)
            is_average = shares is not None and any(one < _WHOLE for one in shares.values())
            if is_average or label in declared:
                averages[label, rank] = shares or {}
    return dict(sorted(averages.items()))


def follow_others(start: Start, updates: Sequence[Update], names: Sequence[str]) -> set[str]:
    """Return the members of `names` that move like averages or copies of trained tensors.

    The followed tensor must have the same size, and a name with the same last parts.
    """
    lives: list[list[Event]] = [[start, *updates]]
    # The prefixes of both names -> name -> the tensor that it may follow.
    pairs: dict[tuple[str, str], dict[str, str]] = {}
    for name in names:
        for other, end in _sources(name, start):
            beginnings = name.removesuffix(end), other.removesuffix(end)
            pairs.setdefault(beginnings, {})[name] = other
    return {name for named in pairs.values() if _all_follow(lives, named) for name in named}


def _all_follow(lives: Sequence[Life], pairs: Mapping[str, str]) -> bool:
    """Return whether tensors move together, always part of the way to those that they follow."""
    moves = [
        share(
            {n: at.weights[n] for n in pairs if n in at.weights},
            {n: to.weights[n] for n in pairs if n in to.weights},
            [{n: held[s] for n, s in pairs.items() if s in held} for held in _followed(at, to)],
        )
        for at, to in _moves(lives)
    ]
    return None not in moves and any(moves)


def _sources(name: str, start: Start) -> Iterator[tuple[str, str]]:
    size, parts = start.weights[name].size, name.split(".")
    known = [other for other in start.trainable if other in start.weights]
    like = [other for other in known if start.weights[other].size == size]
    for count in range(len(parts) - 1, 0, -1):
        end = ".".join(parts[-count:])
        yield from ((other, end) for other in like if f".{other}".endswith(f".{end}"))


# --- what is judged -------------------------------------------------------------------------------


def compare_resumed(tally: Tally, straight: Trace, trace: Trace) -> None:
    """Compare the averages after a resume with those of the run without stops, bit for bit.

    Only the lowest rank's averages are compared, since scripts save these for all ranks.
    """
    begun = min((start.step for start in trace.of(Start) if start.resumed), default=None)
    if begun is None:
        return
    expected, updates, judged = evidence.updates(straight), evidence.updates(trace), set[str]()
    shares = of(straight)
    for label, rank in shares:
        if label in judged:
            continue
        judged.add(label)
        for step in sorted(step for step in updates if step >= begun and step in expected):
            if rank not in updates[step] or rank not in expected[step]:
                continue
            update = updates[step][rank]
            due, got = (_held(one.extra, label) for one in (expected[step][rank], update))
            if due and not _moves_after(trace, label, rank):
                # These may be values of the loaded checkpoint, not of an average created later.
                tally.note(f"{label}, an average of the weights, was not seen after the resume")
                break
            words = _words(straight, trace, (label, rank), shares[label, rank], step)
            message = (
                f"after the resume {label}, an average of the weights, differs from the run "
                "without stops"
            )
            place = evidence.place(trace, update)
            closeness.compare_exact(tally, due, got, message, words=words, **place)


def _moves_after(trace: Trace, label: str, rank: int) -> bool:
    lives = _lives(trace).get(rank, [])[1:]
    return any(
        bool(now) and not _same(was, now)
        for before, after in _moves(lives)
        for was, now in [(_held(before.extra, label), _held(after.extra, label))]
    )


def _words(straight: Trace, trace: Trace, holder: Holder, shares: Shares, step: int) -> str:
    """Return why a resumed average may differ from step `step` on; "" if that is unknown."""
    label, rank = holder
    lives = _lives(trace).get(rank, [])
    life = next((of for of in reversed(lives) if any(_made(at) == step for at in of)), [])
    got = next((_held(at.extra, label) for at in life if _made(at) == step), {})
    begun = next(iter(_lives(straight).get(rank, [[]])[0]), None)
    if begun is not None and _same(_held(begun.extra, label), got):
        return "it has its value from before the first step: it was not restored"
    if life and _same({f"{label}/{n}": r for n, r in life[0].weights.items()}, got):
        return "it has the weights with which the run resumed: it was started again from them"
    moved = (_shares([life], label) or {}).get(step - 1)
    due = shares.get(step - 1)
    if moved is None or due is None or abs(moved - due) <= _ALIKE * due:
        return ""
    words = f"after step {step - 1} it moves {moved:.3g} of the way to the weights, not {due:.3g}"
    like = [at for at, part in shares.items() if abs(part - moved) <= _ALIKE * part]
    if like:
        words = f"{words}, as it did after step {like[0]}: its count of updates was not restored"
    return words


def compare_ranks(tally: Tally, trace: Trace) -> None:
    """Compare averages between ranks that have the same weights.

    Different averages are a counterexample only if the script declares the average, since often
    only one rank's average is saved and used. After a resume only that one may be restored, so
    nothing is compared. Statistics of batches in an average are left out, because they are those of
    each rank's own samples.
    """
    if any(start.resumed for start in trace.of(Start)):
        return
    averages = of(trace)
    declared = {label for event in trace.of(Declared) for label in event.averages}
    trained = {name for start in trace.of(Start) for name in start.trainable}
    for label in dict.fromkeys(label for label, _ in averages):
        ranks = [rank for other, rank in averages if other == label]
        for step, by_rank in evidence.ranks_by_step(trace):
            holders = [rank for rank in ranks if rank in by_rank]
            for rank in holders[1:]:
                first, update = by_rank[holders[0]], by_rank[rank]
                due, got = (_trained(_held(one.extra, label), trained) for one in (first, update))
                if not _same(first.weights, update.weights):
                    continue
                message = (
                    f"rank {rank} keeps a different average of the weights, {label}, than rank"
                )
                if label in declared or _same(due, got):
                    place = evidence.place(trace, update)
                    closeness.compare_exact(tally, due, got, f"{message} {holders[0]}", **place)
                    continue
                tally.miss(
                    f"{message} {holders[0]}, after step {step}: if each rank uses its own, "
                    f'declare it, observe(..., averages={{"{label}": ...}}); if one rank uses '
                    "it, keep it only there"
                )
                break


def _trained(average: Tensors, trained: Set[str]) -> Tensors:
    ends = {_last_parts(name) for name in trained}
    known = {name: one for name, one in average.items() if _last_parts(name) in ends}
    return known or average


def _last_parts(name: str) -> str:
    return ".".join(name.rpartition("/")[2].split(".")[-2:])


# --- how averages move ----------------------------------------------------------------------------


def _made(event: Event) -> int:
    """Return the last step before the event's record: -1 before the first step."""
    return event.step - isinstance(event, Start)


def _lives(trace: Trace) -> dict[int, list[list[Event]]]:
    """Return rank -> its lives, each with its start and updates."""
    lives: dict[int, list[list[Event]]] = {}
    for event in trace.standing.events:
        if isinstance(event, Start):
            lives.setdefault(event.rank, []).append([event])
        elif isinstance(event, Update):
            lives.setdefault(event.rank, [[]])[-1].append(event)
    return lives


def _moves(lives: Sequence[Life]) -> Iterator[tuple[Event, Event]]:
    for life in lives:
        yield from pairwise(life)


def _followed(before: Event, after: Event) -> tuple[Tensors, Tensors]:
    return before.weights, after.weights


def _shares(lives: Sequence[Life], label: str) -> dict[int, float] | None:
    """Return step -> the fraction of a copy's move; None if a move isn't that of an average."""
    shares: dict[int, float] = {}
    for before, after in _moves(lives):
        copies = [
            {name.removeprefix(f"{label}/"): one for name, one in _held(at.extra, label).items()}
            for at in (before, after)
        ]
        moved = share(copies[0], copies[1], _followed(before, after))
        if moved is None:
            return None
        if moved:
            shares[_made(before)] = moved
    return shares


def share(before: Tensors, after: Tensors, followed: Sequence[Tensors]) -> float | None:
    """Return the fraction of the way to one of `followed` that all tensors move; None if none fits.

    Return 0 if they don't move, or by no more than rounding.
    """
    if before.keys() != after.keys() or _same(before, after):
        return 0.0
    for weights in followed:
        names = [name for name in before if name in weights]
        held = [_joined(tensors, names) for tensors in (before, after, weights)]
        known = [vector for vector in held if vector is not None]
        if len(known) < len(held) or len({vector.shape for vector in known}) > 1:
            return None
        start, end, target = known
        unit = precision.unit_of({name: after[name] for name in names})
        rounding = _ROUNDINGS * unit * float(np.linalg.norm(start) + np.linalg.norm(end))
        move, way = end - start, target - start
        if float(np.linalg.norm(move)) <= _SEEN * rounding:
            return 0.0
        part = float(move @ way) / (float(way @ way) or 1.0)
        if 0 < part < 1 + _ALIKE and float(np.linalg.norm(move - part * way)) <= rounding:
            return part
    return None


def _joined(tensors: Tensors, names: Sequence[str]) -> NDArray[np.float64] | None:
    vectors = [tensors[name].vector() for name in names]
    known = [vector.astype(np.float64) for vector in vectors if vector is not None]
    return np.concatenate(known) if known and len(known) == len(vectors) else None


def _held(extra: Tensors, label: str) -> dict[str, TensorRecord]:
    return {name: one for name, one in extra.items() if name.startswith(f"{label}/")}


def _same(one: Tensors, other: Tensors) -> bool:
    return bool(one) and evidence.digests(one) == evidence.digests(other)


# --- modules that train nothing, and move ---------------------------------------------------------


STATISTICS = ("running_mean", "running_var")
_MASKS = "masks of "  # prefixes the names of their counts
_EVAL = (
    "it is in training mode: call eval() on it, also after calling train() on "
    "a module that contains it"
)


def compare_modules(tally: Tally, trace: Trace) -> None:
    """Check that running statistics don't move if the parameters of their module don't."""
    names = {name for start in trace.of(Start) for name in start.weights}
    of_ranks = {rank: _moved(lives) for rank, lives in _lives(trace).items()}
    for rank, moved in of_ranks.items():
        _drawn_masks(tally, trace, moved)
        for label in dict.fromkeys(name.partition("/")[0] for name in moved):
            parts = {name.partition("/")[2]: name for name in moved if name.startswith(f"{label}/")}
            statistics = [name for part, name in parts.items() if _is_statistic(part)]
            parameters = {part: name for part, name in parts.items() if not _is_statistic(part)}
            # A module that only normalises (a whitener) has nothing that could train: no
            # parameters, or only those of normalisations.
            normalised = {part.rpartition(".")[0] for part in parts if _is_statistic(part)}
            learns = any(part.rpartition(".")[0] not in normalised for part in parameters)
            if not learns or not statistics or any(moved[name] for name in parameters.values()):
                continue
            message = (
                f"running statistics of {label} moved, and none of its parameters did: {_EVAL}"
            )
            other = _training_rank(of_ranks, parameters.values())
            for name in statistics:
                event = moved[name]
                if event is not None and other is not None:
                    words = (
                        f"rank {other} moves the parameters of {label}, and rank {rank} doesn't, "
                        "though running statistics of its own move: it uses weights that were "
                        "never updated; update them on each rank that uses them"
                    )
                    tally.check(False, words, tensor=name, **evidence.place(trace, event))
                elif event is not None and parameters.keys() <= names:
                    tally.miss(f"in step {event.step} {message}; or run until the script renews it")
                elif event is not None:
                    tally.check(False, message, tensor=name, **evidence.place(trace, event))
                else:
                    tally.compared += 1


def _drawn_masks(tally: Tally, trace: Trace, moved: Mapping[str, Event | None]) -> None:
    """Check that a module with weights that don't change draws no dropout masks."""
    for name, event in moved.items():
        label, _, counted = name.removeprefix(_MASKS).partition("/")
        own = [at for other, at in moved.items() if other.startswith(f"{label}/")]
        if not name.startswith(_MASKS) or counted != "num_masks" or not own or any(own):
            continue
        if event is None:
            tally.compared += 1
            continue
        told = f"dropout of {label} draws masks, and no part of it trains: {_EVAL}"
        tally.check(False, told, tensor=label, **evidence.place(trace, event))


def _training_rank(
    of_ranks: Mapping[int, Mapping[str, Event | None]], names: Collection[str]
) -> int | None:
    moving = (rank for rank, moved in of_ranks.items() if all(map(moved.get, names)))
    return next(moving, None) if names else None


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in STATISTICS


def _moved(lives: list[list[Event]]) -> dict[str, Event | None]:
    """Return tensor outside the model -> the first event after it moved within a life, or None."""
    moved: dict[str, Event | None] = {}
    for life in (life for life in lives if isinstance(life[0], Start)):
        digests: dict[str, str] = {}
        for event in life:
            for name, record in event.extra.items():
                has_moved = digests.setdefault(name, record.digest) != record.digest
                moved[name] = moved.get(name) or (event if has_moved else None)
    return moved
