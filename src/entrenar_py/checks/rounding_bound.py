"""Judge whether rounding explains a tensor's error on a device. Source: wgpu-backend-v1."""

from __future__ import annotations

import math

from entrenar_py.checks import evidence
from entrenar_py.trace import Explained, Trace
from entrenar_py.verdict import Tally


def judge(tally: Tally, one: Explained, trace: Trace) -> None:
    """Count one comparison for the worst element, and one for all elements together if bounded.

    A tensor without a finite bound is counted as missing, since no error would exceed it. A note
    says how many elements have no bound.
    """
    what = f"{one.of}: {one.tensor}"
    place = {"tensor": one.tensor, **evidence.place(trace, one)}
    if not tally.check(one.finite, f"{what} is not finite", **place):
        return
    if not one.num_bounded or math.isinf(one.bound):
        tally.miss(f"{what}: no element of {one.num_elements} has a bound")
    else:
        if without := one.num_elements - one.num_bounded:
            tally.note(f"{what}: {without} of {one.num_elements} elements have no bound")
        message = (
            f"{what} is off by {one.error:.3g} from float64 at element {one.element}, rounding "
            f"explains {one.bound:.3g}"
        )
        tally.at_most(one.bound, one.error, message, form=".3g", element=one.element, **place)
    if math.isinf(one.total_bound):
        tally.miss(f"{what}: its elements together have no bound")
    elif one.total_bound or one.total_error:
        message = (
            f"{what} is off by {one.total_error:.3g} from float64, all elements together; rounding "
            f"explains {one.total_bound:.3g}"
        )
        tally.at_most(one.total_bound, one.total_error, message, form=".3g", **place)
