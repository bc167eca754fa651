"""The formulas of the step rule against torch.optim, and the steps they can't recompute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from entrenar_py.check.causes import update_rule
from entrenar_py.check.causes.update_rule import Moments, Rule
from entrenar_py.shared.trace import (
    Event,
    Ruled,
    Start,
    TensorRecord,
    Tensors,
    Trace,
    Traits,
    Update,
    record_tensor,
)
from entrenar_py.shared.verdict import Verdict
from tests import traces
from tests.traces import falsified, hand_written, scenario, values

NUM_STEPS, RATE, DECAY, CLIP = 6, 0.05, 0.1, 0.5


def record(tensor: torch.Tensor | None) -> Tensors:
    assert tensor is not None
    return {"w": record_tensor(tensor.detach().numpy().copy(), values=True)}


def update(step: int, weights: Tensors, gradient: Tensors, **changes: Any) -> Update:
    """Return an update clipped to half its norm, unless `changes` say otherwise."""
    usual: Mapping[str, Any] = {
        "step": step,
        "rank": 0,
        "loss": 1.0,
        "weight": 1.0,
        "learning_rate": RATE,
        "finite": True,
        "grad_norm": 1.0,
        "applied_norm": CLIP,
    }
    return Update(weights=weights, gradient=gradient, **{**usual, **changes})


def rule(
    optimizer: str,
    weights: Tensors,
    *,
    step: int = 0,
    decayed: Any = ("w",),
    clip_norm: float | None = CLIP,
) -> Rule:
    """Return the rule of a rank that starts with `weights` before `step`."""
    start = Start(step=step, rank=0, weights=weights, decayed=decayed)
    subject = scenario(optimizer=optimizer, weight_decay=DECAY, clip_norm=clip_norm)
    return update_rule.after({}, start, hand_written(subject=subject))


def trace_of(followed: Rule) -> Trace:
    """Return an empty trace of the rule's run."""
    return hand_written(subject=followed.scenario)


def trained(optimizer: str) -> tuple[Tensors, list[Update]]:
    """Return the initial weights and the updates of torch's optimizer on random gradients."""
    weight = torch.linspace(-1, 1, 7, dtype=torch.float64).requires_grad_()
    kinds: Mapping[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD([weight], lr=RATE, weight_decay=DECAY),
        "momentum": lambda: torch.optim.SGD([weight], lr=RATE, momentum=0.9, weight_decay=DECAY),
        "adamw": lambda: torch.optim.AdamW([weight], lr=RATE, weight_decay=DECAY),
    }
    torch_optimizer = kinds[optimizer]()
    initial, updates, rng = record(weight), [], np.random.default_rng(0)
    for step in range(NUM_STEPS):
        gradient = torch.from_numpy(rng.normal(size=7))
        weight.grad = gradient * CLIP
        torch_optimizer.step()
        updates.append(update(step, record(weight), record(gradient)))
    return initial, updates


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_the_formulas_are_torchs(optimizer: str) -> None:
    """In float64 the two differ by rounding only, step after step."""
    initial, updates = trained(optimizer)
    followed = rule(optimizer, initial)
    for one in updates:
        ((name, expected),) = followed.step(one)
        got = one.weights[name].values()
        assert got is not None
        np.testing.assert_allclose(expected.weight, got, rtol=1e-12, atol=1e-14)
        assert (expected.moved > 0).all()


def test_kernels_with_betas_in_float32_are_off_by_more() -> None:
    """Adam on a GPU, fused or capturable, keeps betas and their powers in float32: 1 - 0.999 is off
    by hundreds of roundings there, which only the trait of such a run allows.
    """
    betas = np.float32(0.9), np.float32(0.999)
    weight, rng = np.linspace(-1, 1, 7), np.random.default_rng(0)
    first = second = np.zeros(7)
    followed = rule("adamw", record(torch.from_numpy(weight)))
    told = replace(followed.traits, betas_in="float32")
    short = replace(followed, traits=told, moments={})
    off = []
    for step in range(NUM_STEPS):
        gradient = rng.normal(size=7)
        first = 0.9 * first + 0.1 * gradient * CLIP
        second = 0.999 * second + 0.001 * np.square(gradient * CLIP)
        powers = [float(1 - beta ** np.float32(step + 1)) for beta in betas]
        root = np.sqrt(second / powers[1]) + 1e-8
        weight = weight * (1 - RATE * DECAY) - RATE * first / powers[0] / root
        one = update(step, record(torch.from_numpy(weight)), record(torch.from_numpy(gradient)))
        for each in (followed, short):
            ((_, expected),) = each.step(one)
            rounding = update_rule.rounding(trace_of(followed), one)
            gap = np.abs(weight - expected.weight) - update_rule.allowed(rounding, expected)
            off.append(bool((gap > 0).any()))
    assert any(off[::2])
    assert not any(off[1::2])


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_a_step_without_a_gradient(optimizer: str) -> None:
    """A tensor without a gradient skips the step, as in torch: its moments count fewer steps. Its
    own rate applies.
    """
    kind = torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD
    more: dict[str, Any] = {} if optimizer == "adamw" else {"momentum": 0.9}
    weight = torch.linspace(-1, 1, 7, dtype=torch.float64).requires_grad_()
    torch_optimizer = kind([weight], lr=2 * RATE, weight_decay=DECAY, **more)
    followed = rule(optimizer, record(weight))
    for step in range(NUM_STEPS):
        gradient = torch.full((7,), float(step + 1), dtype=torch.float64) if step % 3 else None
        weight.grad = None if gradient is None else gradient * CLIP
        torch_optimizer.step()
        given = {} if gradient is None else record(gradient)
        for _, expected in followed.step(
            update(step, record(weight), given, rates={"w": 2 * RATE})
        ):
            got = weight.detach().numpy()
            np.testing.assert_allclose(expected.weight, got, rtol=1e-12, atol=1e-14)
    assert followed.moments["w"].steps == NUM_STEPS * 2 // 3


@pytest.mark.parametrize(("optimizer", "known"), [("sgd", True), ("adamw", False)])
def test_moments_that_are_not_known(optimizer: str, known: bool) -> None:
    """A rank that joined, or missed a step, has unknown moments; plain SGD needs none."""
    _, updates = trained(optimizer)
    joined = rule(optimizer, updates[2].weights, step=3)
    assert bool(list(joined.step(updates[3]))) == known
    followed = rule(optimizer, updates[0].weights)
    list(followed.step(updates[0]))
    assert bool(list(followed.step(updates[2]))) == known
    assert bool(list(followed.step(updates[3]))) == known


def test_a_resume_keeps_the_moments() -> None:
    """After a resume the rule goes on, from the weights that were loaded."""
    initial, updates = trained("momentum")
    followed = rule("momentum", initial)
    list(followed.step(updates[0]))
    resumed = Start(step=1, rank=0, weights=updates[0].weights, resumed=True)
    assert update_rule.after({0: followed}, resumed, trace_of(followed)) is followed
    assert list(followed.step(updates[1]))


def test_who_joins_has_the_moments_of_the_others() -> None:
    """A rank that joins gets the moments of another rank at that step, if one is there."""
    initial, updates = trained("momentum")
    there = rule("momentum", initial)
    list(there.step(updates[0]))
    for step, known in ((1, True), (2, False)):
        start = Start(step=step, rank=1, weights=updates[step - 1].weights, decayed=("w",))
        joined = update_rule.after({0: there}, start, trace_of(there))
        assert bool(list(joined.step(updates[step]))) == known
    ((_, expected),) = there.step(updates[1])
    got = updates[1].weights["w"].values()
    assert got is not None
    np.testing.assert_allclose(expected.weight, got, rtol=1e-12)


@pytest.mark.parametrize("saved", [True, False])
def test_who_goes_back_has_the_moments_of_then(saved: bool) -> None:
    """A rank that resumes from a checkpoint gets the moments of then, even twice."""
    initial, updates = trained("adamw")
    followed = rule("adamw", initial)
    for step in (0, 1, 2, 3):
        if step == 2 and saved:
            followed.save(step)
        list(followed.step(updates[step]))
    for _ in range(2):
        back = Start(step=2, rank=0, weights=updates[1].weights, resumed=True)
        followed = update_rule.after({0: followed}, back, trace_of(followed))
        for step in (2, 3):
            found = list(followed.step(updates[step]))
            assert bool(found) == saved
            got = updates[step].weights["w"].values()
            assert got is not None
            for _, expected in found:
                np.testing.assert_allclose(expected.weight, got, rtol=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"grad_norm": None},
        {"applied_norm": None},
        {"grad_norm": float("inf")},
        {"finite": False},
        {"gradient": {"w": TensorRecord("digest alone")}},
        {"gradient": {"other": TensorRecord("digest alone")}},
    ],
)
def test_what_was_not_recorded(changes: dict[str, Any]) -> None:
    """Without gradient, norms or weights nothing is expected, and the moments become unknown."""
    initial, updates = trained("momentum")
    followed = rule("momentum", initial)
    assert not list(
        followed.step(update(0, updates[0].weights, **{"gradient": updates[0].gradient, **changes}))
    )
    assert not list(followed.step(updates[1]))


def test_no_clipping_needs_no_norms() -> None:
    """Without clipping the gradient is applied as it is; a NaN gradient determines no step."""
    initial, updates = trained("sgd")
    bare = {"grad_norm": None, "applied_norm": None}
    gradient = updates[0].gradient
    unclipped = rule("sgd", initial, clip_norm=None)
    ((_, whole),) = unclipped.step(update(0, updates[0].weights, gradient, **bare))
    ((_, same),) = rule("sgd", initial).step(
        update(0, updates[0].weights, gradient, applied_norm=1.0)
    )
    assert np.array_equal(whole.weight, same.weight)
    bad = {"w": traces.values(*[float("nan")] * 7, dtype="float64")}
    assert not list(unclipped.step(update(1, updates[1].weights, bad, **bare)))


def test_decay_that_was_not_declared() -> None:
    """Nothing is expected until the trainer declares which tensors decay."""
    initial, updates = trained("sgd")
    assert not list(rule("sgd", initial, decayed=None).step(updates[0]))
    (_, plain), (_, decayed) = (
        next(rule("sgd", initial, decayed=names).step(updates[0])) for names in ((), ("w",))
    )
    assert not np.array_equal(plain.weight, decayed.weight)


@pytest.mark.parametrize(
    "constants",
    [
        {"momentum": 0.8},
        {"momentum": 0.8, "dampening": 0.3},
        {"momentum": 0.8, "nesterov": True},
        {"betas": (0.8, 0.95), "eps": 1e-6},
        {"betas": (0.9, 0.999), "weight_decay": 0.3},
    ],
)
def test_declared_constants_are_used(constants: dict[str, Any]) -> None:
    """A user's trainer with other constants holds only if it declares them."""
    trace = _trained(constants)
    traits = {"decay": "coupled"} if "weight_decay" in constants else constants
    declared = traces.was(trace, **traits)
    traces.held("step_rule", declared)
    falsified("step_rule", trace)


def test_a_schedule_of_ones_own() -> None:
    """An unknown schedule is missing, and the rest of the rule is judged."""
    trace = _trained({"momentum": 0.9})
    subject = replace(trace, scenario=trace.scenario.with_(schedule="linear"))
    finding = traces.judge("step_rule", [traces.was(subject, schedule="other")])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "schedule is not one that is known here" in finding.reason
    assert finding.compared > 0


def _trained(constants: dict[str, Any]) -> Trace:
    """Return a trace of five steps of torch.optim with `constants` on random gradients."""
    adam = "betas" in constants
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 7))
    decay = constants.get("weight_decay", 0.0)
    adams = torch.optim.Adam if decay else torch.optim.AdamW
    kind = adams if adam else torch.optim.SGD
    extra = {"weight_decay": decay} if adam else {}
    optimizer = kind([weight], lr=0.1, **{**constants, **extra})
    subject = scenario(
        workload="own",
        optimizer="adamw" if adam else "momentum",
        world_size=1,
        num_steps=5,
        learning_rate=0.1,
        weight_decay=decay,
    )
    held = {"w": record_tensor(weight.detach().numpy(), values=True)}
    events: list[Event] = [Start(step=0, rank=0, weights=held, decayed=("w",))]
    rng = np.random.default_rng(0)
    for step in range(5):
        gradient = rng.normal(size=7).astype(np.float32)
        weight.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
        events.append(
            traces.update(
                step,
                weights={"w": record_tensor(weight.detach().numpy(), values=True)},
                gradient={"w": record_tensor(gradient, values=True)},
                grad_norm=norm,
                applied_norm=norm,
            )
        )
    return traces.hand_written(*events, subject=subject)


# --- torch rules ----------------------------------------------------------------------------------
# The rules that steps are recomputed by are those of torch.optim, and judge F-TI-008.


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
    told = {key: group[key] for key in vars(update_rule.Constants()) if key in group}
    rule = update_rule.rule_of(ruled(kind, told))
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
    assert update_rule.rule_of(event) is None


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
            traces.update(
                step, loss=None, weights={"w": values(weight)}, gradient={"w": values(slopes[step])}
            ),
        ]
    made = traces.hand_written(*events, subject=subject)
    return replace(made, traits=Traits(rule="own" if how else "other", clipping="other"))


def test_a_cycle_of_momentum_is_followed() -> None:
    """Constants that change from step to step are those of the step."""
    traces.held("step_rule", stepped([0.9, 0.8, 0.7, 0.8]))
    finding = traces.judge("step_rule", [stepped([0.9, 0.8, 0.7, 0.8], wrong=2)])
    assert (traces.broken(finding).step, traces.broken(finding).tensor) == (2, "w")
    assert "twice as large" in traces.broken(finding).message


def test_a_class_of_the_user_s_may_step_otherwise() -> None:
    """It is judged by the class it is derived from if it steps so, and else it isn't."""
    made = [stepped([0.9] * 4, derived=True), stepped([0.9] * 4, wrong=1, derived=True)]
    verdicts = [traces.judge("step_rule", [one]).verdict for one in made]
    assert verdicts[0] is Verdict.HELD
    assert verdicts[1] is not Verdict.FALSIFIED
