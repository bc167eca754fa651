"""A trace keeps a tensor's bits, and a digest that depends on each of them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from entrenar_py.shared import trace
from entrenar_py.shared.errors import TraceError
from entrenar_py.shared.trace.tensors import PROJECTIONS, SAMPLES
from tests.shared.trace.samples import INF, NAN, TENSORS


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


def numbers(size: int, seed: int = 0) -> trace.Sketch:
    count = 1 + PROJECTIONS + min(SAMPLES, size)
    return trace.Sketch(size, np.random.default_rng(seed).standard_normal(count))


@pytest.mark.parametrize("size", [0, 3, 10**9])
def test_a_sketch_comes_back_as_bits(size: int) -> None:
    """From its text, and within an event from a record."""
    made = numbers(size)
    assert trace.Sketch.from_text(size, made.to_text()).numbers.tobytes() == made.numbers.tobytes()
    start = trace.Start(step=0, rank=0, weights={"w": trace.record_sketch(made, "float16")})
    (back,) = trace.load_events(trace.dump_events([start]))
    assert isinstance(back, trace.Start)
    record = back.weights["w"]
    assert (record, record.size, record.values()) == (start.weights["w"], size, None)
    elements, vector = record.elements(), record.vector()
    assert elements is not None
    assert vector is not None
    assert elements.dtype == np.float16
    assert elements.tolist() == made.sampled.astype(np.float16).tolist()
    assert vector.tolist() == made.projected.tolist()


def test_the_square_of_a_tensor() -> None:
    """It is exact for values and in a sketch, and estimated for the sketch of a sum."""
    values = trace.record_tensor(np.array([3, 4], np.float16), values=True)
    assert (values.square(), values.size) == (25, 2)
    assert (trace.TensorRecord("x").square(), trace.TensorRecord("x").size) == (None, None)
    made = numbers(100)
    assert trace.record_sketch(made, "float32").square() == made.square
    total = trace.record_sketch(made + made, "float32")
    assert total.square() == pytest.approx(4 * np.square(made.projected).sum())


@pytest.mark.parametrize(
    "change",
    [{"size": -1}, {"size": 3}, {"size": True}, {"dtype": "text"}, {"text": "AAAA"}, {"text": "?"}],
)
def test_a_malformed_sketch_is_refused(change: dict[str, Any]) -> None:
    """A record with another size, dtype or count of numbers becomes no event."""
    known = {"text": numbers(100).to_text(), "dtype": "float32", "size": 100} | change
    record = ["digest", known["text"], known["dtype"], known["size"]]
    text = json.dumps({"kind": "start", "step": 0, "rank": 0, "weights": {"w": record}})
    with pytest.raises(TraceError):
        trace.load_events(text.encode())
