"""F-KD-010 on hand-written traces. The other clauses of the family are tried by the kill matrix."""

from __future__ import annotations

import pytest

from entrenar_py.check.clauses import distillation
from entrenar_py.shared.trace import Trace, TurnedAway
from entrenar_py.shared.verdict import Tally, Verdict


@pytest.mark.parametrize(
    ("refused", "kind", "verdict"),
    [
        ("in words that change", "size", Verdict.HELD),
        ("no Parquet file", "", Verdict.FALSIFIED),  # refused, but for another reason
        (None, None, Verdict.FALSIFIED),
        ("20 bytes, and the list says 40", None, Verdict.INCONCLUSIVE),  # of an earlier build
    ],
)
def test_a_refusal_is_recognised_by_its_kind(
    refused: str | None, kind: str | None, verdict: Verdict
) -> None:
    events = [
        TurnedAway(what=what, refused="x", error_kind=due)
        for what, due in distillation.REFUSALS.items()
        if due != "size"
    ]
    scenario = distillation.planned(task="text", facts=["refusals"])
    events.append(TurnedAway(what="half of a shard", refused=refused, error_kind=kind))
    run = Trace(scenario=scenario, environment={}, promises=(), events=tuple(events))
    tally = Tally("F-KD-010")
    distillation.compare_refusals(tally, run)
    assert tally.finding(nothing="").verdict is verdict
