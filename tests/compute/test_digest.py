"""The digest of a tensor: the facts it depends on, and its agreement with docs/watch.md.

On a GPU: the tables, the algorithm in numpy, and the kernel if Triton is there.
"""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from entrenar_py.compute import digest
from entrenar_py.compute.digest import DigestTable
from entrenar_py.shared.errors import BackendUnavailable
from tests.compute.xxh3 import Model, hash_chunks

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


# --- on a GPU -------------------------------------------------------------------------------------


def assorted(device: str = "cpu") -> list[Tensor]:
    """Return tensors of every format, of sizes near a chunk's, and some that are not aligned."""
    torch.manual_seed(0)
    base = torch.randn(5000, device=device)
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool]
    found = [base[:40].to(kind) for kind in kinds] + [base[:6].to(torch.complex64)]
    found += [base[:size].clone() for size in (0, 1, 2044, 2048, 2052, 4096)]
    found += [base[1:2049], base[:15].view(5, 3).t(), torch.tensor(2.5, device=device)]
    found += [base[:96].view(2, 4, 4, 3).to(memory_format=torch.channels_last)]
    for value, kind in zip((np.nan, np.inf, -np.inf, np.nan), kinds, strict=False):
        found.append(base[:4099].to(kind))
        found[-1][-1] = value
        found.append(torch.full((16,), torch.finfo(kind).max, dtype=kind, device=device))
    return found


def wrong(tensors: list[Tensor], rows: Tensor) -> list[int]:
    """Return the tensors whose row differs from the digest on the CPU."""
    flags, words = rows[:, 2].tolist(), rows[:, :2].cpu().contiguous().numpy()
    return [
        index
        for index, one in enumerate(tensors)
        if digest.text(words[index].tobytes()) != digest.digest(one)
        or bool(flags[index]) == digest.is_finite(one.cpu())
    ]


def test_the_algorithm_is_xxh3() -> None:
    """Secrets, start values, keys and order agree with the library."""
    words = np.random.default_rng(0).integers(0, 2**64, (8, 1024), dtype=np.uint64)
    found = hash_chunks(words, digest.secrets().view(np.uint64))
    known = [xxhash.xxh3_128_intdigest(one.tobytes()) for one in words]
    assert [high << 64 | low for low, high in found] == known


def test_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk of every level is found and stored at its place, also after values change."""
    monkeypatch.setattr(digest, "kernels", lambda: SimpleNamespace(hash_chunks=Model()))
    tensors = [*assorted(), torch.randn(520 * 2048)]  # the last has three levels
    table = DigestTable(tensors)
    assert not wrong(tensors, table.run())
    for one in tensors[:-1]:
        one.fill_(1)  # NaN and Inf are gone, too
    assert not wrong(tensors, table.run())


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")
def test_the_kernel() -> None:
    """The kernel agrees in Triton's interpreter, which must be chosen before Triton is imported."""
    code = (
        "from tests.check.watch.test_digest import *\n"
        "tensors = assorted()\n"
        "assert not wrong(tensors, DigestTable(tensors).run(per_program=64))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_kernel_on_a_gpu() -> None:
    """The digests equal the CPU's, also after the tensors were changed in place."""
    tensors = [*assorted("cuda"), torch.randn(40_000_001, device="cuda").bfloat16()]
    table = DigestTable(tensors)
    for _ in range(2):
        assert not wrong(tensors, table.run())
        tensors[-1][-1] += 1


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton the error says what to install."""
    monkeypatch.setitem(cast(dict[str, Any], sys.modules), "triton", None)
    monkeypatch.delitem(sys.modules, "entrenar_py.compute.digest_triton", raising=False)
    monkeypatch.delattr("entrenar_py.compute.digest_triton", raising=False)
    with pytest.raises(BackendUnavailable, match="pip install triton"):
        DigestTable([torch.zeros(1)])
