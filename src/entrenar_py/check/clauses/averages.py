"""F-WP-007: averages of the original system's wire follow from the shards' gradients alone.

Source: wire-protocol-v1.
"""

from __future__ import annotations

from typing import Any

from entrenar_py.check.clauses import probes
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Heard, Trace
from entrenar_py.shared.verdict import Tally

ROUNDINGS_MAX = 1.0  # in the unit of `Heard.roundings`


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan two seeds of terms and orders, and as many shards as workers, or more."""
    sizes: dict[str, Any] = {"num_samples": 23, "batch_size": 10, "num_steps": 4}
    return [
        probes.scenario(
            "averaging", world_size=world_size, num_shards=num_shards, seed=seed, **sizes
        )
        for seed in range(2)
        for world_size, num_shards in ((3, 3), (2, 5))
    ]


def compare(tally: Tally, trace: Trace) -> None:
    """Check that everyone heard the right average, with the same bits under every schedule."""
    first: dict[tuple[int, str], Heard] = {}
    for heard in trace.of(Heard):
        what = f"the average of {heard.part} in step {heard.step}, with {heard.case}"
        place = {"step": heard.step, "tensor": heard.case, "scenario": trace.scenario}
        if heard.poisoned:
            tally.equal(None, heard.digest, f"{what}, was sent, though a term is a NaN", **place)
            continue
        if not tally.check(heard.roundings is not None, f"{what}, was not heard alike", **place):
            continue
        assert heard.roundings is not None, "it was just compared"
        deviation = f"{what}, is not the weighted mean"
        tally.at_most(
            ROUNDINGS_MAX, heard.roundings, deviation, form=".3g", element=heard.element, **place
        )
        known = first.setdefault((heard.step, heard.part), heard)
        other = f"{what}, has other bits than with {known.case}"
        tally.equal(known.digest, heard.digest, other, **place)


ROWS = (
    Check(
        name="averages",
        id="F-WP-007",
        decides="averages for workers of the original system have the bits of the shards in order",
        spoken_of="upstream",
        judge=probes.judge(compare, "nothing was averaged"),
        plan=plan,
    ),
)
