"""The digest of a tensor: the facts it depends on, and its agreement with docs/watch.md."""

from __future__ import annotations

import math
import struct

import pytest
import torch
import xxhash

from entrenar_py.check.watch import digest

RAMP = torch.arange(5000, dtype=torch.float32)


def as_the_page_says(tensor: torch.Tensor) -> str:
    """Compute a digest as docs/watch.md specifies it, without the module."""

    def number(data: bytes) -> bytes:
        return xxhash.xxh3_128_intdigest(data).to_bytes(16, "little")

    def level(data: bytes) -> bytes:
        chunks = [data[at : at + 8192] for at in range(0, len(data), 8192)]
        return b"".join(number(chunk.ljust(8192, b"\0")) for chunk in chunks)

    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    shape = number(struct.pack(f"<{tensor.dim()}Q", *tensor.shape))
    dtype = str(tensor.dtype).removeprefix("torch.").encode().ljust(16, b"\0")
    head = b"entrenar-digest1" + dtype + struct.pack("<2Q", len(data), tensor.dim()) + shape
    message = level(head + level(data))
    while len(message) > 16:
        message = level(message)
    return f"{int.from_bytes(message, 'little'):032x}"


@pytest.mark.parametrize(
    ("tensor", "known"),
    [
        (torch.tensor(1.0), "1aa51558"),
        (torch.zeros(0, 3), "19ab863c"),
        (RAMP.bfloat16(), "02ca3ffb"),
        (RAMP.repeat(300), "1ac96a42"),  # three levels
    ],
)
def test_known_digests(tensor: torch.Tensor, known: str) -> None:
    """A stored digest has the same meaning in every release."""
    assert digest.digest(tensor) == as_the_page_says(tensor)
    assert digest.digest(tensor).startswith(known)


def test_it_sees_everything() -> None:
    """Each change of bits, their places, chunks, size, shape and dtype gives another digest."""
    flipped = RAMP.clone()
    flipped.view(torch.int32)[4999] ^= 1
    swapped, moved = RAMP.clone(), RAMP.clone()
    swapped[0], swapped[1] = RAMP[1], RAMP[0]
    moved[:2048], moved[2048:4096] = RAMP[2048:4096], RAMP[:2048]
    negative = torch.zeros(5)
    negative[2] = -0.0
    others = [
        *(RAMP, flipped, swapped, moved, RAMP[:-1], torch.cat([RAMP, torch.zeros(1)])),
        *(RAMP.view(50, 100), RAMP.view(100, 50), RAMP.view(torch.int32), RAMP.double()),
        *(torch.zeros(5), negative, torch.zeros(0), torch.zeros(0, 1), torch.zeros(())),
    ]
    assert len({digest.digest(one) for one in others}) == len(others)


def test_it_does_not_see_strides() -> None:
    """The digest doesn't depend on a tensor's place in memory."""
    plain = torch.randn(4, 6, 5, 3)
    assert digest.digest(plain.to(memory_format=torch.channels_last)) == digest.digest(plain)
    turned = plain.transpose(0, 1)
    assert digest.digest(turned) == digest.digest(turned.contiguous()) != digest.digest(plain)
    assert digest.digest(torch.nn.Parameter(RAMP)) == digest.digest(RAMP)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_finite(dtype: torch.dtype, value: float) -> None:
    """One NaN or Inf is enough; the largest finite number is none."""
    calm = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    assert digest.is_finite(calm)
    calm[77] = value
    assert not digest.is_finite(calm)
    assert digest.is_finite(torch.zeros(0, dtype=dtype))
    assert digest.is_finite(torch.ones(3, dtype=torch.int64))
