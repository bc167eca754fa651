"""Faults that are injected into bytes."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.wire.messages import Heartbeat
from entrenar_py.train.wire_io.message_faults import Fate, Meddling, bent, unmeddled

DATA = st.binary(min_size=1, max_size=99)


@given(DATA, st.integers())
def test_one_bit_is_flipped(data: bytes, seed: int) -> None:
    """Exactly one bit, and the same one for the same seed."""
    flipped = bent(Meddling(Fate.FLIP), data, random.Random(seed))
    assert len(flipped) == len(data)
    assert sum((a ^ b).bit_count() for a, b in zip(data, flipped, strict=True)) == 1
    assert flipped == bent(Meddling(Fate.FLIP), data, random.Random(seed))


@given(DATA)
def test_what_changes_the_bytes(data: bytes) -> None:
    """Duplicate, truncation and flip change the bytes; other faults don't."""
    rng = random.Random(0)
    assert bent(Meddling(Fate.DUPLICATE), data, rng) == data * 2
    assert data.startswith(bent(Meddling(Fate.TRUNCATE), data, rng))
    assert len(bent(Meddling(Fate.TRUNCATE), data, rng)) == len(data) // 2
    for fate in set(Fate) - {Fate.DUPLICATE, Fate.TRUNCATE, Fate.FLIP}:
        assert bent(Meddling(fate), data, rng) == data


def test_nothing_befalls_anything() -> None:
    """The default injects no fault."""
    unmeddled(0, True, Heartbeat())
