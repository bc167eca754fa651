"""F-FT-001 to F-FT-005 on handwritten traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from entrenar_py.shared import trace
from entrenar_py.shared.trace import Adapted, Explained, Frozen, Quantised, ReadBack, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses import traces

RNG = np.random.default_rng(0)
A = RNG.normal(size=(2, 5)).astype(np.float32)
B = RNG.normal(size=(4, 2)).astype(np.float32)
BASE = RNG.normal(size=(4, 5)).astype(np.float32)
SCALE = 3.0  # alpha / rank


def merged(scale: float = SCALE) -> NDArray[np.float32]:
    return BASE + np.float32(scale) * (B @ A)


def adapted(**changes: Any) -> Trace:
    arrays = {"a": A, "b": B, "base": BASE, "merged": merged(), **changes}
    event = Adapted(
        when="merged",
        layer="q",
        rank=2,
        alpha=2 * SCALE,
        shape=(4, 5),
        tensors={
            name: trace.record_tensor(np.ascontiguousarray(array), values=True)
            for name, array in arrays.items()
        },
    )
    return traces.hand_written(event)


def frozen(*digests: Mapping[str, float]) -> Trace:
    return traces.hand_written(
        *(
            Frozen(
                when=f"time {place}",
                weights={name: traces.values(value) for name, value in weights.items()},
            )
            for place, weights in enumerate(digests)
        )
    )


@pytest.mark.parametrize(
    ("records", "verdict", "tensor"),
    [
        (({"w": 1.0, "v": 2.0}, {"w": 1.0}, {"w": 1.0}), Verdict.HELD, None),
        (({"w": 1.0}, {"w": 1.0}, {"w": -1.0}), Verdict.FALSIFIED, "w"),
        (({"v": 1.0}, {"w": 1.0}, {"w": 2.0}), Verdict.FALSIFIED, "w"),
        (({"w": 1.0}, {"v": 1.0}), Verdict.INCONCLUSIVE, None),
        ((), Verdict.INCONCLUSIVE, None),
    ],
)
def test_each_frozen_weight_keeps_its_first_bits(
    records: tuple[Mapping[str, float], ...], verdict: Verdict, tensor: str | None
) -> None:
    finding = traces.judge("frozen_weights", [frozen(*records)])
    assert finding.verdict is verdict, finding
    found = finding.counterexample
    assert (None if found is None else found.tensor) == tensor


def test_a_merged_weight_is_right_within_rounding() -> None:
    """Another order of roundings is right, a change of some roundings is not."""
    exact = (BASE + SCALE * (B.astype(np.float64) @ A)).astype(np.float32)
    for right in (merged(), exact):
        assert traces.judge("merged_model", [adapted(merged=right)]).verdict is Verdict.HELD
    off = merged()
    off[1, 2] *= 1 + 2.0**-18
    assert traces.broken(traces.judge("merged_model", [adapted(merged=off)])).element == 7
    twice = traces.judge("merged_model", [adapted(merged=merged(SCALE**2))])
    assert "3 times (alpha / rank) B A" in twice.reason
    assert traces.judge("merged_model", [traces.hand_written()]).verdict is Verdict.INCONCLUSIVE


def test_outputs_of_the_merged_model_are_judged_too() -> None:
    def logits(error: float) -> Trace:
        event = Explained(
            of="merged model",
            tensor="logits",
            device="cpu",
            software=False,
            finite=True,
            num_elements=2,
            num_bounded=2,
            element=1,
            error=error,
            bound=1.0,
        )
        return traces.hand_written(event)

    assert traces.judge("merged_model", [logits(0.9)]).verdict is Verdict.HELD
    assert traces.broken(traces.judge("merged_model", [logits(1.1)])).tensor == "logits"


def test_what_is_added_has_the_rank() -> None:
    """A third direction of a hundredth is seen, noise of the last bit is not."""
    assert traces.judge("adapter_rank", [adapted()]).verdict is Verdict.HELD
    third = merged() + np.float32(0.01) * np.outer(np.arange(4), np.arange(5)[::-1]).astype("f4")
    broken = traces.judge("adapter_rank", [adapted(merged=third)])
    assert "singular value 3" in traces.broken(broken).message
    wide = traces.judge("adapter_rank", [adapted(a=np.vstack([A, A]), b=np.hstack([B, B]))])
    assert "has 4 rows, rank 2" in traces.broken(wide).message
    assert traces.judge("adapter_rank", [traces.hand_written()]).verdict is Verdict.INCONCLUSIVE


def test_adapters_begin_as_nothing() -> None:
    """Either half may be zero."""

    def start(**changes: Any) -> Trace:
        return traces.altered(adapted(**changes), Adapted, {}, when="start")

    for half in ({"a": np.zeros_like(A)}, {"b": np.zeros_like(B)}):
        assert traces.judge("adapter_start", [start(**half)]).verdict is Verdict.HELD
    assert traces.broken(traces.judge("adapter_start", [start()])).tensor == "q"
    assert traces.judge("adapter_start", [adapted()]).verdict is Verdict.INCONCLUSIVE


def test_what_is_read_is_the_last_step() -> None:
    def updates(*numbers: float) -> list[Update]:
        return [
            Update(
                step=step,
                rank=0,
                loss=1.0,
                weight=1.0,
                learning_rate=0.1,
                finite=True,
                weights={"a": traces.values(number), "b": traces.values(number)},
            )
            for step, number in enumerate(numbers)
        ]

    def read(**numbers: float) -> ReadBack:
        tensors = {name: traces.values(number) for name, number in numbers.items()}
        return ReadBack(by="peft", tensors=tensors)

    def judged(*events: Any) -> Any:
        return traces.judge("written_weights", [traces.hand_written(*events)])

    assert judged(*updates(1.0, 2.0), read(a=2.0, b=2.0)).verdict is Verdict.HELD
    assert traces.broken(judged(*updates(1.0, 2.0), read(a=2.0, b=1.0))).tensor == "b"
    assert "peft finds no such tensor" in judged(*updates(1.0, 2.0), read(a=2.0)).reason
    assert judged(read(a=1.0)).verdict is Verdict.INCONCLUSIVE
    assert judged(*updates(1.0)).verdict is Verdict.INCONCLUSIVE


def test_weights_in_nf4_are_the_stock_ones() -> None:
    codes = {"codes": traces.values(1), "scales": traces.values(2)}

    def judged(*, due: bool, held: trace.Tensors) -> Any:
        event = Quantised(layer="q", due=due, held=held, stock=codes)
        return traces.judge("nf4_weights", [traces.hand_written(event)])

    assert judged(due=True, held=codes).verdict is Verdict.HELD
    assert judged(due=False, held={}).verdict is Verdict.HELD
    assert "should be, and no others" in judged(due=False, held=codes).reason
    assert "q is not in NF4" in judged(due=True, held={}).reason
    other = judged(due=True, held={**codes, "scales": traces.values(3)})
    assert "q has other scales than" in traces.broken(other).message
    assert judged(due=True, held={"codes": codes["codes"]}).verdict is Verdict.FALSIFIED
    assert traces.judge("nf4_weights", [traces.hand_written()]).verdict is Verdict.INCONCLUSIVE
