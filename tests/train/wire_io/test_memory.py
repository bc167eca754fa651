"""The memory that it takes to send and receive large tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests

TOP = Path(next(iter(tests.__path__))).parent
ABOVE_MAX = 64 * 2**20
GIVEN_BACK_MAX = 2**20  # of what was resident before: the kernel may take pages of code away
# As in systems.memory: what is given back is given back at once.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}


def _end(*arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(TOP), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "tests.train.wire_io.crossing", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ALLOCATOR, "PYTHONPATH": path},
    )


@pytest.mark.parametrize(
    "size", [2**26, pytest.param(2**28, marks=pytest.mark.slow)], ids=["64 MiB", "256 MiB"]
)
def test_a_large_tensor_crosses_in_bounded_memory(size: int) -> None:
    """State down, tree node up, average down: either end takes one tensor and under 64 MiB."""
    with _end("coordinator", str(size)) as coordinator:
        assert coordinator.stdout is not None
        port = coordinator.stdout.readline().strip()
        with _end("worker", str(size), port) as worker:
            took = [int(end.communicate(timeout=120)[0]) for end in (worker, coordinator)]
    above = [each - size for each in took]
    assert all(-GIVEN_BACK_MAX <= each < ABOVE_MAX for each in above), above
