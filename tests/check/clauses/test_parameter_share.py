"""F-PAR-006 on handwritten traces."""

from __future__ import annotations

import pytest

from entrenar_py.shared.trace import Held, Start, Trace
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses import traces


def held(*sizes: int) -> Trace:
    """Return a run whose ranks hold so many of 1000 bytes that two ranks share."""
    starts = [Start(step=0, rank=rank, weights={}) for rank in range(2)]
    ranks = [
        Held(rank=rank, num_parts=2, held_bytes=size, whole_bytes=1000)
        for rank, size in enumerate(sizes)
    ]
    return traces.hand_written(*starts, *ranks)


@pytest.mark.parametrize(
    ("sizes", "verdict", "rank"),
    [
        ((500, 525), Verdict.HELD, None),
        ((500, 526), Verdict.FALSIFIED, 1),
        ((500,), Verdict.INCONCLUSIVE, None),
    ],
)
def test_a_share_is_one_part_and_little_more(
    sizes: tuple[int, ...], verdict: Verdict, rank: int | None
) -> None:
    """A rank that holds more is named; a rank without a recorded size is missing."""
    finding = traces.judge("holdings", [held(*sizes)])
    assert finding.verdict is verdict, finding
    found = finding.counterexample
    assert (None if found is None else found.rank) == rank
