"""The workload `vectors`: everyone can draw its gradients again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import engine
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.arithmetic.workload import WEIGHTS, GivenVectors

LENGTH = 1_000


def built(length: int = LENGTH, seed: int = 1) -> GivenVectors:
    """Return a workload of ten samples."""
    return GivenVectors(10, length=length, data=np.random.default_rng(seed))


def drawn(model: GivenVectors, sample: int, *pieces: int) -> Array:
    """Return v_`sample`, drawn piece by piece."""
    take = model.pieces(sample)
    return np.concatenate([take(size) for size in pieces])


def gradient(model: GivenVectors, ids: list[int], at: float, scale: float = 1.0) -> Array:
    """Return the gradient of the samples `ids`, where every element of the tensor is `at`."""
    tensors = {"vector": torch.full((LENGTH,), at)}
    _, (found,) = model.gradients(tensors, ids, drop=engine.no_dropout, scale=scale)
    return found


def test_a_gradient_is_the_sum_of_given_vectors() -> None:
    """The gradient does not depend on the weights or the pieces drawn, and is scaled."""
    model = built()
    expected = drawn(model, 3, LENGTH) + drawn(model, 5, 1, 7, 992)
    assert np.array_equal(gradient(model, [3, 5], at=0.0), expected)
    assert np.array_equal(gradient(model, [3, 5], at=9.0, scale=0.25), expected / 4)


def test_the_order_of_additions_shows() -> None:
    """Three vectors, added in another order, differ in the bits of many elements."""
    model = built()
    a, b, c = (drawn(model, sample, LENGTH) for sample in range(3))
    assert 0.1 < np.mean((a + b) + c != a + (b + c)) < 0.9


def test_samples_weigh_differently() -> None:
    """Samples weigh one, two or three, so no count equals the weight by accident."""
    model = built()
    assert [model.weight([sample]) for sample in range(4)] == [1, 2, 3, 1]
    assert model.weight(range(10)) == 19
    assert model.weight_max == WEIGHTS


def test_another_length_or_seed_is_another_data_set() -> None:
    """Another length or seed changes the data digest, so such a worker is not admitted."""
    digests = {built().data_digest, built(LENGTH + 1).data_digest, built(seed=2).data_digest}
    assert len(digests) == 3


def test_terms_are_given_to_the_samples_in_turn_and_weigh_alike() -> None:
    """Samples take the given vectors in turn, weigh 1, and have another digest with others."""
    model = given([[1, 2, 3], [4.5, 0, -1]])
    assert [model.weight([sample]) for sample in range(3)] == [1, 1, 1]
    assert drawn(model, 2, 1, 2).tolist() == [1, 2, 3]
    assert drawn(model, 3, 3).tolist() == [4.5, 0, -1]
    _, (found,) = model.gradients(
        {"vector": torch.zeros(3)}, [0, 1, 2], drop=engine.no_dropout, scale=1
    )
    assert found.tolist() == [6.5, 4, 5]
    digests = {given(terms).data_digest for terms in (None, "drawn", [[1, 2, 3]], [[1, 2, 4]])}
    assert len(digests) == 4
    assert drawn(model, 0, 3).tolist() == [1, 2, 3], "what was added up is a copy"
    assert np.array_equal(drawn(given("drawn"), 1, 3), drawn(given(None), 1, 3))


@pytest.mark.parametrize(
    "terms", ["drown", [], [[1, 2]], [[1, 2, "3"]], [[1, 2, float("nan")]], [[1, 2, 1e39]], 7, {}]
)
def test_terms_that_are_none_are_refused(terms: Any) -> None:
    """Invalid terms are refused before anything runs."""
    with pytest.raises(UsageError, match="options terms"):
        given(terms)


def given(terms: Any) -> GivenVectors:
    """Return a workload of four samples with three elements."""
    return GivenVectors(4, length=3, data=np.random.default_rng(1), terms=terms)
