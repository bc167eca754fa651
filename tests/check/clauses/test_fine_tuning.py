"""A fine-tuning: its weights, its steps, and adapters of several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.evidence.needs import PEER, SINGLE, Runs
from entrenar_py.shared import trace
from entrenar_py.shared.trace import (
    Adapted,
    Explained,
    Frozen,
    Quantised,
    ReadBack,
    Start,
    Trace,
    Update,
)
from entrenar_py.shared.verdict import Finding, Verdict
from tests import traces
from tests.traces import falsified, left_open

# --- weights --------------------------------------------------------------------------------------

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
        traces.held("merged_model", adapted(merged=right))
    off = merged()
    off[1, 2] *= 1 + 2.0**-18
    assert falsified("merged_model", adapted(merged=off)).element == 7
    twice = traces.judge("merged_model", [adapted(merged=merged(SCALE**2))])
    assert "3 times (alpha / rank) B A" in twice.reason
    left_open("merged_model", traces.hand_written())


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

    traces.held("merged_model", logits(0.9))
    assert falsified("merged_model", logits(1.1)).tensor == "logits"


def test_what_is_added_has_the_rank() -> None:
    """A third direction of a hundredth is seen, noise of the last bit is not."""
    traces.held("adapter_rank", adapted())
    third = merged() + np.float32(0.01) * np.outer(np.arange(4), np.arange(5)[::-1]).astype("f4")
    broken = traces.judge("adapter_rank", [adapted(merged=third)])
    assert "singular value 3" in traces.broken(broken).message
    wide = traces.judge("adapter_rank", [adapted(a=np.vstack([A, A]), b=np.hstack([B, B]))])
    assert "has rank 4, but the configuration has rank 2" in traces.broken(wide).message
    left_open("adapter_rank", traces.hand_written())


def test_adapters_begin_as_nothing() -> None:
    """Either half may be zero."""

    def start(**changes: Any) -> Trace:
        return traces.altered(adapted(**changes), Adapted, {}, when="start")

    for half in ({"a": np.zeros_like(A)}, {"b": np.zeros_like(B)}):
        traces.held("adapter_start", start(**half))
    assert falsified("adapter_start", start()).tensor == "q"
    left_open("adapter_start", adapted())


def test_what_is_read_is_the_last_step() -> None:
    def updates(*numbers: float) -> list[Update]:
        return [
            traces.update(step, weights={"a": traces.values(number), "b": traces.values(number)})
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
    assert "should be in NF4, and no others" in judged(due=False, held=codes).reason
    assert "q is not in NF4" in judged(due=True, held={}).reason
    other = judged(due=True, held={**codes, "scales": traces.values(3)})
    assert "q has different scales than" in traces.broken(other).message
    assert judged(due=True, held={"codes": codes["codes"]}).verdict is Verdict.FALSIFIED
    left_open("nf4_weights", traces.hand_written())


# --- steps ----------------------------------------------------------------------------------------

SUBJECT = traces.scenario(
    world_size=1, optimizer="sgd", learning_rate=0.1, num_steps=3, detail="values"
)
GRADIENTS = np.array([[3.0, 4.0], [1.0, -2.0], [0.5, 0.25]], np.float32)


def run(
    gradients: np.ndarray[Any, Any] = GRADIENTS, losses: tuple[float, ...] = (3, 2, 1)
) -> Trace:
    """Return a run of plain SGD with these gradients."""
    weights = np.ones(2, np.float32)
    events: list[trace.Event] = [
        Start(step=0, rank=0, weights=traces.records({"w": weights}), trainable=("w",), decayed=())
    ]
    for step, (gradient, loss) in enumerate(zip(gradients, losses, strict=True)):
        weights = weights - np.float32(0.1) * gradient
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
        events.append(
            traces.update(
                step,
                loss=float(loss),
                weight=2.0,
                weights=traces.records({"w": weights}),
                gradient=traces.records({"w": gradient}),
                grad_norm=norm,
                applied_norm=norm,
            )
        )
    return traces.hand_written(*events, subject=SUBJECT)


def judged(ours: Trace, *peers: Trace) -> Finding:
    row = CHECKS["peer_steps"]
    return row.judge(traces.clause("peer_steps"), Runs(ours, {PEER: peers}))


def test_equal_runs_follow_each_other() -> None:
    assert judged(run(), run()).verdict is Verdict.HELD


def test_rounding_and_other_weights_explain_a_loss() -> None:
    """A gradient that is off by a rounding moves weights, and the next loss, by as much."""
    nudged = GRADIENTS.copy()
    nudged[0] *= np.float32(1 + 1e-5)
    assert judged(run(), run(nudged, (3, 2 + 1e-5, 1))).verdict is Verdict.HELD
    broken = traces.broken(judged(run(), run(losses=(3, 2 + 1e-3, 1))))
    assert (broken.step, broken.message[:28]) == (1, "the loss is not the peer's: ")


def test_a_first_gradient_must_agree() -> None:
    off = GRADIENTS.copy()
    off[0, 1] *= 1.01
    broken = traces.broken(judged(run(off), run()))
    assert (broken.step, broken.tensor) == (0, "w")


def test_a_step_must_follow_from_its_gradient() -> None:
    ours = run()
    moved = traces.records({"w": np.array([0.71, 0.6])})
    wrong = traces.altered(ours, Update, {"step": 0}, weights=moved)
    broken = traces.broken(judged(wrong, run()))
    assert (broken.step, broken.tensor, broken.element) == (0, "w", 0)
    assert "does not follow" in broken.message


def test_what_can_not_be_compared_is_open() -> None:
    ours = run()
    other = traces.altered(run(), Start, {}, weights=traces.records({"w": np.zeros(2)}))
    for peers in ((), (other,), (traces.failed(SUBJECT),), (traces.without(run(), Start),)):
        assert judged(ours, *peers).verdict is Verdict.INCONCLUSIVE, peers
    bare = traces.altered(ours, Update, {"step": 1}, gradient={}, loss=None)
    assert judged(bare, run()).verdict is not Verdict.HELD
    lost = replace(ours, events=tuple(e for e in ours.events if not isinstance(e, Update)))
    assert judged(lost, run()).verdict is Verdict.INCONCLUSIVE


def test_float64_is_judged_by_what_rounding_explains() -> None:
    def steps(error: float, of: str = "step") -> Trace:
        event = Explained(
            of=of,
            tensor="loss",
            step=1,
            device="cpu",
            software=False,
            finite=True,
            num_elements=1,
            num_bounded=1,
            element=0,
            error=error,
            bound=1.0,
            total_error=error,
            total_bound=1.0,
        )
        return traces.hand_written(event)

    traces.held("textbook_steps", steps(1.0))
    assert falsified("textbook_steps", steps(1.1)).step == 1
    left_open("textbook_steps", steps(9.0, of="merged model"))


# --- adapters of several ranks --------------------------------------------------------------------

FIRST, LAST = np.array([1.0, 2.0], np.float32), np.array([1.5, 1.5], np.float32)


def of_strategy(**arrays: np.ndarray[tuple[int], np.dtype[np.float32]]) -> trace.Tensors:
    return {name: trace.record_tensor(array, values=True) for name, array in arrays.items()}


def single() -> Trace:
    made = traces.update(3, weights=of_strategy(w=LAST))
    return traces.hand_written(Start(step=0, rank=0, weights=of_strategy(w=FIRST)), made)


def judged_strategies(tensors: trace.Tensors, *singles: Trace) -> Finding:
    ranks = traces.hand_written(ReadBack(by="peft", tensors=tensors))
    row = CHECKS["strategy_adapters"]
    return row.judge(traces.clause("strategy_adapters"), Runs(ranks, {SINGLE: singles}))


@pytest.mark.parametrize(
    ("moved", "verdict"), [(1.0, Verdict.HELD), (1.005, Verdict.HELD), (1.02, Verdict.FALSIFIED)]
)
def test_weights_move_as_on_a_single_device(moved: float, verdict: Verdict) -> None:
    written = FIRST + np.float32(moved) * (LAST - FIRST)
    finding = judged_strategies(of_strategy(w=written), single())
    assert finding.verdict is verdict, finding
    found = finding.counterexample
    assert found is None or (found.step, found.tensor) == (3, "w")


def test_a_tensor_that_is_not_written_is_told() -> None:
    assert "w is missing" in judged_strategies(of_strategy(v=FIRST), single()).reason


def test_adapters_that_can_not_be_compared_are_open() -> None:
    bare = {"w": trace.TensorRecord("0" * 32)}
    for finding in (judged_strategies(of_strategy(w=LAST)), judged_strategies(bare, single())):
        assert finding.verdict is Verdict.INCONCLUSIVE
    lost = traces.without(single(), Start)
    assert judged_strategies(of_strategy(w=LAST), lost).verdict is Verdict.INCONCLUSIVE
