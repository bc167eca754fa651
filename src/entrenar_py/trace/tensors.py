"""The record of a tensor: a digest of its bytes, and its values if they are requested."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TensorRecord:
    """A tensor in a trace: its digest, and its values if the scenario requests them.

    `digest` is BLAKE3 (128 bits, hex) of the raw little-endian elements in C order. `data` is the
    base64 of the same bytes, `dtype` a numpy dtype name.
    """

    digest: str
    data: str | None = None
    dtype: str = "float32"

    def values(self) -> np.ndarray[Any, Any] | None:
        """Return the elements, flat `[size]`, or None if only the digest was kept."""
        if self.data is None:
            return None
        import numpy as np

        return np.frombuffer(base64.b64decode(self.data), dtype=self.dtype)


def record_tensor(tensor: np.ndarray[Any, Any], *, values: bool = False) -> TensorRecord:
    """Return the record of a C-contiguous array of any shape. The array is not kept."""
    data = tensor.data.cast("B") if tensor.size else b""
    digest = blake3(data).hexdigest(16)
    if not values:
        return TensorRecord(digest)
    return TensorRecord(digest, base64.b64encode(data).decode(), tensor.dtype.name)


Tensors = Mapping[str, TensorRecord]
