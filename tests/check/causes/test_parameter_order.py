"""A step of a user's own optimizer must be the same in any order of a group's parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrenar_py.check.causes import parameter_order
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import Event, Ruled, Start, Trace, Traits, Update
from entrenar_py.shared.verdict import Tally
from tests import traces
from tests.check.clauses.micro_batch_traces import Vectors

SUBJECT = traces.scenario(system="command", workload="own", world_size=1, num_steps=3)
REORDERED_SUBJECT = SUBJECT.with_(faults=(Fault(kind="reordered_groups", step=0),))
SIZES = {"a": 50, "b": 30, "c": 50, "d": 30}
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
        decays = decays and g.size > 30
        moves[name] = 0.1 * g + (0.01 * weights[name] if decays else 0)
    return moves


def counted(key: Callable[[str], Hashable]) -> Rule:
    """Return a rule that moves as Adam does at first, a counter of a key for each tensor."""
    counts = Counter[Hashable]()

    def rule(step: int, gradients: Mapping[str, Any], _: Mapping[str, Any]) -> Vectors:
        if step == 0:
            counts.clear()
        moves = {}
        for name, g in gradients.items():
            counts[key(name)] += 1
            count = counts[key(name)]
            factor = np.sqrt(1 - BETAS[1] ** count) / (1 - BETAS[0] ** count)
            moves[name] = 0.1 * np.sign(g) * factor
        return moves

    return rule


def noisy(_: int, gradients: Mapping[str, Any], __: Mapping[str, Any]) -> Vectors:
    """Move by gradients and noise, which is drawn for one tensor after the other."""
    draw = np.random.default_rng(5)
    return {name: 0.1 * g + draw.normal(size=g.size) / 50 for name, g in gradients.items()}


def by_place(_: int, gradients: Mapping[str, Any], __: Mapping[str, Any]) -> Vectors:
    """Move each tensor by a rate of its place."""
    return {name: 0.1 * 0.5**place * g for place, (name, g) in enumerate(gradients.items())}


def in_turn(step: int, gradients: Mapping[str, Any], _: Mapping[str, Any]) -> Vectors:
    """Move one tensor in each step."""
    return {n: 0.1 * g * (place == step) for place, (n, g) in enumerate(gradients.items())}


def undecayed_end(_: int, gradients: Mapping[str, Any], weights: Mapping[str, Any]) -> Vectors:
    """Decay all but the last layer, by its index."""
    return {
        name: 0.1 * g + (0.01 * weights[name] if place < 2 else 0)
        for place, (name, g) in enumerate(gradients.items())
    }


def signs_at_ends(_: int, gradients: Mapping[str, Any], __: Mapping[str, Any]) -> Vectors:
    """Move the first layer by signs, and the others otherwise, by their index."""
    return {
        name: 0.1 * (np.sign(g) if place < 2 else g)
        for place, (name, g) in enumerate(gradients.items())
    }


def in_blocks(_: int, gradients: Mapping[str, Any], __: Mapping[str, Any]) -> Vectors:
    """Move by 8 bits of each element, in blocks of the group's flat buffer."""
    flat = np.concatenate([*gradients.values()])
    blocks = flat.reshape(-1, 32)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
    flat = (np.round(blocks / scales) * scales).ravel()
    ends = np.cumsum([g.size for g in gradients.values()])[:-1]
    return {name: 0.1 * one for name, one in zip(gradients, np.split(flat, ends), strict=True)}


def signs_of_momenta_after_the_first() -> Rule:
    """Return a rule that moves the first layer by signs of gradients, and others by momenta's."""
    by_momenta = momentum(lambda _, name, __: name, np.sign)

    def rule(step: int, gradients: Mapping[str, Any], weights: Mapping[str, Any]) -> Vectors:
        first = dict([*signs(step, gradients, weights).items()][:2])
        return {**by_momenta(step, gradients, weights), **first}

    return rule


def momentum(key: Callable[[int, str, int], Hashable], shape: Callable[[Any], Any]) -> Rule:
    """Return a rule that keeps momenta by a key of a place, a name and a size, as Lion or SGD."""
    buffers: dict[Hashable, Any] = {}

    def rule(step: int, gradients: Mapping[str, Any], _: Mapping[str, Any]) -> Vectors:
        if step == 0:
            buffers.clear()
        moves = {}
        for place, (name, g) in enumerate(gradients.items()):
            which = key(place, name, g.size)
            before = buffers.get(which, np.zeros_like(g))
            moves[name] = 0.1 * shape(5 * before + g)
            buffers[which] = BETAS[0] * before + (1 - BETAS[0]) * g
        return moves

    return rule


def made(order: str, rule: Rule, frozen: str = "", **changes: Any) -> Trace:
    """Return a run with the tensors in this order, some of them frozen in step 0.

    A stroke separates groups.
    """
    weights = {name: value.copy() for name, value in FIRST.items()}
    events: list[Event] = [
        Start(step=0, rank=0, weights=traces.records(weights), trainable=(*"abcd",)),
        *(
            Ruled(
                step=0, rank=0, rule="", names=(*names,), constants={"betas": BETAS}, derived=True
            )
            for names in order.split("|")
        ),
    ]
    for step, gradient in enumerate(GRADIENTS):
        given = {
            name: gradient[name] for name in order if name in FIRST and (step or name not in frozen)
        }
        moves = rule(step, given, weights)
        weights = {n: (w - moves.get(n, 0)).astype(np.float32) for n, w in weights.items()}
        update = Update(
            step=step,
            rank=0,
            loss=None,
            weight=4,
            learning_rate=0.1,
            finite=True,
            weights=traces.records(weights),
            gradient=traces.records(given),
        )
        events.append(replace(update, **(changes if step == 1 else {})))
    subject = SUBJECT if order.startswith("a") else REORDERED_SUBJECT
    run = traces.hand_written(*events, subject=subject)
    return replace(run, traits=Traits(rule="own"))


def compared(usual: Trace, turned: Trace) -> Tally:
    """Return the tally of the comparison."""
    tally = Tally("F-TI-008", observed=True)
    parameter_order.compare(tally, (usual, turned))
    return tally


def both(rule: Rule, frozen: str = "") -> Tally:
    """Return the tally of a rule in both orders."""
    return compared(made("abcd", rule, frozen), made("cdab", rule, frozen))


def test_a_step_that_is_the_same_in_both_orders_counts() -> None:
    """Each tensor of each step is a comparison."""
    tally = both(signs)
    assert (tally.compared, tally.broken) == (12, None)
    assert tally.notes == [
        ("with the parameters of each group in a different order: 3 steps the same")
    ]


def test_a_sum_over_parameters_may_be_rounded_otherwise() -> None:
    """A norm of all is, and the steps that begin with such weights are not compared."""
    tally = both(clipped)
    assert tally.broken is None
    assert tally.compared in (4, 8, 12)
    assert not tally.missing


@pytest.mark.parametrize(
    ("rule", "frozen", "step", "words"),
    [
        (counted(lambda _: 0), "", 0, "is counted once"),
        (counted(lambda _: 0), "ab", 1, "is counted once"),
        (momentum(lambda _, __, size: size, np.sign), "", 0, "tensors of one size share"),
        (momentum(lambda _, __, size: size, np.positive), "", 0, "of one size"),
        (momentum(lambda place, _, __: place, np.sign), "ab", 1, "positions shift"),
        (momentum(lambda place, _, __: place, np.positive), "ab", 1, "positions shift"),
    ],
    ids=["counted", "counted, frozen", "shared, signs", "shared", "slips, signs", "slips"],
)
def test_a_mistake_that_explains_the_difference_is_named(
    rule: Rule, frozen: str, step: int, words: str
) -> None:
    """It is found in the first step that shows it, by an equation of gradients so far."""
    broken = both(rule, frozen).broken
    assert broken is not None
    assert (broken.step, broken.rank) == (step, 0)
    assert words in broken.message
    assert "must not depend on the order of the parameters" in broken.message


def test_a_step_that_each_group_counts_for_itself_is_named() -> None:
    """Its counter moves on with each of the group's tensors."""
    rule = counted(lambda name: name in "ab")
    broken = compared(made("ab|cd", rule), made("ba|dc", rule)).broken
    assert broken is not None
    assert "is counted once" in broken.message


@pytest.mark.parametrize("shape", [np.sign, np.positive])
def test_momenta_of_each_tensor_are_the_same(shape: Callable[[Any], Any]) -> None:
    """Even if some of them are frozen at first."""
    tally = both(momentum(lambda _, name, __: name, shape), "ab")
    assert (tally.compared, tally.broken) == (10, None)
    assert "3 steps the same" in tally.notes[0]


@pytest.mark.parametrize(
    "rule",
    [
        so_far,
        left_over,
        by_place,
        undecayed_end,
        signs_at_ends,
        in_blocks,
        in_turn,
        noisy,
        signs_of_momenta_after_the_first(),
    ],
)
def test_what_a_place_may_be_meant_for_is_noted(rule: Rule) -> None:
    """A design may depend on places; nothing is wrong, and nothing compared from that step on."""
    tally = both(rule)
    assert (tally.broken, tally.missing) == (None, [])
    assert tally.compared in (0, 4)
    assert any("No equation shows a mistake" in note for note in tally.notes)


def test_a_step_that_moves_nothing_counts_for_nothing() -> None:
    """A rate may begin at zero; what comes then is compared."""
    tally = both(lambda *step: {n: move * (step[0] > 1) for n, move in signs(*step).items()})
    assert (tally.compared, tally.broken) == (4, None)
    assert tally.notes == [
        ("with the parameters of each group in a different order: 1 step the same")
    ]


def test_runs_in_one_order_say_nothing() -> None:
    """The class puts its parameters in an order of its own, or what comes with them kept it."""
    tally = compared(made("abcd", so_far), made("abcd", so_far))
    assert (tally.compared, tally.broken) == (0, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient": traces.records(GRADIENTS[0])},
        {"learning_rate": 0.2},
        {"finite": False},
        {"edited": traces.records({"a": np.ones(50)})},
    ],
    ids=["gradients", "rates", "not finite", "weights"],
)
def test_steps_that_begin_otherwise_are_not_compared(changes: dict[str, Any]) -> None:
    """From there on the runs are two trainings."""
    tally = compared(made("abcd", signs), made("cdab", signs, **changes))
    assert (tally.compared, tally.broken) == (4, None)


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
