"""Settings of the tests that observe in their own process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Hide what pytest and others hold: an observer looks through all objects, 0.1 s each time."""
    gc.freeze()
    yield
    gc.unfreeze()
