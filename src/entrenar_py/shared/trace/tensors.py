"""The record of a tensor: a digest of its bytes, and its values or a sketch if requested."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:
    import numpy as np

PROJECTIONS = 32  # of a sketch
SAMPLES = 16  # elements in a sketch
_LARGE, _THREADS = 2**22, 4  # digests of tensors from _LARGE bytes on use _THREADS threads


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TensorRecord:
    """A tensor in a trace: its digest, and its values if the scenario requests them.

    `digest` is BLAKE3 (128 bits, hex) of the raw little-endian elements in C order. `data` is the
    base64 of the same bytes, and `dtype` a numpy dtype name. A tensor of a large model has a
    `sketch` instead of `data`, and a different digest (`observing.sketches`).
    """

    digest: str
    data: str | None = None
    dtype: str = "float32"
    sketch: Sketch | None = field(default=None, compare=False)

    def values(self) -> np.ndarray[Any, Any] | None:
        """Return the elements, flat `[size]`, or None if only the digest was kept."""
        if self.data is None:
            return None
        import numpy as np

        return np.frombuffer(base64.b64decode(self.data), dtype=self.dtype)

    def elements(self) -> np.ndarray[Any, Any] | None:
        """Return all elements, or those in the sketch, flat; None if neither was kept."""
        if self.sketch is None:
            return self.values()
        return self.sketch.sampled.astype(self.dtype)

    def vector(self) -> np.ndarray[Any, Any] | None:
        """Return all elements, flat, or the sketch's projection; None if neither was kept.

        Either can represent the tensor in sums, multiples, distances and angles.
        """
        return self.values() if self.sketch is None else self.sketch.projected

    @property
    def size(self) -> int | None:
        """The number of elements, or None if unknown."""
        if self.sketch is not None:
            return self.sketch.size
        values = self.values()
        return None if values is None else values.size

    def square(self) -> float | None:
        """Return the sum of squares of all elements, estimated from a sketch; None if unknown."""
        import numpy as np

        if self.sketch is not None:
            exact = self.sketch.square
            return exact if exact == exact else float(np.square(self.sketch.projected).sum())
        values = self.values()
        with np.errstate(over="ignore"):
            return None if values is None else float(np.square(values, dtype=np.float64).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """A few `numbers` that represent the `size` elements of a tensor x.

    float64 [1 + PROJECTIONS + min(SAMPLES, size)], in this order:

    - `square`: the sum of the squares of all elements, NaN if unknown.
    - `projected`: P x, where P is a fixed random matrix with E |P x|^2 = |x|^2. P is linear, and
      the same for all tensors of one size. So sums, multiples and differences of tensors can be
      compared by their projections.
    - `sampled`: elements at fixed places.

    If a rank holds a piece of the tensor, it has a sketch of the piece at its place in the whole
    tensor. The sketch of the whole is the sum of the sketches of all pieces.
    """

    size: int
    numbers: np.ndarray[Any, Any]

    @property
    def square(self) -> float:
        """The sum of the squares of all elements, NaN if unknown."""
        return float(self.numbers[0])

    @property
    def projected(self) -> np.ndarray[Any, Any]:
        """The projection, float64 [PROJECTIONS]."""
        return self.numbers[1 : 1 + PROJECTIONS]

    @property
    def sampled(self) -> np.ndarray[Any, Any]:
        """The sampled elements, float64 [min(SAMPLES, size)]."""
        return self.numbers[1 + PROJECTIONS :]

    def __add__(self, other: Sketch) -> Sketch:
        """Return the sketch of the sum of two tensors. Its `square` is unknown."""
        total = self.numbers + other.numbers
        total[0] = math.nan
        return Sketch(self.size, total)

    def times(self, factor: float) -> Sketch:
        """Return the sketch of the tensor multiplied by `factor`."""
        scaled = factor * self.numbers
        scaled[0] *= factor
        return Sketch(self.size, scaled)

    def to_text(self) -> str:
        """Return the numbers as base64 of little-endian float64."""
        return base64.b64encode(self.numbers.astype("<f8", copy=False).tobytes()).decode()

    @classmethod
    def from_text(cls, size: int, text: str) -> Sketch:
        """Return the sketch that `to_text` wrote. Raises ValueError for any other text."""
        import numpy as np

        numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f8")
        if size < 0 or len(numbers) != 1 + PROJECTIONS + min(SAMPLES, size):
            raise ValueError("use the number of elements, and base64 of the sketch's float64")
        return cls(size, numbers)


def record_sketch(sketch: Sketch, dtype: str, digest: str | None = None) -> TensorRecord:
    """Return the record of a tensor with this sketch; `digest` is by default the sketch's own."""
    digest = digest or blake3(sketch.numbers.tobytes()).hexdigest(16)
    return TensorRecord(digest, None, dtype, sketch)


def record_tensor(tensor: np.ndarray[Any, Any], *, values: bool = False) -> TensorRecord:
    """Return the record of a C-contiguous array of any shape. The array is not kept."""
    data = tensor.data.cast("B") if tensor.size else b""
    threads = _THREADS if tensor.nbytes >= _LARGE else 1
    digest = blake3(data, max_threads=threads).hexdigest(16)
    if not values:
        return TensorRecord(digest)
    return TensorRecord(digest, base64.b64encode(data).decode(), tensor.dtype.name)


Tensors = Mapping[str, TensorRecord]
