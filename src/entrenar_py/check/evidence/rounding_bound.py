"""Judge whether rounding explains a tensor's error on a device. Source: wgpu-backend-v1."""

from __future__ import annotations

import math

from entrenar_py.check.evidence import evidence
from entrenar_py.shared.trace import Explained, Trace
from entrenar_py.shared.verdict import Tally


def judge(tally: Tally, item: Explained, trace: Trace) -> None:
    """Count one comparison for the worst element, and one for all elements together if bounded.

    A tensor without a finite bound is counted as missing: no error could exceed an infinite one. A
    note says how many elements have no bound.
    """
    what = f"{item.of}: {item.tensor}"
    place = {"tensor": item.tensor, **evidence.place(trace, item)}
    if not tally.check(item.finite, f"{what} is not finite", **place):
        return
    if not item.num_bounded or math.isinf(item.bound):
        tally.miss(f"{what}: no element of {item.num_elements} has a bound")
    else:
        if without := item.num_elements - item.num_bounded:
            tally.note(f"{what}: {without} of {item.num_elements} elements have no bound")
        message = (
            f"{what} is off by {item.error:.3g} from float64 at element {item.element}, "
            f"rounding explains {item.bound:.3g}"
        )
        tally.at_most(item.bound, item.error, message, form=".3g", element=item.element, **place)
    if math.isinf(item.total_bound):
        tally.miss(f"{what}: its elements together have no bound")
    elif item.total_bound or item.total_error:
        message = (
            f"{what} is off by {item.total_error:.3g} from float64, all elements together; "
            f"rounding explains {item.total_bound:.3g}"
        )
        tally.at_most(item.total_bound, item.total_error, message, form=".3g", **place)
