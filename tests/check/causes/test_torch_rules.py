"""The rules that steps are recomputed by are those of torch.optim, and judge F-TI-008."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from entrenar_py.check.causes import torch_rules
from entrenar_py.check.causes.torch_rules import Moments
from entrenar_py.shared.trace import Ruled, Start, Trace, Traits, Update
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses import traces
from tests.check.clauses.traces import values

RULES: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.8, "nesterov": True, "maximize": True}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1, "betas": (0.5, 0.6)}),
    ("AdamW", {"amsgrad": True, "maximize": True, "weight_decay": 0.1}),
    ("NAdam", {"weight_decay": 0.1}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "momentum_decay": 0.1}),
    ("RAdam", {"weight_decay": 0.1}),
    ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.9, 0.99)}),
    ("Adamax", {"weight_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.7, "weight_decay": 0.1}),
    ("RMSprop", {"alpha": 0.9}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.2, "weight_decay": 0.1}),
    ("Adadelta", {"rho": 0.8, "weight_decay": 0.1}),
]


def ruled(
    kind: str, constants: Mapping[str, Any], *, step: int = 0, derived: bool = False
) -> Ruled:
    """Return the rule of the only tensor."""
    return Ruled(step=step, rank=0, rule=kind, names=("w",), constants=constants, derived=derived)


@pytest.mark.parametrize(("kind", "constants"), RULES)
def test_a_rule_is_torch_s(kind: str, constants: Mapping[str, Any]) -> None:
    """Eight steps of random gradients, in float64, end where torch's optimizer ends."""
    rng = np.random.default_rng(0)
    weight = torch.nn.Parameter(torch.tensor(rng.normal(size=5)))
    optimizer = getattr(torch.optim, kind)([weight], **constants)
    group = optimizer.param_groups[0]
    told = {key: group[key] for key in vars(torch_rules.Constants()) if key in group}
    rule = torch_rules.of(ruled(kind, told))
    assert rule is not None
    mine, moments = weight.detach().numpy().copy(), Moments()
    for _ in range(8):
        slope = rng.normal(size=5)
        weight.grad = torch.tensor(slope)
        optimizer.step()
        moved, size = rule.move(moments, slope, mine, float(group["lr"]))
        mine = mine - moved
        assert (np.abs(moved) <= size + 1e-15).all()
        np.testing.assert_allclose(mine, weight.detach().numpy(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "event", [ruled("Own", {}), ruled("SGD", {"momentum": "x"}), ruled("Adam", {"betas": [0.9]})]
)
def test_a_rule_that_is_not_known(event: Ruled) -> None:
    """Another class, or constants that are none, are no rule to judge by."""
    assert torch_rules.of(event) is None


def stepped(momenta: Sequence[float], *, wrong: int | None = None, **how: Any) -> Trace:
    """Return a run of SGD under other momenta in each step; step `wrong` goes twice as far."""
    subject = traces.scenario(world_size=1, workload="own", learning_rate=0.1)
    weight, buffer, slopes = 1.0, 0.0, [0.5, -0.25, 0.75, 0.5]
    events: list[Any] = [
        Start(step=0, rank=0, weights={"w": values(weight)}, trainable=("w",), decayed=())
    ]
    for step, momentum in enumerate(momenta):
        buffer = slopes[step] if not step else momentum * buffer + slopes[step]
        weight -= 0.1 * buffer * (2 if step == wrong else 1)
        events += [
            ruled("SGD", {"momentum": momentum, "weight_decay": 0}, step=step, **how),
            Update(
                step=step,
                rank=0,
                loss=None,
                weight=1.0,
                learning_rate=0.1,
                finite=True,
                weights={"w": values(weight)},
                gradient={"w": values(slopes[step])},
            ),
        ]
    made = traces.hand_written(*events, subject=subject)
    return replace(made, traits=Traits(rule="own" if how else "other", clipping="other"))


def test_a_cycle_of_momentum_is_followed() -> None:
    """Constants that change from step to step are those of the step."""
    assert traces.judge("step_rule", [stepped([0.9, 0.8, 0.7, 0.8])]).verdict is Verdict.HELD
    finding = traces.judge("step_rule", [stepped([0.9, 0.8, 0.7, 0.8], wrong=2)])
    assert (traces.broken(finding).step, traces.broken(finding).tensor) == (2, "w")
    assert "twice as large" in traces.broken(finding).message


def test_a_class_of_the_user_s_may_step_otherwise() -> None:
    """It is judged by the class it is derived from if it steps so, and else it isn't."""
    made = [stepped([0.9] * 4, derived=True), stepped([0.9] * 4, wrong=1, derived=True)]
    verdicts = [traces.judge("step_rule", [one]).verdict for one in made]
    assert verdicts[0] is Verdict.HELD
    assert verdicts[1] is not Verdict.FALSIFIED
