"""Compare tensors within a bound: how far two are apart, by their values or projections."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from entrenar_py.check.evidence import evidence, factors
from entrenar_py.check.evidence.evidence import Values
from entrenar_py.shared.trace import TensorRecord, Tensors
from entrenar_py.shared.verdict import Tally

# A gradient's rounding error is proportional to its terms. In one tensor these may cancel almost
# completely, so each tensor's norm is taken to be at least 1 / NOISE_SHARE of the norm of all.
NOISE_SHARE = 32


# |P x|^2 / |x|^2 of a projection P x (`trace.Sketch`) has a chi-square distribution of 32 degrees,
# over 32, or a narrower one. A distance is over twice the true one with a probability of 1e-13, and
# under half of it of 1e-6. So distances of projections may be this much larger than allowed.
PROJECTED = 2.0


def norm_l2(tensors: Tensors) -> float | None:
    """Return the L2 norm of all elements of all tensors; None without values and sketches."""
    squares = [record.square() for record in tensors.values()]
    known = [square for square in squares if square is not None]
    return math.sqrt(sum(known)) if known and len(known) == len(squares) else None


def norm_rounding(tensors: Tensors) -> float:
    """Return by how much, as a share, a norm may be off that was computed in float32.

    On CPUs torch adds up the squares of a tensor in eight sums, each rounded once an element. So a
    norm of n elements is off by n / 2**28 at most. It is too small, unless most elements are equal,
    and a gradient that is clipped by it stays as much too long. Measured were 0.02 % with 2**19
    elements, 0.6 % with 2**24 (a few large ones hide the others, as in the last layer of a language
    model), and 0.9 % with 2**26. Twice the last is allowed. With more elements it grows as n**1.5.
    """
    size = max((record.size or 0 for record in tensors.values()), default=0)
    return min(size / 2**28, 0.02 * math.pow(max(1.0, size / 2**26), 1.5))


def compare_close(
    tally: Tally,
    expected: Tensors,
    got: Tensors,
    bound: float,
    message: str,
    floor: float = 0.0,
    *,
    explain: Callable[[], str] = str,
    of_gradients: bool = False,
    cancelled: Mapping[str, float] | None = None,
    **place: Any,
) -> bool:
    """Count one comparison per tensor: |got - expected| <= bound |expected| + floor, in L2 norms.

    |expected| is the tensor's own norm, so that a small tensor can't hide behind a large one. It is
    taken to be at least 1 / NOISE_SHARE of the norm over all tensors, so that a tensor of rounding
    noise does not fail. The distance of tensors with sketches is that of their projections, which
    may be PROJECTED times as large. A tensor's terms may be many times as large as their sum: by
    how much is `cancelled`, and as much more is allowed. `explain` says why a tensor is off if it
    is no simple multiple of the right one. Return False, and count nothing, if a tensor has neither
    values nor a sketch, or if one side alone has a sketch of it.
    """
    gaps = distances(expected, got)
    if gaps is None:
        return False
    for name, record in expected.items():
        if name not in gaps:
            if name not in got or got[name].size != record.size:
                what = f"{message}: {name} is missing or reshaped"
                tally.check(False, what, tensor=name, **place)
            continue
        gap = gaps[name]
        sketched = record.sketch is not None
        allowed = PROJECTED * bound if sketched else bound
        allowed *= (cancelled or {}).get(name, 1.0)
        near = gap.distance <= allowed * gap.size + (PROJECTED * floor if sketched else floor)
        words = ""
        if not near:
            words = factors.of(
                *(gap.expected, gap.got, place.get("scenario"), bound), of_gradients=of_gradients
            )
            if not words and tally.would_keep(place.get("step", 0)):
                words = explain()
        tally.check(
            near,
            f"{message}: {name} is off by {gap.relative:.2g} of its norm, allowed {allowed:.2g}"
            f"{words and f': {words}'}",
            tensor=name,
            **furthest(record, got[name], gap.elements),
            **place,
        )
    return True


class Gap(NamedTuple):
    """Two tensors' values or projections, flat, and how far they are apart.

    `elements` are the distances of each, `distance` their L2 norm, and `size` the norm that it is
    compared with.
    """

    expected: Values
    got: Values
    elements: Values
    distance: float
    size: float

    @property
    def relative(self) -> float:
        """The distance as a share of the size, or by itself if that is zero."""
        return self.distance / self.size if self.size else self.distance


def distances(expected: Tensors, got: Tensors) -> dict[str, Gap] | None:
    """Return how far tensors of a name are apart, those that are empty or of other sizes left out.

    Return None if a tensor has neither values nor a sketch, or if one side alone has a sketch.
    """
    left, right = evidence.vectors(expected), evidence.vectors(got)
    if left is None or right is None or norm_l2(expected) is None:
        return None
    squares = {name: _finite_square(record) for name, record in expected.items()}
    scale = math.sqrt(math.fsum(squares.values()))
    if any(
        (record.sketch is None) != (got[name].sketch is None)
        for name, record in expected.items()
        if name in got
    ):
        return None
    gaps = {}
    for name, value in left.items():
        if name not in right or got[name].size != expected[name].size or not value.size:
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(right[name].astype(np.float64) - value)
            apart[right[name] == value] = 0.0  # infinities, as in an additive mask
            distance = float(np.sqrt(np.square(apart).sum()))
        size = max(math.sqrt(squares[name]), scale / NOISE_SHARE)
        gaps[name] = Gap(value, right[name], apart, distance, size)
    return gaps


def _finite_square(record: TensorRecord) -> float:
    """Return the squared norm of a tensor, without the elements that are not finite."""
    square = record.square() or 0.0
    if math.isfinite(square):
        return square
    values = record.values()
    finite = np.zeros(0) if values is None else values[np.isfinite(values)].astype(np.float64)
    return float(finite @ finite)


def furthest(expected: TensorRecord, got: TensorRecord, gap: Values) -> dict[str, Any]:
    """Return the element with the largest `gap`, with both values; norms if these are unknown."""
    left, right = expected.values(), got.values()
    if left is None or right is None:
        norms = (math.sqrt(record.square() or 0.0) for record in (expected, got))
        return dict(zip(("expected", "got"), (f"norm {norm:.9g}" for norm in norms), strict=True))
    element = int(gap.argmax()) if np.isfinite(gap).all() else int(np.argmin(np.isfinite(gap)))
    return {"element": element, "expected": str(left[element]), "got": str(right[element])}
