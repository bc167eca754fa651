"""Where a rank's tensors lie in those of one worker, found by their first values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from entrenar_py.check.rank_files import placement
from entrenar_py.shared.trace import Start, record_tensor

Values = NDArray[Any]
RNG = np.random.default_rng(7)


def drawn(*shape: int) -> Values:
    """Return random numbers, as weights begin with."""
    return RNG.standard_normal(shape).astype(np.float32)


def start(named: Mapping[str, Values], rank: int = 0) -> Start:
    return Start(
        step=0,
        rank=rank,
        weights={n: record_tensor(v.reshape(-1), values=True) for n, v in named.items()},
        shapes={name: values.shape for name, values in named.items()},
    )


def found(whole: Start, *ranks: Mapping[str, Values]) -> list[dict[str, tuple[str, Any]]]:
    """Return for each rank where its tensors lie: a name, and the values that lie there."""
    starts = {rank: start(weights, rank) for rank, weights in enumerate(ranks)}
    held = {name: record.values() for name, record in whole.weights.items()}

    def lies(place: placement.Placed) -> tuple[str, Any]:
        values = held[place.name]
        assert values is not None
        return place.name, (values if place.indices is None else values[place.indices]).tolist()

    return [
        {name: lies(place) for name, place in of_rank.items()}
        for of_rank in placement.of(starts, whole).values()
    ]


QKV = drawn(12, 4)
UP, DOWN = drawn(8, 4), drawn(4, 8)
STACK = drawn(4, 3, 3)


@pytest.mark.parametrize(
    ("whole", "piece"),
    [
        pytest.param(UP, UP[4:], id="rows"),
        pytest.param(DOWN, DOWN[:, 4:], id="columns"),
        pytest.param(QKV, np.concatenate([QKV[2:4], QKV[6:8], QKV[10:12]]), id="blocks of q, k, v"),
        pytest.param(UP, UP[1::2], id="every second row"),
        pytest.param(UP, UP[[3, 0, 2]], id="rows in another order"),
        pytest.param(STACK, STACK[2:], id="some experts of a stack"),
        pytest.param(STACK, STACK[1], id="one expert of a stack"),
        pytest.param(UP, UP.reshape(-1)[7:20], id="a part of the flat tensor"),
        pytest.param(UP, np.ascontiguousarray(UP.T[:, 4:]), id="transposed"),
        pytest.param(QKV.reshape(3, 4, 4), QKV.reshape(3, 4, 4)[:, 2:], id="heads of three"),
    ],
)
def test_a_piece_lies_where_its_values_are(whole: Values, piece: Values) -> None:
    """Rows, columns, blocks, flat parts and slices in another order are told by content."""
    places = found(start({"weight": whole}), {"weight": piece}, {"weight": whole})
    assert places == [
        {"weight": ("weight", piece.reshape(-1).tolist())},
        {"weight": ("weight", whole.reshape(-1).tolist())},
    ]


def test_a_bias_of_zeros_lies_as_the_weight_of_its_layer() -> None:
    """Zeros don't say where they lie; the rows of the layer's weight do."""
    zeros, ones = np.zeros(8, np.float32), np.ones(4, np.float32)
    whole = start({"up.weight": UP, "up.bias": zeros, "norm.weight": ones})
    rank = start({"up.weight": UP[[1, 3]], "up.bias": zeros[:2], "norm.weight": ones})
    places = placement.of({0: rank}, whole)[0]
    assert places["up.bias"].indices is not None
    assert places["up.bias"].indices.tolist() == [1, 3]
    assert places["norm.weight"].indices is None


def test_a_stage_that_counts_its_layers_from_zero() -> None:
    """Layers are found by content; a norm between them moves as far as they do."""
    ones, other = np.ones(4, np.float32), drawn(4, 4)
    whole = start({"0.weight": UP[:4], "1.weight": ones, "2.weight": other, "3.weight": ones})
    first, second = ({"0.weight": layer, "1.weight": ones} for layer in (UP[:4], other))
    assert [[place[0] for place in of.values()] for of in found(whole, first, second)] == [
        ["0.weight", "1.weight"],
        ["2.weight", "3.weight"],
    ]


def test_what_does_not_show_is_left_out() -> None:
    """Other values, values that are there twice, and zeros of no layer lie nowhere."""
    twice, zeros = np.tile(drawn(2, 4), (2, 1)), np.zeros(8, np.float32)
    whole = start({"weight": UP, "twice": twice, "zeros": zeros, "own": drawn(4)})
    rank = {"weight": UP[:4] + 1, "twice": twice[:2], "zeros": zeros[:4], "own": drawn(4)}
    assert found(whole, rank, {**rank, "own": drawn(4)}) == [{}, {}]


def test_copies_that_one_worker_draws_otherwise_are_copies() -> None:
    """A script that draws pieces draws other numbers after them than one worker does."""
    whole, own = start({"weight": UP, "head": drawn(4)}), drawn(4)
    halves = {rank: start({"weight": UP[4 * rank :][:4], "head": own}, rank) for rank in range(2)}
    places = placement.of(halves, whole)
    assert [sorted(of_rank) for of_rank in places.values()] == [["head", "weight"]] * 2
    assert places[1]["head"].indices is None


def test_a_tensor_of_two_numbers_an_element_is_taken_as_flat() -> None:
    """A complex one is recorded as its parts, and lies where they do."""
    whole, piece = (
        replace(start({"phase": values}), shapes={"phase": (values.size // 2,)})
        for values in (np.arange(10.0), np.arange(6.0, 10.0))
    )
    (places,) = placement.of({0: piece}, whole).values()
    assert places["phase"].name == "phase"
