"""A trace keeps a tensor's bits, and a digest that depends on each of them."""

from __future__ import annotations

import numpy as np

from entrenar_py import trace
from tests.trace.samples import INF, NAN, TENSORS


def test_tensor_values_come_back_as_bits() -> None:
    """`values` keeps dtype, NaN and the sign of zero, and is None if only the digest was kept."""
    values = TENSORS["w"].values()
    assert values is not None
    assert values.tobytes() == np.array([1.5, -0.0, NAN, INF], np.float32).tobytes()
    count = TENSORS["count"].values()
    assert count is not None
    assert (count.dtype, count.tolist()) == (np.int64, [3])
    assert TENSORS["b"].values() is None


def test_a_digest_sees_position_and_sign() -> None:
    """Swapped elements, and zeros of different sign, have different digests."""
    arrays = [[1, 2], [2, 1], [0.0, 1], [-0.0, 1]]
    digests = {trace.record_tensor(np.array(a, np.float32)).digest for a in arrays}
    assert len(digests) == 4
