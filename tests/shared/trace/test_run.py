"""A run's events by kind, and its end."""

from __future__ import annotations

from dataclasses import replace

from entrenar_py.shared import trace
from tests.shared.trace.samples import EVENTS, WHOLE


def test_of_and_end() -> None:
    """`of` returns events by kind, in order. A trace without an end counts as failed."""
    assert [shard.shard for shard in WHOLE.of(trace.Shard)] == [2, 3]
    assert WHOLE.end.status == "completed"
    cut = replace(WHOLE, events=EVENTS[:-1])
    assert (cut.end.status, cut.end.reason) == ("failed", "the trace has no end event")
