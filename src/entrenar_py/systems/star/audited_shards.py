"""The logical shards of a step that a second worker computes, too; the scenario draws them."""

from __future__ import annotations

import math
from collections.abc import Collection

from entrenar_py.errors import UsageError
from entrenar_py.scenario import Scenario


def share_of(scenario: Scenario) -> float:
    """The share of a step's shards that is audited; 0 where the scenario does not say."""
    share = scenario.options.get("audit_share", 0)
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not (math.isfinite(share) and 0 <= share <= 1):
        raise UsageError.of("audit_share", share, "use a number from 0 to 1")
    return float(share)


def shards(scenario: Scenario, step: int) -> Collection[int]:
    """The audited shards of `step`: at least one, where any are to be."""
    share = share_of(scenario)
    if not share:
        return ()
    count = max(1, round(share * scenario.num_shards))
    drawn = scenario.rng("audit", step).permutation(scenario.num_shards)[:count]
    return sorted(drawn.tolist())
