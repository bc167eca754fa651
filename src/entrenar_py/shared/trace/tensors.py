"""The record of a tensor: a digest of its bytes and, if requested, its values or a sketch."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:
    import numpy as np

PROJECTIONS = 32  # numbers in a sketch's projection
SAMPLES = 16  # most elements that a sketch keeps
_LARGE, _THREADS = 2**22, 4  # tensors of at least _LARGE bytes are digested by _THREADS threads


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TensorRecord:
    """A tensor in a trace: its digest, and its values if the scenario requests them.

    `digest` is BLAKE3 (128 bits, hex) of the little-endian elements in C order. `data` is base64 of
    the same bytes, and `dtype` a numpy dtype name. A tensor of a large model has a `sketch` instead
    of `data`, and a digest by a different rule (`check.observing.sketches`).
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

        Both are linear in the tensor, so both serve in sums, multiples, distances and angles.
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
        """Return the sum of squares of all elements, or a sketch's estimate of it.

        None if unknown.
        """
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
    - `projected`: P x, where P is a fixed random matrix with E |P x|^2 = |x|^2. All tensors of one
      size have the same P. So sums, multiples and differences of tensors can be compared by their
      projections.
    - `sampled`: elements at fixed places.

    A rank with a piece of the tensor makes a sketch of the whole tensor with zeros outside of the
    piece. The sum of the sketches of all pieces is the sketch of the whole.
    """

    size: int
    numbers: np.ndarray[Any, Any]

    @property
    def square(self) -> float:
        """The sum of the squares of all elements; NaN if unknown."""
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
        """Return the sketch of the sum of two tensors. The result's `square` is unknown."""
        total = self.numbers + other.numbers
        total[0] = math.nan
        return Sketch(self.size, total)

    def times(self, factor: float) -> Sketch:
        """Return the sketch of the tensor multiplied by `factor`."""
        scaled = factor * self.numbers
        scaled[0] *= factor
        return Sketch(self.size, scaled)

    def to_text(self) -> str:
        """Return the numbers as text: base64 of little-endian float64."""
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
    """Return the record of a tensor with this sketch; by default its digest is the sketch's."""
    digest = digest or blake3(sketch.numbers.tobytes()).hexdigest(16)
    return TensorRecord(digest, None, dtype, sketch)


def record_tensor(tensor: np.ndarray[Any, Any], *, values: bool = False) -> TensorRecord:
    """Return the record of a C-contiguous array of any shape, without keeping the array."""
    data = tensor.data.cast("B") if tensor.size else b""
    threads = _THREADS if tensor.nbytes >= _LARGE else 1
    digest = blake3(data, max_threads=threads).hexdigest(16)
    if not values:
        return TensorRecord(digest)
    return TensorRecord(digest, base64.b64encode(data).decode(), tensor.dtype.name)


Tensors = Mapping[str, TensorRecord]
