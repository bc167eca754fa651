"""The coordinator's cost per worker: processor time a step, and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from resource import getpagesize

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tests.benchmarks.test_exchange import ROUNDS, SIZES, training

MIB = 2**20


def resident_bytes() -> int:
    """Return the memory of this process now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * getpagesize()


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("system", ["parameter_server", "mesh"])
def test_cost_of_the_coordinator(
    benchmark: BenchmarkFixture, say: Callable[[str], None], system: str, world_size: int
) -> None:
    """It is in this process, which does nothing else; with its average, which is 64 MB itself."""
    before = resident_bytes()
    with training(system, SIZES["64 MB"], world_size) as step:
        step()
        used = time.process_time()
        benchmark.pedantic(step, rounds=ROUNDS - 1)  # type: ignore[no-untyped-call]
        ms = 1e3 * (time.process_time() - used) / (ROUNDS - 1)
        mib = (resident_bytes() - before) / MIB
    say(f"coordinator of {system}, 64 MB, {world_size} workers: {ms:.1f} ms a step, {mib:.0f} MiB")
