"""Say which of two ranks that should hold the same state is wrong, and why. Judges nothing.

What ranks recorded in the step decides: the gradients that they applied, their learning rates, and
whether their updates follow from these. Where it does not, both ranks may be wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.causes import run_comparison, update_rule
from entrenar_py.check.evidence import factors, step_sums
from entrenar_py.shared.trace import Tensors, Trace

Vector = NDArray[Any]

_ULP = 2.0**-23
_GRADIENT_BOUND = run_comparison.GRADIENT_BOUND


@dataclass(frozen=True)
class Blame:
    """The rank that is known to be wrong, or None, and the reason in words ("" for none)."""

    rank: int | None = None
    words: str = ""


def of(trace: Trace, step: int, name: str, usual: int, other: int) -> Blame:
    """Return which of the ranks `usual` and `other` made tensor `name` differ in `step`.

    The optimizer's state of a parameter has the parameter's name and a key: `weight/exp_avg`.
    """
    by_rank = evidence.updates(trace).get(step, {})
    pair = (usual, other)
    if not all(rank in by_rank for rank in pair):
        return Blame()
    parameter = name if name in by_rank[usual].gradient else name.rpartition("/")[0]
    for decide in (_by_edit, _by_gradient, _by_rate, _by_rule):
        blame = decide(trace, step, parameter, pair)
        if blame is not None:
            return blame
    words = _movement(trace, step, parameter, pair)
    return Blame(words=f"rank {other} {words}" if words else "")


def _by_edit(trace: Trace, step: int, name: str, pair: tuple[int, int]) -> Blame | None:
    """Blame the rank on which something other than the optimizer changed the tensor."""
    by_rank = evidence.updates(trace)[step]
    edited = [rank for rank in pair if name in by_rank[rank].edited]
    if len(edited) != 1:
        return None
    return Blame(edited[0], f"rank {edited[0]} changed it outside of the optimizer before the step")


def _by_gradient(trace: Trace, step: int, name: str, pair: tuple[int, int]) -> Blame | None:
    """Compare the applied gradients with each other, and with what the micro-batches gave."""
    by_rank = evidence.updates(trace)[step]
    left, right = (_vector(by_rank[rank].gradient, name) for rank in pair)
    if left is None or right is None or left.shape != right.shape:
        lacking = [rank for rank in pair if name not in by_rank[rank].gradient]
        if len(lacking) == 1:
            return Blame(words=f"rank {lacking[0]} applied no gradient of {name}")
        return None
    if np.array_equal(left, right):
        return None
    follows = [_follows(trace, step, name, rank) for rank in pair]
    if all(follow == "all" for follow in follows) or not any(follows):
        words = factors.of(left, right, trace.scenario, _GRADIENT_BOUND)
        told = f": {words}" if words else ""
        return Blame(words=f"rank {pair[1]} applied another gradient than rank {pair[0]}{told}")
    if all(follow == "own" for follow in follows):
        return Blame(words="each rank applied the gradient of its own samples alone")
    wrong = [rank for rank, follow in zip(pair, follows, strict=True) if follow != "all"]
    if len(wrong) != 1:
        return Blame(words=f"rank {pair[1]} applied another gradient than rank {pair[0]}")
    (rank,) = wrong
    told = "that of its own samples alone" if "own" in follows else "not that of all samples"
    return Blame(rank, f"the gradient that rank {rank} applied is {told}")


def _follows(trace: Trace, step: int, name: str, rank: int) -> str:
    """Return whether a rank applied the gradient of `all` samples, or of its `own`; "" if neither.

    The gradient may have a positive factor.
    """
    by_rank = evidence.updates(trace)[step]
    applied = _vector(by_rank[rank].gradient, name)
    shards = evidence.shards(trace).get(step, ())
    own = [shard for shard in shards if shard.rank == rank]
    if applied is None or not own:
        return ""
    for word, chosen in (("all", shards), ("own", own)):
        given = (step_sums.total(by_rank, chosen) or {}).get(name)
        if given is not None and given.shape == applied.shape:
            factor = factors.ratio(given, applied, _GRADIENT_BOUND)
            if factor is not None and factor > 0:
                return word
    return ""


def _by_rate(trace: Trace, step: int, name: str, pair: tuple[int, int]) -> Blame | None:
    by_rank = evidence.updates(trace)[step]
    usual, other = (by_rank[rank].rate_of(name) for rank in pair)
    if usual == other:
        return None
    return Blame(
        words=f"the learning rate is {other:.6g} on rank {pair[1]}, {usual:.6g} on rank {pair[0]}"
    )


def _by_rule(trace: Trace, step: int, name: str, pair: tuple[int, int]) -> Blame | None:
    """Blame the rank whose update does not follow from its gradient, if the other's does."""
    kept_to = [update_rule.is_followed(trace, step, rank, name) for rank in pair]
    if sorted(map(str, kept_to)) != ["False", "True"]:
        return None
    wrong = pair[kept_to.index(False)]
    words = _movement(trace, step, name, (pair[kept_to.index(True)], wrong))
    told = f": it {words}" if words else ""
    return Blame(wrong, f"rank {wrong}'s update does not follow from its gradient{told}")


def _movement(trace: Trace, step: int, name: str, pair: tuple[int, int]) -> str:
    """Return how far the second rank's weights moved, compared with the first's; "" if unclear."""
    before = [_weights_before(trace, step, name, rank) for rank in pair]
    by_rank = evidence.updates(trace)[step]
    after = [_vector(by_rank[rank].weights, name) for rank in pair]
    if any(one is None for one in (*before, *after)):
        return ""
    usual, other = (
        np.asarray(now, np.float64) - np.asarray(then, np.float64)
        for now, then in zip(after, before, strict=True)
    )
    moved = float(np.linalg.norm(usual))
    noise = 4 * _ULP * float(np.linalg.norm(np.asarray(after[0], np.float64)))
    if not moved or not math.isfinite(moved) or noise > moved / 100:
        return ""
    if not other.any():
        return "did not move it"
    words = factors.of(usual, other, trace.scenario, max(factors.EXACT, noise / moved))
    if not words.startswith("it is") or " as large" not in words:
        return ""
    return f"moved it {words.removeprefix('it is ').replace('as large', 'as far', 1)}"


def _weights_before(trace: Trace, step: int, name: str, rank: int) -> Vector | None:
    before = evidence.updates(trace).get(step - 1, {}).get(rank)
    if before is not None:
        return _vector(before.weights, name)
    start = update_rule.start_of(trace, step, rank)
    return None if start is None else _vector(start.weights, name)


def _vector(tensors: Tensors, name: str) -> Vector | None:
    return tensors[name].vector() if name in tensors else None
