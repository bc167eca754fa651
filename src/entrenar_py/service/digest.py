"""One short name for all weights and buffers of a replica."""

from __future__ import annotations

from blake3 import blake3

from entrenar_py.trace import Tensors


def of(weights: Tensors, buffers: Tensors) -> str:
    """16 hex digits over the names and digests of all of them, in their order."""
    tensors = {**weights, **buffers}
    text = "\n".join(f"{name} {record.digest}" for name, record in tensors.items())
    return str(blake3(text.encode("utf-8", "backslashreplace")).hexdigest(8))
