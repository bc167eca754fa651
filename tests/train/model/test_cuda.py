"""A model on CUDA: its bits depend on the samples alone, not on what was compiled or recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def started(small: Path, task: str, order: str) -> subprocess.Popen[str]:
    """Start a process that computes batches in this order, with nothing compiled before."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.train.model.shapes_in_order", str(small), task, order],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(small / f"cache-{task}-{order}")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def digests(process: subprocess.Popen[str]) -> dict[str, set[str]]:
    """Return the digests of each batch's gradient."""
    told, problem = process.communicate()
    assert process.returncode == 0, problem
    assert "can't be recorded" not in problem
    found: dict[str, set[str]] = {}
    for line in told.splitlines():
        number, _, digest = line.partition(" ")
        found.setdefault(number, set()).add(digest)
    return found


@pytest.mark.parametrize("task", ["text", "classify"])
def test_bits_dont_depend_on_the_order_of_shapes(small: Path, task: str) -> None:
    """Each batch is computed as it comes, then recorded, then replayed."""
    orders = ("0,1,2,3,0,1,2,3,0,1,2,3", "warm,3,3,2,1,0,3,0,2,1,0")
    one, other = map(digests, [started(small, task, order) for order in orders])
    assert {number: len(found) for number, found in one.items()} == dict.fromkeys("0123", 1)
    assert one == other
