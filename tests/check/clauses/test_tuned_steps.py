"""F-FT-009 and F-FT-010 on handwritten traces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.evidence.needs import PEER, Runs
from entrenar_py.shared import trace
from entrenar_py.shared.trace import Explained, Start, Trace, Update
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.clauses import traces

SUBJECT = traces.scenario(
    world_size=1, optimizer="sgd", learning_rate=0.1, num_steps=3, detail="values"
)
GRADIENTS = np.array([[3.0, 4.0], [1.0, -2.0], [0.5, 0.25]], np.float32)


def kept(array: np.ndarray[Any, Any]) -> trace.Tensors:
    return {"w": trace.record_tensor(np.ascontiguousarray(array), values=True)}


def run(
    gradients: np.ndarray[Any, Any] = GRADIENTS, losses: tuple[float, ...] = (3, 2, 1)
) -> Trace:
    """Return a run of plain SGD with these gradients."""
    weights = np.ones(2, np.float32)
    events: list[trace.Event] = [
        Start(step=0, rank=0, weights=kept(weights), trainable=("w",), decayed=())
    ]
    for step, (gradient, loss) in enumerate(zip(gradients, losses, strict=True)):
        weights = weights - np.float32(0.1) * gradient
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
        events.append(
            Update(
                step=step,
                rank=0,
                loss=float(loss),
                weight=2.0,
                learning_rate=0.1,
                finite=True,
                weights=kept(weights),
                gradient=kept(gradient),
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
    moved = kept(np.array([0.71, 0.6], np.float32))
    wrong = traces.altered(ours, Update, {"step": 0}, weights=moved)
    broken = traces.broken(judged(wrong, run()))
    assert (broken.step, broken.tensor, broken.element) == (0, "w", 0)
    assert "does not follow" in broken.message


def test_what_can_not_be_compared_is_open() -> None:
    ours = run()
    other = traces.altered(run(), Start, {}, weights=kept(np.zeros(2, np.float32)))
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

    assert traces.judge("textbook_steps", [steps(1.0)]).verdict is Verdict.HELD
    assert traces.broken(traces.judge("textbook_steps", [steps(1.1)])).step == 1
    other = traces.judge("textbook_steps", [steps(9.0, of="merged model")])
    assert other.verdict is Verdict.INCONCLUSIVE
