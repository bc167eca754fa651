"""F-FT-016 on handwritten traces."""

from __future__ import annotations

import numpy as np
import pytest

from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.evidence.needs import SINGLE, Runs
from entrenar_py.shared import trace
from entrenar_py.shared.trace import ReadBack, Start, Trace, Update
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.clauses import traces

FIRST, LAST = np.array([1.0, 2.0], np.float32), np.array([1.5, 1.5], np.float32)


def kept(**arrays: np.ndarray[tuple[int], np.dtype[np.float32]]) -> trace.Tensors:
    return {name: trace.record_tensor(array, values=True) for name, array in arrays.items()}


def single() -> Trace:
    made = Update(
        step=3,
        rank=0,
        loss=1.0,
        weight=1.0,
        learning_rate=0.1,
        finite=True,
        weights=kept(w=LAST),
    )
    return traces.hand_written(Start(step=0, rank=0, weights=kept(w=FIRST)), made)


def judged(tensors: trace.Tensors, *singles: Trace) -> Finding:
    ranks = traces.hand_written(ReadBack(by="peft", tensors=tensors))
    row = CHECKS["strategy_adapters"]
    return row.judge(traces.clause("strategy_adapters"), Runs(ranks, {SINGLE: singles}))


@pytest.mark.parametrize(
    ("moved", "verdict"), [(1.0, Verdict.HELD), (1.005, Verdict.HELD), (1.02, Verdict.FALSIFIED)]
)
def test_weights_move_as_on_a_single_device(moved: float, verdict: Verdict) -> None:
    written = FIRST + np.float32(moved) * (LAST - FIRST)
    finding = judged(kept(w=written), single())
    assert finding.verdict is verdict, finding
    found = finding.counterexample
    assert found is None or (found.step, found.tensor) == (3, "w")


def test_a_tensor_that_is_not_written_is_told() -> None:
    assert "w is missing" in judged(kept(v=FIRST), single()).reason


def test_what_can_not_be_compared_is_open() -> None:
    bare = {"w": trace.TensorRecord("0" * 32)}
    for finding in (judged(kept(w=LAST)), judged(bare, single())):
        assert finding.verdict is Verdict.INCONCLUSIVE
    lost = traces.without(single(), Start)
    assert judged(kept(w=LAST), lost).verdict is Verdict.INCONCLUSIVE
