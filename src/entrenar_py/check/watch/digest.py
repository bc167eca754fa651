"""The digest of a tensor: 128 bits of its bytes, dtype and shape (docs/watch.md specifies it).

Chunks are hashed by XXH3-128, then the list of their digests in the same way, until one is left. So
a GPU can hash all chunks at once, and a stock library can compute every intermediate result again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import torch
from torch import Tensor
from xxhash import xxh3_128_digest

CHUNK_BYTES = 8192  # small enough that a few hundred megabytes keep every core of a GPU busy
DIGEST_BYTES = 16
MAGIC = b"entrenar-digest1"
HEADER_BYTES = 64
_NAME_BYTES = 16
_ZEROS = bytes(CHUNK_BYTES)


def digest(tensor: Tensor) -> str:
    """Return a tensor's digest, 32 hex digits: the same on every device, and for any strides."""
    return text(root(header(tensor), memory(tensor)))


def text(number: bytes) -> str:
    """Return a digest in hex, highest byte first; `number` has its lowest byte first."""
    return number[::-1].hex()


def header(tensor: Tensor) -> bytes:
    """Return the header that precedes the digests of a tensor's chunks: size, dtype and shape."""
    name = str(tensor.dtype).removeprefix("torch.").encode()
    assert len(name) <= _NAME_BYTES, name
    sizes = struct.pack(f"<{tensor.dim()}Q", *tensor.shape)
    num_bytes = tensor.numel() * tensor.element_size()
    fields = struct.pack("<2Q", num_bytes, tensor.dim())
    return MAGIC + name.ljust(_NAME_BYTES, b"\0") + fields + _little(xxh3_128_digest(sizes))


def memory(tensor: Tensor) -> memoryview:
    """Return the bytes of the elements in logical order.

    They are copied unless they lie in that order in the CPU's memory.
    """
    plain = tensor.detach().cpu().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def root(head: bytes, data: memoryview) -> bytes:
    """Return the digest of `data` and its `head`: DIGEST_BYTES bytes, the lowest first."""
    message = head + _digests(data)
    while len(message) > DIGEST_BYTES:
        message = _digests(memoryview(message))
    return message


def _digests(data: memoryview) -> bytes:
    """Return the digests of all chunks, joined; the last chunk is filled up with zeros."""
    whole = len(data) - len(data) % CHUNK_BYTES
    digests = [xxh3_128_digest(data[i : i + CHUNK_BYTES]) for i in range(0, whole, CHUNK_BYTES)]
    if whole < len(data):
        rest = bytes(data[whole:])
        digests.append(xxh3_128_digest(rest + _ZEROS[len(rest) :]))
    return _little(b"".join(reversed(digests)))


def _little(numbers: bytes) -> bytes:
    """Return `numbers` reversed: xxhash writes the highest byte first, `root` the lowest."""
    return numbers[::-1]


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN or Inf, in one pass and without a copy of its size."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return all(bool(extreme.isfinite()) for extreme in real.aminmax())


def all_words(roots: Iterable[bytes]) -> Tensor:
    """Return the low and the high half of each digest, int64 [tensors, 2]."""
    joined = bytearray(b"".join(roots))
    if not joined:
        return torch.empty((0, 2), dtype=torch.int64)
    return torch.frombuffer(joined, dtype=torch.int64).view(-1, 2)
