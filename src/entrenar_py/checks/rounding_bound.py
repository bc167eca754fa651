"""Whether rounding explains one tensor that a device computed. Source: wgpu-backend-v1."""

from __future__ import annotations

import math

from entrenar_py.scenario import Scenario
from entrenar_py.trace import Explained
from entrenar_py.verdict import Tally


def judge(tally: Tally, one: Explained, scenario: Scenario) -> None:
    """Counts one comparison for the worst element, and one for all together if they are bounded.

    A tensor of which no element has a bound is missing one, and does not pass: nor does one whose
    bound is infinite, which nothing would exceed. Of one of which some have none it is told.
    """
    what = f"{one.of}: {one.tensor}"
    place = {"tensor": one.tensor, "step": one.step, "scenario": scenario}
    if not tally.check(one.finite, f"{what} is not finite", **place):
        return
    if not one.num_bounded or math.isinf(one.bound):
        tally.miss(f"{what}: no element of {one.num_elements} has a bound")
    else:
        if without := one.num_elements - one.num_bounded:
            tally.note(f"{what}: {without} of {one.num_elements} elements have no bound")
        tally.check(
            one.error <= one.bound,
            f"{what} is off by {one.error:.3g} from float64 at element {one.element}, rounding "
            f"explains {one.bound:.3g}",
            element=one.element,
            expected=f"<= {one.bound:.3g}",
            got=f"{one.error:.3g}",
            **place,
        )
    if math.isinf(one.total_bound):
        tally.miss(f"{what}: nothing bounds its elements together")
    elif one.total_bound or one.total_error:
        tally.check(
            one.total_error <= one.total_bound,
            f"{what} is off by {one.total_error:.3g} from float64, all elements together; rounding "
            f"explains {one.total_bound:.3g}",
            expected=f"<= {one.total_bound:.3g}",
            got=f"{one.total_error:.3g}",
            **place,
        )
