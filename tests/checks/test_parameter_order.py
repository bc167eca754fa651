"""A step of a user's own optimizer must be the same in any order of a group's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrenar_py.checks import parameter_order
from entrenar_py.checks.needs import REORDERED, Runs
from entrenar_py.faults import Fault
from entrenar_py.trace import Drawn, Event, Ruled, Start, Trace, Traits, Update
from entrenar_py.verdict import Tally
from tests.checks import traces
from tests.checks.micro_batch_traces import Vectors, records

SUBJECT = traces.scenario(system="command", workload="own", world_size=1, num_steps=3)
REORDERED_SUBJECT = SUBJECT.with_(faults=(Fault(kind="reordered_groups", step=0),))
SIZES = {"a": 5, "b": 3, "c": 4, "d": 2}
DRAW = np.random.default_rng(8)
FIRST = {name: DRAW.normal(size=size).astype(np.float32) for name, size in SIZES.items()}
GRADIENTS = [{name: DRAW.normal(size=size) for name, size in SIZES.items()} for _ in range(3)]
BETAS = (0.9, 0.99)

# Returns how far each tensor moves in a step: of gradients and weights, in the order of the group.
Rule = Callable[[int, Mapping[str, Any], Mapping[str, Any]], Vectors]


def signs(_: int, gradients: Mapping[str, Any], __: Mapping[str, Any]) -> Vectors:
    """Move by the sign of each element."""
    return {name: 0.1 * np.sign(g) for name, g in gradients.items()}


def clipped(_: int, gradients: Mapping[str, Any], __: Mapping[str, Any]) -> Vectors:
    """Move by gradients that are divided by the norm of all, summed up in the group's order."""
    norm = np.float32(0)
    for g in gradients.values():
        norm = np.float32(norm + np.float32(np.square(g).sum()))
    return {name: 0.1 * g / np.sqrt(norm) for name, g in gradients.items()}


def so_far(_: int, gradients: Mapping[str, Any], __: Mapping[str, Any]) -> Vectors:
    """Move by gradients that are divided by the norm of those that came by then."""
    squares = np.cumsum([np.square(g).sum() for g in gradients.values()])
    return {n: 0.1 * g / np.sqrt(s) for (n, g), s in zip(gradients.items(), squares, strict=True)}


def left_over(_: int, gradients: Mapping[str, Any], weights: Mapping[str, Any]) -> Vectors:
    """Decay what comes before the first small tensor."""
    decays, moves = True, {}
    for name, g in gradients.items():
        decays = decays and g.size > 3
        moves[name] = 0.1 * g + (0.01 * weights[name] if decays else 0)
    return moves


def counted(step: int, gradients: Mapping[str, Any], _: Mapping[str, Any]) -> Vectors:
    """Move as Adam does in its first step, with a step counted for each tensor."""
    first = 1 + 4 * step
    return {
        name: 0.1 * np.sign(g) * np.sqrt(1 - BETAS[1] ** count) / (1 - BETAS[0] ** count)
        for count, (name, g) in enumerate(gradients.items(), first)
    }


def by_place(_: int, gradients: Mapping[str, Any], __: Mapping[str, Any]) -> Vectors:
    """Move each tensor by a rate of its place."""
    return {name: 0.1 * 0.5**place * g for place, (name, g) in enumerate(gradients.items())}


def warmed_up(step: int, gradients: Mapping[str, Any], weights: Mapping[str, Any]) -> Vectors:
    """Move by nothing in the first step, and then by what was left over."""
    return {n: g * (step > 0) for n, g in left_over(step, gradients, weights).items()}


def in_turn(step: int, gradients: Mapping[str, Any], _: Mapping[str, Any]) -> Vectors:
    """Move one tensor in each step."""
    return {n: 0.1 * g * (place == step) for place, (n, g) in enumerate(gradients.items())}


def made(order: str, rule: Rule, **changes: Any) -> Trace:
    """Return a run whose group has the tensors in this order."""
    weights = {name: value.copy() for name, value in FIRST.items()}
    events: list[Event] = [
        Start(step=0, rank=0, weights=records(weights), trainable=(*order,)),
        Ruled(step=0, rank=0, rule="", names=(*order,), constants={"betas": BETAS}, derived=True),
    ]
    for step, gradient in enumerate(GRADIENTS):
        moves = rule(step, {name: gradient[name] for name in order}, weights)
        weights = {n: (w - moves[n]).astype(np.float32) for n, w in weights.items()}
        update = Update(
            step=step,
            rank=0,
            loss=None,
            weight=4,
            learning_rate=0.1,
            finite=True,
            weights=records(weights),
            gradient=records(gradient),
        )
        events.append(replace(update, **(changes if step == 1 else {})))
    subject = SUBJECT if order == "abcd" else REORDERED_SUBJECT
    run = traces.hand_written(*events, subject=subject)
    return replace(run, traits=Traits(rule="own"))


def compared(usual: Trace, turned: Trace) -> Tally:
    """Return the tally of the comparison."""
    tally = Tally("F-TI-008", observed=True)
    parameter_order.compare(tally, Runs(usual, witnesses={REORDERED: (usual, turned)}))
    return tally


def both(rule: Rule) -> Tally:
    """Return the tally of a rule in both orders."""
    return compared(made("abcd", rule), made("cdab", rule))


def test_a_step_that_is_the_same_in_both_orders_counts() -> None:
    """Each tensor of each step is a comparison."""
    tally = both(signs)
    assert (tally.compared, tally.broken) == (12, None)
    assert tally.notes == ["with the parameters of each group in another order: 3 steps the same"]


def test_a_sum_over_parameters_may_be_rounded_otherwise() -> None:
    """A norm of all is, and the steps that begin with such weights are not compared."""
    tally = both(clipped)
    assert tally.broken is None
    assert tally.compared in (4, 8, 12)
    assert not tally.missing


@pytest.mark.parametrize(
    ("rule", "words"),
    [(so_far, "another movement"), (left_over, "another movement"), (counted, "is counted once")],
)
def test_a_step_that_depends_on_the_order_is_wrong(rule: Rule, words: str) -> None:
    """It is found in the first step that begins alike, with its cause where an equation fits."""
    broken = both(rule).broken
    assert broken is not None
    assert (broken.step, broken.rank) == (0, 0)
    assert words in broken.message
    assert "must not depend on the order of the parameters" in broken.message


@pytest.mark.parametrize(
    ("rule", "words"), [(by_place, "place alone"), (in_turn, "turns by place")]
)
def test_what_a_place_may_be_meant_for_is_noted(rule: Rule, words: str) -> None:
    """Rates that fall from layer to layer, and layers that have their turns."""
    tally = both(rule)
    assert (tally.compared, tally.broken, tally.missing) == (0, None, [])
    assert words in tally.notes[0]


def test_a_step_that_moves_nothing_counts_for_nothing() -> None:
    """A rate may begin at zero; the error shows in the next step."""
    tally = both(warmed_up)
    assert tally.broken is not None
    assert tally.broken.step == 1
    assert tally.compared == 4


def test_runs_in_one_order_say_nothing() -> None:
    """The class puts its parameters in an order of its own, or what comes with them kept it."""
    tally = compared(made("abcd", so_far), made("abcd", so_far))
    assert (tally.compared, tally.broken) == (0, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient": records(GRADIENTS[0])},
        {"learning_rate": 0.2},
        {"finite": False},
        {"edited": records({"a": np.ones(5)})},
    ],
    ids=["gradients", "rates", "not finite", "weights"],
)
def test_steps_that_begin_otherwise_are_not_compared(changes: dict[str, Any]) -> None:
    """From there on the runs are two trainings."""
    tally = compared(made("abcd", signs), made("cdab", signs, **changes))
    assert (tally.compared, tally.broken) == (4, None)


def test_a_step_that_draws_is_not_compared() -> None:
    """Noise goes to the tensors in their order."""
    usual = made("abcd", so_far)
    drawn = Drawn(step=0, rank=0, where="step", generator="torch", before="1", after="2")
    noisy = replace(usual, events=(drawn, *usual.events))
    tally = compared(noisy, made("cdab", so_far))
    assert (tally.compared, tally.broken) == (0, None)


def test_a_failed_run_says_nothing() -> None:
    """A class may demand an order (weight, bias, weight, bias)."""
    turned = made("cdab", so_far)
    turned = replace(turned, events=(*turned.events[:-1], traces.FAILED))
    tally = compared(made("abcd", so_far), turned)
    assert (tally.compared, tally.broken, tally.missing) == (0, None, [])


@pytest.mark.parametrize(
    ("kind", "changes"),
    [(Ruled, {"derived": False}), (Ruled, {"names": (*"abc",)}), (Start, {"resumed": True})],
    ids=["of a library", "three tensors", "resumed"],
)
def test_a_run_is_not_made_where_it_says_nothing(
    kind: type[Event], changes: dict[str, Any]
) -> None:
    """An optimizer of a library's is not the user's; a state that is loaded has one order."""
    usual = made("abcd", signs)
    assert parameter_order.is_wanted(usual)
    assert not parameter_order.is_wanted(traces.altered(usual, kind, {}, **changes))
    assert not parameter_order.is_wanted(replace(usual, traits=Traits()))
