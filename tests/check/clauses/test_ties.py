"""F-DP-001 on the copies of a tensor that a rank holds under several names."""

from __future__ import annotations

import pytest

from entrenar_py.shared.trace import Declared, Event, Noticed, Start, Trace, Update
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.clauses import traces
from tests.check.clauses.traces import broken, values


def trained(*events: Event, copies: tuple[float, ...]) -> Trace:
    """Return a run of one worker, in which the second name of a tensor takes the values `copies`.

    The first name takes 0, 1, 2.
    """
    held = [{"w": values(float(at)), "v": values(copy)} for at, copy in enumerate(copies)]
    updates = [
        Update(
            step=step,
            rank=0,
            loss=1.0,
            weight=1.0,
            learning_rate=0.1,
            finite=True,
            weights=weights,
        )
        for step, weights in enumerate(held[1:])
    ]
    start = Start(step=0, rank=0, weights=held[0], trainable=("w", "v"))
    alone = traces.scenario(world_size=1)
    return traces.hand_written(start, *events, *updates, subject=alone)


def judged(trace: Trace) -> Finding:
    """Return the finding of F-DP-001."""
    return traces.judge("replica_identity", [trace])


@pytest.mark.parametrize(("copies", "step"), [((0, 1, 3), 1), ((5, 1, 2), -1)])
def test_copies_that_differ(copies: tuple[float, ...], step: int) -> None:
    """Of a declared tie, a copy that differs is named in the first step where it does."""
    tie = Declared(step=0, rank=0, tied=(("w", "v"),))
    found = broken(judged(trained(tie, copies=copies)))
    assert (found.step, found.rank, found.tensor) == (step, 0, "v")


def test_copies_that_agree() -> None:
    """Copies of a declared tie that agree are compared, before the first step and after each."""
    tie = Declared(step=0, rank=0, tied=(("w", "v"),))
    finding = judged(trained(tie, copies=(0, 1, 2)))
    assert (finding.verdict, finding.compared) == (Verdict.HELD, 3)


def test_names_that_part() -> None:
    """Names of one tensor that become two are reported if nobody declared a tie."""
    once = Noticed(step=0, rank=0, shared=(("w", "v"),))
    finding = judged(trained(once, copies=(0, 1, 3)))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "w and v were one tensor when observe() was called, and differ in step 1" in (
        finding.reason
    )
    assert "tied=(('w', 'v'),)" in finding.reason
    (note,) = judged(trained(once, copies=(0, 1, 2))).notes
    assert "are two that agree" in note


def test_an_embedding_like_another_tensor() -> None:
    """Two tensors that start with the same values may have been one: a note says so."""
    seen = Noticed(step=0, rank=0, alike=(("w", "v"),))
    (note,) = judged(trained(seen, copies=(0, 1, 3))).notes
    assert "w and v have the same values before the first step, and are two tensors" in note
