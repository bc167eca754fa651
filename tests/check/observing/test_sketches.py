"""Sketches: linear, of the right length on average, and the same for pieces and on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from entrenar_py.check.observing.sketches import Sketches, sample_places, sketch
from entrenar_py.check.rank_files.layout import Piece
from entrenar_py.compute import digest
from entrenar_py.shared.trace import Sketch
from entrenar_py.shared.trace.tensors import PROJECTIONS, SAMPLES


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    """Return float32 normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def length_share(tensor: Tensor) -> float:
    """Return the squared length of a projection, as a share of its tensor's."""
    made = sketch(tensor)
    return float(np.square(made.projected).sum()) / made.square


def test_it_is_linear() -> None:
    """The sketch of a sum or a multiple is that of the sketches; the norm of a sum is unknown."""
    one, two = random_tensor(50, 7), random_tensor(50, 7, seed=1)
    total = sketch(one) + sketch(two)
    np.testing.assert_allclose(total.numbers[1:], sketch(one + two).numbers[1:], atol=1e-5)
    assert np.isnan(total.square)
    np.testing.assert_allclose(sketch(one).times(-3).numbers, sketch(-3 * one).numbers, rtol=1e-6)


def test_a_projection_is_as_long_as_its_tensor_on_average() -> None:
    """Also where all elements are in one column of a row's, or are one and the same number."""
    shares = [length_share(random_tensor(40, 33, seed=seed)) for seed in range(100)]
    columns = [torch.zeros(256, PROJECTIONS).index_fill_(1, torch.tensor(at), 1) for at in range(9)]
    even = [torch.ones(1000 + 64 * count) for count in range(50)]
    for found in (shares, [length_share(one) for one in columns], [*map(length_share, even)]):
        assert abs(np.mean(found) - 1) < 0.3
        assert 0.2 < min(found) < max(found) < 3
    lone = torch.zeros(5000).index_fill_(0, torch.tensor(4321), -2)
    assert length_share(lone) == 1


def test_it_depends_on_places() -> None:
    """Swapped elements give another projection."""
    numbers = random_tensor(64)
    swapped = numbers.clone()
    swapped[[3, 40]] = numbers[[40, 3]]
    assert not np.allclose(sketch(numbers).projected, sketch(swapped).projected)


class Heard(TorchFunctionMode):
    """The names of the operations that a mode of the script hears."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_no_mode_hears_what_a_sketch_computes() -> None:
    """A mode costs more than the operations themselves, which are hundreds for each tensor."""
    named = {"w": random_tensor(300, 70)}
    with Heard() as heard:
        records = Sketches().records(named, {}, exact=True)
    assert {*heard.names} <= {"__get__"}
    assert records == Sketches().records(named, {}, exact=True)


@pytest.mark.parametrize("size", [0, 1, 5, SAMPLES, 17, 1000, 2**31 + 5])
def test_samples_are_spread(size: int) -> None:
    """Each is another element, in order, one from each part."""
    places = sample_places(size)
    assert len(places) == min(size, SAMPLES)
    assert all(before < after for before, after in pairwise(places))
    assert all(0 <= place < size for place in places)


def test_samples_are_elements() -> None:
    """They keep the values, and the strides of a tensor don't matter."""
    numbers = random_tensor(30, 20)
    expected = numbers.reshape(-1)[torch.from_numpy(sample_places(600))]
    assert sketch(numbers).sampled.tolist() == expected.tolist()
    assert sketch(numbers.t().contiguous().t()).sampled.tolist() == expected.tolist()


def cut(whole: Tensor, *cuts: tuple[int, int]) -> tuple[Tensor, Piece]:
    """Return the block of `whole` with the slices `cuts`, and its place."""
    place = tuple(slice(begin, end) for begin, end in cuts)
    offset, shape = tuple(begin for begin, _ in cuts), tuple(end - begin for begin, end in cuts)
    return whole[place], Piece(offset=offset, shape=shape, whole=tuple(whole.shape), ranks=(0, 1))


@pytest.mark.parametrize(
    "pieces",
    [
        [((0, 21), (0, 13)), ((21, 40), (0, 13)), ((40, 40), (0, 13))],
        [((0, 40), (0, 5)), ((0, 40), (5, 13))],
        [((0, 20), (0, 5)), ((0, 20), (5, 13)), ((20, 40), (0, 5)), ((20, 40), (5, 13))],
    ],
    ids=["rows, and an empty piece", "columns", "both"],
)
def test_the_sketch_of_the_whole_is_the_sum_of_the_pieces(
    pieces: list[tuple[tuple[int, int], ...]],
) -> None:
    """However the tensor is cut."""
    whole = random_tensor(40, 13)
    numbers = [sketch(*cut(whole, *cuts)).numbers for cuts in pieces]
    np.testing.assert_allclose(sum(numbers), sketch(whole).numbers, rtol=1e-9, atol=1e-9)


def test_a_piece_beyond_2_to_the_32_rows() -> None:
    """Places in a tensor of 2^40 elements count in full."""
    near, far = (
        sketch(torch.ones(64), Piece(offset=(at,), shape=(64,), whole=(2**40,), ranks=(0, 1)))
        for at in (64, 2**38 + 64)
    )
    assert not np.allclose(near.projected, far.projected)


def test_records() -> None:
    """Weights have the digest of their bits, gradients that of the sketch, counters no sketch."""
    named = {"w": random_tensor(9), "half": random_tensor(9).bfloat16(), "n": torch.tensor(3)}
    exact, loose = (Sketches().records(named, {}, exact=exact) for exact in (True, False))
    assert [record.digest for record in exact.values()] == [*map(digest.digest, named.values())]
    assert exact["w"].digest != loose["w"].digest
    assert [*exact] == [*loose] == [*named]
    assert (exact["n"].sketch, exact["half"].dtype, exact["w"].size) == (None, "float32", 9)
    elements = exact["half"].elements()
    assert elements is not None
    assert elements.tolist() == named["half"].float().tolist()
    assert Sketches().digests(named)["w"].digest == exact["w"].digest


def test_nan_is_kept() -> None:
    """A NaN is in the projection, in the norm, and in no other tensor's."""
    made = sketch(torch.tensor([1.0, float("nan")]))
    assert np.isnan(made.square)
    assert np.isnan(made.projected).sum() == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_same() -> None:
    """In all dtypes and sizes, for pieces by the kernel or without it, digests included."""
    pytest.importorskip("triton")
    whole = random_tensor(1000, 37)
    rows, row_piece = cut(whole, (501, 1000), (0, 37))
    columns, column_piece = cut(whole, (0, 1000), (20, 37))
    named = {
        **{f"size {size}": random_tensor(size) for size in (0, 1, 31, 32, 16384 * 3 + 5)},
        "half": random_tensor(777).half(),
        "bfloat16": random_tensor(70, 33).bfloat16(),
        "double": random_tensor(5000).double(),
        "turned": whole.t(),
        "rows": rows,
        "columns": columns,
        "count": torch.tensor(3),
        "nan": torch.tensor([1.0, float("nan"), 2.0]),
    }
    pieces = {"rows": row_piece, "columns": column_piece}
    there = {name: tensor.cuda() for name, tensor in named.items()}
    for exact in (True, False):
        expected = Sketches().records(named, pieces, exact=exact)
        got = Sketches().records(there, pieces, exact=exact)
        assert [*got] == [*expected]
        for name, record in expected.items():
            assert got[name].dtype == record.dtype
            assert not exact or got[name].digest == record.digest, name
            _assert_near(got[name].sketch, record.sketch, name)
    digests = Sketches().digests(there)
    assert digests == Sketches().digests(named)


def _assert_near(got: Sketch | None, expected: Sketch | None, name: str) -> None:
    if expected is None or got is None:
        assert got is expected, name
        return
    assert got.size == expected.size, name
    np.testing.assert_allclose(got.numbers, expected.numbers, rtol=1e-9, atol=1e-9, err_msg=name)
