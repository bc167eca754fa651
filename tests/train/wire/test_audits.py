"""The choice of workers for copies of an audited shard, and the verdict on the copies."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from entrenar_py.train.wire.shard_assignment import Audit, Verdict, verdict


@pytest.mark.parametrize(
    ("copies", "alike", "found"),
    [
        ([1], [0], Verdict(0, None)),
        ([1, 1], [0, 0], Verdict(0, None)),
        ([1, 1], [0, 1], None),
        ([1, 2], [0, 0], Verdict(0, None)),
        ([1, 2], [0, 1], None),
        ([1, 2, 0], [0, 1, 1], Verdict(1, 1)),
        ([1, 2, 0], [0, 1, 0], Verdict(0, 2)),
        ([1, 2, 0], [0, 1, 2], None),
        ([1, 2, 1], [0, 1, 1], Verdict(1, 1)),
        ([1, 2, 1], [0, 1, 0], None),
        ([1, 2, 1, 2], [0, 1, 0, 0], Verdict(0, 2)),
        ([1, 2, 1, 2], [0, 1, 0, 1], None),
        ([1, 2, 1, 2], [0, 1, 2, 2], None),
    ],
)
def test_verdict(copies: list[int], alike: list[int], found: Verdict | None) -> None:
    """A copy of two workers counts, if at most one differs; one worker's two copies are one."""
    assert verdict(copies, alike) == found


@pytest.mark.parametrize(
    ("copies", "present", "asked"),
    [
        ([1, 2], {0, 1, 2}, 0),
        ([1, 2], {1, 2}, 1),
        ([1, 2, 1], {1, 2}, 2),
        ([1, 2, 1, 2], {1, 2}, None),
        ([1, 1], {1}, None),
        ([1], {1}, None),
        ([1], {1, 2}, 2),
        ([1, 2, 0], {0, 1, 2, 3}, None),
        ([1, 2, 1], {0, 1, 2}, 0),
    ],
)
def test_another(copies: list[int], present: Collection[int], asked: int | None) -> None:
    """A third worker is asked, else each of two once more; after three answers nobody is."""
    assert Audit(copies=copies).another(present, turn=0) == asked


def test_everyone_audits_everyone() -> None:
    """The second worker differs with each turn, and is never the first."""
    seconds = {Audit(asked=[1]).second({0, 1, 2, 3}, turn) for turn in range(3)}
    assert seconds == {0, 2, 3}
    assert Audit(asked=[1]).second({1}, 0) is None


def test_who_is_gone_is_forgotten() -> None:
    """A lost worker's copies and requests are removed."""
    audit = Audit(asked=[0, 1], copies=[1, 2, 1])
    assert not audit.forget(3)
    assert audit.forget(1)
    assert audit == Audit(asked=[0], copies=[2])
