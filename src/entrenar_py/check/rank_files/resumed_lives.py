"""Recognise the step from which a restarted rank goes on, if its script does not say.

A script that loads a checkpoint tells `observe` how many steps were made before (`step=`). If it
doesn't, its weights may: they are those of an earlier step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.shared.trace import Event, Start, Synchronised, Tensors, Update


def recognised(ranks: Sequence[RankTrace]) -> list[RankTrace]:
    """Return `ranks`, with the steps of those that go on from a checkpoint and said no step.

    A later life of a rank that begins at step 0 with the weights which the rank had after step k,
    and not after any other, begins at step k + 1. So does one that has some of these weights, and
    for the others those of the beginning or of other tensors: what went wrong is for the checks to
    tell. If it never had them, they may be those of rank 0, which people save for all. The ranks of
    that life that show a step must show the same, and the others make that step with them: what
    they lost is for the checks to tell. Nothing is changed if no rank shows a step: then the script
    began anew. Nor if the process is that of an earlier life: it called `observe` twice.
    """
    memories: dict[int, _Memory] = defaultdict(_Memory)
    known: dict[tuple[int, int], RankTrace] = {}
    for life in sorted({rank.life for rank in ranks}):
        lives = [rank for rank in ranks if rank.life == life]
        ahead = _step_before(lives, memories)
        for rank in lives:
            moved = rank if not ahead else _moved(rank, ahead)
            memories[rank.rank].add(moved)
            known[rank.rank, rank.life] = moved
    return [known[rank.rank, rank.life] for rank in ranks]


def _step_before(lives: Sequence[RankTrace], memories: Mapping[int, _Memory]) -> int:
    """Return the step that one life of all ranks goes on with; 0 if it can't be told."""
    shown: set[int] = set()
    for life in lives:
        steps = memories[life.rank].steps_before(life)
        if steps is not None and not steps and life.rank:
            steps = memories[0].steps_before(life)
        if steps is None or len(steps) > 1:
            return 0
        shown.update(steps)
    return shown.pop() if len(shown) == 1 else 0


class _Memory:
    """The weights that a rank had in its lives so far: the initial ones, and those after steps.

    Those that train count: an average within the model moves after a step was recorded.
    """

    def __init__(self) -> None:
        self._trained: tuple[str, ...] = ()
        self._first: tuple[str, ...] | None = None
        self._steps: dict[tuple[str, ...], set[int]] = defaultdict(set)
        self._weights: dict[int, Mapping[str, str]] = {}  # by step, the digests of tensors
        self._first_weights: Mapping[str, str] = {}
        self._processes: set[int] = set()

    def steps_before(self, rank: RankTrace) -> Set[int] | None:
        """Return the steps that a life may go on with; None if it says so itself."""
        start = next((event for event in rank.events if isinstance(event, Start)), None)
        if start is None or start.step or not start.weights:
            return None
        if rank.header.get("pid") in self._processes:
            return None
        weights = self._fingerprint(start.weights)
        if weights == self._first:
            return set()
        made = self._steps.get(weights) or self._in_part(self._digests(start.weights))
        return {step + 1 for step in made}

    def _in_part(self, weights: Mapping[str, str]) -> Set[int]:
        """Return the step whose weights `weights` are in part; none if the rest is unexplained.

        A tensor that no other step has left so tells the step. The others may be as they were at
        first, or be what another tensor was.
        """
        found = set()
        for step, after in self._weights.items():
            others = [self._first_weights, *(w for at, w in self._weights.items() if at != step)]
            tells = any(
                after.get(name) == digest and all(one.get(name) != digest for one in others)
                for name, digest in weights.items()
            )
            known = {*after.values()}
            if tells and all(
                digest in known or digest == self._first_weights.get(name)
                for name, digest in weights.items()
            ):
                found.add(step)
        return found

    def add(self, rank: RankTrace) -> None:
        if "pid" in rank.header:
            self._processes.add(int(rank.header["pid"]))
        for event in rank.events:
            if isinstance(event, Start) and self._first is None:
                self._trained = event.trainable
                self._first = self._fingerprint(event.weights)
                self._first_weights = self._digests(event.weights)
            elif isinstance(event, Update | Synchronised):
                self._steps[self._fingerprint(event.weights)].add(event.step)
                self._weights[event.step] = self._digests(event.weights)

    def _fingerprint(self, tensors: Tensors) -> tuple[str, ...]:
        """Return names and digests of the tensors that train: equal for equal ones."""
        return tuple(f"{name} {digest}" for name, digest in sorted(self._digests(tensors).items()))

    def _digests(self, tensors: Tensors) -> Mapping[str, str]:
        names = [name for name in self._trained if name in tensors] or tensors
        return {name: tensors[name].digest for name in names}


def _moved(rank: RankTrace, ahead: int) -> RankTrace:
    """Return the record of a life that resumed after `ahead` steps, counted from there."""
    return replace(rank, events=tuple(_later(event, ahead) for event in rank.events))


def _later(event: Event, ahead: int) -> Event:
    step = getattr(event, "step", None)
    if step is None:
        return event
    if isinstance(event, Start):
        return replace(event, step=step + ahead, resumed=True)
    return replace(event, step=step + ahead)  # type: ignore[call-arg]  # every kind with a step
