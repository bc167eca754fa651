"""The digests on a GPU: the tables, the algorithm in numpy, and the kernel if Triton is there."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from entrenar_py.check.watch import digest, digest_table
from entrenar_py.check.watch.digest_table import DigestTable
from entrenar_py.shared.errors import BackendUnavailable
from tests.check.watch.xxh3 import Model, hash_chunks


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
    found = hash_chunks(words, digest_table.secrets().view(np.uint64))
    known = [xxhash.xxh3_128_intdigest(one.tobytes()) for one in words]
    assert [high << 64 | low for low, high in found] == known


def test_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk of every level is found and stored at its place, also after values change."""
    monkeypatch.setattr(digest_table, "_kernel", Model)
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
        "from tests.check.watch.test_digest_table import *\n"
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
    monkeypatch.delitem(sys.modules, "entrenar_py.check.watch.digest_kernel", raising=False)
    monkeypatch.delattr("entrenar_py.check.watch.digest_kernel", raising=False)
    with pytest.raises(BackendUnavailable, match="pip install triton"):
        DigestTable([torch.zeros(1)])
