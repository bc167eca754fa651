"""Recognise gradients clipped element by element, as by `clip_grad_value_`. Judges nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.shared.trace import Trace

Vectors = Mapping[str, NDArray[Any]]


def limit(trace: Trace) -> float | None:
    """Return a run's largest absolute gradient element if it looks like a limit, else None.

    It does if several elements have exactly that size, or if it has three digits or fewer, like
    a number that people write. Without clipping either happens in about one of 10,000 runs. Of each
    step one rank's gradient counts: others have the same.
    """
    counts: Counter[float] = Counter()
    for by_rank in evidence.updates(trace).values():
        gradient = evidence.any_rank(by_rank).gradient
        sizes = np.abs(_flat(evidence.elements(gradient) or {}))
        if sizes.size:
            largest = float(sizes.max())
            counts[largest] += int((sizes == largest).sum())
    top = max(counts, default=math.nan)
    if not 0 < top < math.inf:
        return None
    return top if counts[top] > 1 or float(np.float32(f"{top:.3g}")) == top else None


def explains(total: Vectors, mean: Vectors, limit: float, bound: float) -> bool:
    """Return whether `mean` is `total` divided by one number and then clipped at `limit`, within
    `bound` times the norm of all elements. Tensors that `total` lacks have a sum of zero.
    """
    applied = _flat(mean)
    terms = _flat({name: total.get(name, np.zeros_like(value)) for name, value in mean.items()})
    cut = np.abs(applied) == limit
    free = applied[~cut]
    size = float(np.dot(free, free))
    if not size:
        return False
    divisor = float(np.dot(terms[~cut], free)) / size
    off = float(np.linalg.norm(terms[~cut] - divisor * free))
    if not divisor or off > bound * abs(divisor) * float(np.linalg.norm(applied)):
        return False
    beyond = np.sign(applied[cut]) * terms[cut] / divisor
    return bool((beyond >= limit * (1 - bound)).all())


def uncut(total: Vectors, mean: Vectors, limit: float) -> tuple[Vectors, Vectors]:
    """Return `total` and `mean` with only the elements of `mean` that were not clipped at `limit`.

    Tensors without such an element are left out.
    """
    free = {name: np.abs(value) != limit for name, value in mean.items()}
    names = [name for name, chosen in free.items() if chosen.any()]
    return (
        {name: total[name][free[name]] for name in names},
        {name: mean[name][free[name]] for name in names},
    )


def _flat(vectors: Vectors) -> NDArray[np.float64]:
    return np.concatenate([np.zeros(0), *(one.astype(np.float64) for one in vectors.values())])
