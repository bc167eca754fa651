"""The options of products, and their operands and measurements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from entrenar_py.compute.on_torch import open_cpu
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.probes import products
from entrenar_py.systems.probes.products import LAYOUTS, Request, measure, operands, request

SCENARIO = Scenario(system="matmul", workload="linear", world_size=1, seed=3)


def test_no_options_ask_for_the_stated_product() -> None:
    """By default the product is the one for which the contract states a tolerance."""
    wanted = Request(shapes=((64, 64, 64),), layout="plain", magnitude=1.0)
    assert request({}) == wanted
    assert wanted.shapes[0] == products.STATED_SHAPE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"m": 3, "shapes": [[1, 2, 3]]}, "use one or the other"),
        ({"shapes": []}, "use a list of"),
        ({"shapes": 7}, "use a list of"),
        ({"shapes": [[1, 2]]}, "three whole numbers"),
        ({"shapes": [5]}, "three whole numbers"),
        ({"m": 0}, "three whole numbers"),
        ({"k": True}, "three whole numbers"),
        ({"n": 2.0}, "three whole numbers"),
        ({"layout": "sideways"}, "layout='sideways': allowed are plain"),
        ({"magnitude": 0}, "use a number > 0"),
        ({"magnitude": math.nan}, "use a number > 0"),
        ({"magnitude": "1"}, "use a number > 0"),
        ({"magnitude": 1e19, "k": 8}, "a float32 sum could overflow; use magnitude<=4.61e"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    """Every option that no float32 product can have is refused with what is allowed."""
    with pytest.raises(UsageError, match=message):
        request(options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_lie_as_the_layout_says(layout: str) -> None:
    """Shapes are [m, k] and [k, n], transposed operands are views, and values are in range."""
    wanted = Request(shapes=((3, 5, 4), (64, 2, 7)), layout=layout, magnitude=0.5)
    for (a, b), (m, k, n) in zip(operands(SCENARIO, wanted), wanted.shapes, strict=True):
        assert (a.shape, b.shape) == ((m, k), (k, n))
        assert (a.is_contiguous(), b.is_contiguous()) == tuple(not t for t in LAYOUTS[layout])
        assert max(float(a.abs().max()), float(b.abs().max())) <= 0.5


def test_operands_are_the_scenarios() -> None:
    """The first operand depends only on the scenario's stream `a`."""
    wanted = request({"m": 2, "k": 3, "n": 4})
    ((a, b),) = operands(SCENARIO, wanted)
    drawn = SCENARIO.rng("a").uniform(-1, 1, (2, 3)).astype(np.float32)
    assert torch.equal(a, torch.from_numpy(drawn))
    ((again, _),) = operands(SCENARIO, wanted)
    assert torch.equal(a, again)
    assert not torch.equal(a.reshape(-1)[:3], b.reshape(-1)[:3])


def test_right_product_is_measured() -> None:
    """A right product is finite and within its bound, and marked as stated if it is that one."""
    cpu = open_cpu()
    for magnitude, stated in ((1.0, True), (2.0, False)):
        wanted = request({"magnitude": magnitude})
        (pair,) = operands(SCENARIO, wanted)
        event = measure(cpu, pair, cpu.matmul(*pair), wanted)
        assert event.finite
        assert event.error_f64 <= event.bound
        assert event.error_cpu == 0
        assert (event.shape, event.result_shape) == ((64, 64, 64), (64, 64))
        assert event.stated == stated


def test_wrong_results_are_measured() -> None:
    """A NaN names its element; a result of another shape is not compared."""
    wanted = request({"m": 2, "k": 3, "n": 4})
    (pair,) = operands(SCENARIO, wanted)
    result = pair[0] @ pair[1]
    result[1, 2] = torch.nan
    spoilt = measure(open_cpu(), pair, result, wanted)
    assert (spoilt.finite, spoilt.element) == (False, 6)
    assert math.isnan(spoilt.error_f64)
    turned = measure(open_cpu(), pair, (pair[0] @ pair[1]).t(), wanted)
    assert (turned.result_shape, turned.element, turned.finite) == ((4, 2), None, True)
    assert math.isnan(turned.bound)
