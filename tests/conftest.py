"""Settings of all tests, and what is too expensive to be made twice."""

from __future__ import annotations

import signal
from functools import cache

import pytest
from hypothesis import settings

from entrenar_py import kill_matrix, mutants
from entrenar_py.kill_matrix import Row

# A timing is a benchmark, never a test: a slow machine must not fail one.
# The same examples in every run, so that a gate is not a lottery; `make soak` looks further.
settings.register_profile("entrenar", deadline=None, derandomize=True)
settings.load_profile("entrenar")

# What a shell starts in the background ignores interrupts, and so would all that is tested here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests are spread over processes, those of a file stay together: what a file needs is
    made once. So do all that need the matrix."""
    for item in items:
        shares_matrix = "matrix" in getattr(item, "fixturenames", ())
        group = "matrix" if shares_matrix else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@cache
def _matrix() -> list[Row]:
    return kill_matrix.run(list(mutants.catalogue().values()), kill_matrix.invariants())


@pytest.fixture
def matrix() -> list[Row]:
    """Every variant as every clause that judges it found it; run once a process."""
    return _matrix()
