"""The digest of a tensor: 128 bits of its bytes, dtype and shape (docs/watch.md specifies it).

XXH3-128 over chunks, then over the list of their digests, until one is left: so that a GPU can work
on all chunks at once, and anything between can be recomputed with a stock library.
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
    """32 hex digits; the same on every device, and whatever the tensor's strides are."""
    return text(root(header(tensor), memory(tensor)))


def text(number: bytes) -> str:
    """A digest as people read it, the highest byte first; `number` as it is kept, the lowest."""
    return number[::-1].hex()


def header(tensor: Tensor) -> bytes:
    """What stands before the digests of a tensor's chunks: its size, dtype and shape."""
    name = str(tensor.dtype).removeprefix("torch.").encode()
    assert len(name) <= _NAME_BYTES, name
    sizes = struct.pack(f"<{tensor.dim()}Q", *tensor.shape)
    num_bytes = tensor.numel() * tensor.element_size()
    fields = struct.pack("<2Q", num_bytes, tensor.dim())
    return MAGIC + name.ljust(_NAME_BYTES, b"\0") + fields + _little(xxh3_128_digest(sizes))


def memory(tensor: Tensor) -> memoryview:
    """The bytes of the elements in their logical order; copied unless they lie so on the CPU."""
    plain = tensor.detach().cpu().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def root(head: bytes, data: memoryview) -> bytes:
    """The digest of `data` and its `head`, 16 bytes, the lowest first."""
    message = head + _digests(data)
    while len(message) > DIGEST_BYTES:
        message = _digests(memoryview(message))
    return message


def _digests(data: memoryview) -> bytes:
    """One digest a chunk; the last is filled up with zeros."""
    whole = len(data) - len(data) % CHUNK_BYTES
    found = [xxh3_128_digest(data[i : i + CHUNK_BYTES]) for i in range(0, whole, CHUNK_BYTES)]
    if whole < len(data):
        rest = bytes(data[whole:])
        found.append(xxh3_128_digest(rest + _ZEROS[len(rest) :]))
    return _little(b"".join(reversed(found)))


def _little(numbers: bytes) -> bytes:
    """xxhash writes the highest byte of a number first; all of `numbers` backwards."""
    return numbers[::-1]


def is_finite(tensor: Tensor) -> bool:
    """Whether it holds neither NaN nor Inf. One pass, no second tensor of its size."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return all(_is_finite(one) for one in real.aminmax())


def _is_finite(number: Tensor) -> bool:
    return bool(number.isfinite())


def all_words(roots: Iterable[bytes]) -> Tensor:
    """int64 [tensors, 2]: the low and the high half of each digest."""
    joined = bytearray(b"".join(roots))
    if not joined:
        return torch.empty((0, 2), dtype=torch.int64)
    return torch.frombuffer(joined, dtype=torch.int64).view(-1, 2)
