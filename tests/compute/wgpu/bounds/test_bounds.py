"""Bounds on a float32 device: never narrower than its results, and not much wider."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from entrenar_py.compute.wgpu import bounds, capture
from entrenar_py.compute.wgpu.bounds import intervals, sensitivity
from entrenar_py.compute.wgpu.bounds.intervals import Interval
from entrenar_py.shared.errors import UsageError
from tests.compute.wgpu import agreement, random_graphs
from tests.compute.wgpu.steps import captured, plain, step

NUM_GRAPHS = 15  # `make graphs` tries 500, on a wgpu adapter


def test_random_graphs_on_the_cpu_stay_within_their_bounds() -> None:
    """Nearly every element of a random graph has a finite bound, and is within it on the CPU."""
    num_elements, num_bounded = random_graphs.try_many(NUM_GRAPHS, random_graphs.on_cpu)
    assert num_bounded > 0.9 * num_elements > 0


def test_either_neighbour_of_an_exact_result_is_within() -> None:
    """The float32 numbers above and below a result are within. Exact results are not widened."""
    third, half = torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    one = intervals.rounded(third, third)
    assert one.low < third < one.high
    assert float(one.high - one.low) == 2.0**-25
    assert intervals.rounded(half, half) == Interval(half, half)


def test_a_sum_that_float64_rounds_is_no_exact_one() -> None:
    """A device may round 1 + 2^-60, which is 1 in float64, up."""
    one, tiny = (torch.tensor(x, dtype=torch.float64) for x in (1.0, 2.0**-60))
    result = intervals.add(Interval(one, one), Interval(tiny, tiny))
    assert (float(result.low), float(result.high)) == (1.0, 1 + 2.0**-23)


def softmax(x: Tensor) -> tuple[Tensor, ...]:
    return (x.softmax(-1),)


def summed(x: Tensor) -> tuple[Tensor, ...]:
    return (x.sum(0),)


def product(x: Tensor) -> tuple[Tensor, ...]:
    return (x @ x.T,)


def tail_dropped(x: Tensor) -> tuple[Tensor, ...]:
    return (x[:-1].sum(0),)


def of_few_bits(x: Tensor) -> tuple[Tensor, ...]:
    few = x.bfloat16().float()
    return (few @ few.T,)


def not_shifted(x: Tensor) -> tuple[Tensor, ...]:
    return (x.exp() / (x.exp().sum(-1, keepdim=True) + 1e-4),)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [(summed, tail_dropped), (product, of_few_bits), (softmax, not_shifted)],
)
def test_what_is_wrong_is_outside(
    right: Callable[[Tensor], tuple[Tensor, ...]], wrong: Callable[[Tensor], tuple[Tensor, ...]]
) -> None:
    """Results without a term, of 8-bit operands, or of an inexact formula are outside."""
    x = torch.randn(33, 17, generator=torch.Generator().manual_seed(0))
    graph = capture.capture(right, [x])
    assert all(one.explained for one in agreement.agrees(right(x), graph, [x]))
    assert not any(one.explained for one in agreement.agrees(wrong(x), graph, [x]))
    nothing = [torch.full_like(one, torch.nan) for one in right(x)]
    assert not any(one.explained for one in agreement.agrees(nothing, graph, [x]))


def test_a_comparison_within_errors_has_both_outcomes() -> None:
    """Both branches are within the bounds where rounding decides a comparison, else only one."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.where(x.square() * 3 > 0.27, 1.0, 5.0),)

    x = torch.tensor([0.3, 0.2, 0.4])
    (found,) = bounds.bound(capture.capture(run, [x]), [x])
    assert found.low.tolist() == [1.0, 5.0, 1.0]
    assert found.high.tolist() == [5.0, 5.0, 1.0]


def test_what_may_be_anything_counts_as_unbounded() -> None:
    """A quotient by an interval around zero is counted as unbounded and not compared."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return (1 / (x * x - 0.09),)

    x = torch.tensor([0.3, 2.0])
    (found,) = agreement.agrees(run(x), capture.capture(run, [x]), [x])
    assert (found.num_bounded, found.num_elements, found.explained) == (1, 2, True)


def test_an_operation_without_a_bound_is_refused_by_its_line() -> None:
    """An operation without a bound is refused with its line, and not taken for exact."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.special.bessel_j0(x),)

    x = torch.ones(3)
    with pytest.raises(UsageError, match=r"bessel_j0.default at test_bounds.py:\d+ in run"):
        bounds.bound(capture.capture(run, [x]), [x])


@pytest.mark.parametrize("name", ["mlp", "decoder"])
def test_a_whole_step_is_explained_to_first_order(name: str) -> None:
    """First-order bounds explain loss and gradients, and are below a hundredth of their size."""
    run, inputs = step(name)
    results = run(*inputs)
    found = sensitivity.deviations(results, captured(name), plain(inputs))
    assert all(one.explained for one in found)
    assert all(one.bound <= 0.01 * one.size for one in found)


def test_a_step_that_is_a_hundredth_off_is_not_explained() -> None:
    """An error of a hundredth, or a NaN, is not explained in any gradient."""
    run, inputs = step("mlp")
    results = [one.detach() for one in run(*inputs)]
    for wrong in ([one * 1.01 for one in results], [one * torch.nan for one in results]):
        found = sensitivity.deviations(wrong, captured("mlp"), plain(inputs))
        assert not any(one.explained for one in found)


def test_one_element_that_is_off_is_named() -> None:
    """An error in one element is found even if it is below the bound of the whole output."""
    run, inputs = step("mlp")
    results = [one.detach().double() for one in run(*inputs)]
    right = sensitivity.deviations(results, captured("mlp"), plain(inputs))[1]
    wrong = [one.clone() for one in results]
    wrong[1].view(-1)[5] += (right.element_bound + right.bound) / 2
    found = sensitivity.deviations(wrong, captured("mlp"), plain(inputs))[1]
    assert (found.element, found.explained) == (5, False)
    assert found.error <= found.bound


def _associations(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return the orders of x * (y * y * 3) in float32."""
    return (x * (y * y * 3), (x * (y * y)) * 3, (x * 3) * (y * y), (x * y) * (y * 3))


def test_the_factors_of_a_product_may_be_multiplied_in_any_order() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4096, generator=generator)
    graph = capture.capture(lambda x, y: (x * (y**2 * 3),), [x, y])
    (found,) = bounds.bound(graph, [x, y])
    for one in _associations(x, y):
        assert ((found.low <= one) & (one <= found.high)).all()
    assert (found.error <= 8 * 2.0**-23 * found.value.abs()).all()


def test_a_product_of_two_is_rounded_once() -> None:
    x, y = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    (found,) = bounds.bound(capture.capture(lambda x, y: (x * y,), [x, y]), [x, y])
    assert (found.low <= x * y).all()
    assert (found.high.float() <= torch.nextafter(found.low.float(), torch.tensor(torch.inf))).all()


def test_the_terms_of_a_sum_may_be_added_in_any_order() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4096, generator=generator)
    x[::2] += 1000
    graph = capture.capture(lambda x, y: ((x - 1000).view(64, 64) + y.view(64, 64),), [x, y])
    (found,) = bounds.bound(graph, [x, y])
    for one in ((x - 1000) + y, (x + y) - 1000, x + (y - 1000)):
        assert ((found.low <= one.view(64, 64)) & (one.view(64, 64) <= found.high)).all()
