"""Dropout with recorded masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar_py.train.arithmetic import dropout
from entrenar_py.train.arithmetic.dropout import Dropout


def _dropout(rate: float = 0.5, seed: int = 0) -> Dropout:
    return Dropout(rate, np.random.default_rng(seed))


def test_elements_are_zeroed_or_scaled() -> None:
    """Elements are 0 or x / (1 - rate), about `rate` of them 0, and the mean stays."""
    rate, size = 0.25, 40_000
    out = _dropout(rate)(torch.ones(200, 200))
    kept = out != 0
    assert set(out[kept].tolist()) == {float(np.float32(1) / np.float32(1 - rate))}
    zeroed = 1 - kept.double().mean().item()
    assert abs(zeroed - rate) < 5 * (rate * (1 - rate) / size) ** 0.5  # five standard deviations


def test_the_gradient_goes_through_the_same_mask() -> None:
    """Elements that were zeroed get no gradient."""
    x = torch.ones(50, requires_grad=True)
    out = _dropout()(x)
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())


def test_the_same_stream_gives_the_same_masks() -> None:
    """The same stream gives the same masks and digest, another stream gives others."""
    one, same, other = _dropout(), _dropout(), _dropout(seed=1)
    x = torch.ones(3, 40)
    assert torch.equal(one(x), same(x))
    assert not torch.equal(one(x), other(x))
    same(x)
    assert one.digest() == same.digest() != other.digest()


def test_the_digest_names_the_stream() -> None:
    """The digest does not depend on the amount drawn: shards of two sizes share it."""
    few, many = _dropout(), _dropout()
    few(torch.ones(2, 8))
    many(torch.ones(3, 8))
    first = many.digest()
    many(torch.ones(8))
    assert few.digest() == first == many.digest()


def test_the_digest_does_not_depend_on_values() -> None:
    """Only masks are digested, so a shard computed again from other weights has the same digest."""
    one, other = _dropout(), _dropout()
    one(torch.zeros(9))
    other(torch.full((9,), 3.0))
    assert one.digest() == other.digest()


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3, 5)])
def test_shapes_are_kept(shape: tuple[int, ...]) -> None:
    """The result has the shape of the input, for any shape."""
    assert _dropout()(torch.ones(shape)).shape == shape


def test_nothing_drawn_has_no_digest() -> None:
    """The digest of a model without dropout is None."""
    assert _dropout().digest() is None


def test_none_is_the_identity() -> None:
    """`none` returns the tensor itself."""
    x = torch.ones(2)
    assert dropout.none(x) is x


def test_a_batch_draws_what_its_shards_draw() -> None:
    """One call for the whole batch gives the masks of its shards, concatenated."""
    sizes = (3, 0, 2)
    streams = [np.random.default_rng(shard) for shard in range(3)]
    whole = dropout.Dropout(0.5, dropout.ShardStreams(list(zip(streams, sizes, strict=True))))
    parts = [dropout.Dropout(0.5, np.random.default_rng(shard)) for shard in range(3)]
    for rows in (1, 4):  # samples of one row, and of four
        x = torch.ones(5 * rows, 6)
        expected = [
            part(torch.ones(size * rows, 6)) for part, size in zip(parts, sizes, strict=True)
        ]
        assert torch.equal(whole(x), torch.cat(expected))
    assert whole.digest() == parts[0].digest()
