"""Judge that workers which step alone do so: within a round nothing of the training is shared.

Of the harness's own trainers every collective within a round counts. A user's script may call some
for other reasons (a barrier, the mean of a loss for the log, a broadcast to a worker that came
back). There it counts what ranks stepped with: their own gradients, or the mean of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.evidence import facts, missing
from entrenar_py.shared.trace import Shard, Synchronised, Tensors, Trace
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import counted

# The largest angle between gradients of one direction, in 16 bits, too; clipping keeps directions.
_ALIKE = 1e-2

Vector = NDArray[np.float64]


def compare(tally: Tally, trace: Trace) -> None:
    """Compare the rounds of every worker."""
    meetings = trace.of(Synchronised)
    if trace.scenario.workload == "own":
        _own_gradients(tally, trace)
    else:
        for event in meetings:
            if event.collectives_alone is not None:
                called = event.collectives_alone
                message = f"rank {event.rank} called {called} collectives within a round"
                tally.equal(0, called, message, **evidence.place(trace, event))
    if meetings and not any(event.collectives_alone is not None for event in meetings):
        why = "how many collectives were called within rounds is unknown"
        missing.ask(tally, why, facts.COLLECTIVES_ALONE)
    if counts := [event.collectives for event in meetings if event.collectives is not None]:
        tally.note(f"the largest number of collectives at the end of a round: {max(counts)}")


def _own_gradients(tally: Tally, trace: Trace) -> None:
    """Check that each worker steps with its own gradient, as far as the directions show."""
    summed = _sums(trace)
    unknown: set[tuple[int, int]] = set()  # step, rank
    for step, by_rank in evidence.ranks_by_step(trace):
        of_step = {rank: summed.get((step, rank)) for rank in by_rank}
        every = _added(one for one in of_step.values() if one is not None)
        for rank, update in by_rank.items():
            applied, own = _vector(update.gradient), of_step[rank]
            if applied is not None and own is not None and _alike(applied, own):
                tally.compared += 1
            elif applied is not None and every is not None and _alike(applied, every):
                message = (
                    f"rank {rank} stepped with the mean of all ranks' gradients: within a round "
                    "each worker steps with its own"
                )
                tally.check(False, message, **evidence.place(trace, update))
            else:
                unknown.add((step, rank))
    _tell_collectives(tally, trace, unknown)


def _tell_collectives(tally: Tally, trace: Trace, unknown: set[tuple[int, int]]) -> None:
    """Count rounds without a collective as held, and those with some, too, if they shared nothing.

    `unknown` are the steps that a rank made with a gradient which may be its own or not.
    """
    begun: dict[int, int] = {}
    called_any = False
    for event in trace.of(Synchronised):
        first = begun.get(event.rank, 0)
        begun[event.rank] = event.step + 1
        if not event.collectives_alone:
            tally.compared += event.collectives_alone == 0
            continue
        if any((step, event.rank) in unknown for step in range(first, event.step + 1)):
            called = counted(event.collectives_alone, "collective")
            tally.miss(
                f"rank {event.rank} called {called} within the round that ends with step "
                f"{event.step}, and whether they shared gradients is unknown: check with a model "
                "of up to 65,536 parameters, and clip by the norm alone"
            )
        else:
            called_any = True
    if called_any:
        tally.note(
            "collectives were called within rounds: they are no fault, since each step was made "
            "with the rank's own gradient"
        )


def _sums(trace: Trace) -> Mapping[tuple[int, int], Vector]:
    """Return (step, rank) -> the sum of the gradients of the rank's micro-batches, flat."""
    terms: dict[tuple[int, int], list[Vector | None]] = {}
    for shard in trace.standing.of(Shard):
        if trace.traits.shared:
            continue  # ranks share micro-batches: none has a gradient of its own
        terms.setdefault((shard.step, shard.rank), []).append(_vector(shard.gradient))
    sums = {}
    for place, vectors in terms.items():
        known = [vector for vector in vectors if vector is not None]
        total = _added(known) if len(known) == len(vectors) else None
        if total is not None:
            sums[place] = total
    return sums


def _vector(tensors: Tensors) -> Vector | None:
    """Return all elements of all tensors, in the order of their names; None if unknown."""
    values = evidence.vectors(tensors)
    if values is None:
        return None
    return np.concatenate([values[name].astype(np.float64) for name in sorted(values)])


def _added(vectors: Iterable[Any]) -> Vector | None:
    total: Vector | None = None
    for vector in vectors:
        if total is not None and vector.shape != total.shape:
            return None
        total = vector if total is None else total + vector
    return total


def _alike(one: Vector, other: Vector) -> bool:
    """Return whether two vectors have the same direction."""
    if one.shape != other.shape or not (np.isfinite(one).all() and np.isfinite(other).all()):
        return False
    sizes = float(np.linalg.norm(one)), float(np.linalg.norm(other))
    if not all(sizes):
        return sizes == (0.0, 0.0)
    return float(np.linalg.norm(one / sizes[0] - other / sizes[1])) <= _ALIKE
