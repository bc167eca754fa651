"""F-FT-017 to F-FT-019 on handwritten traces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.shared.trace import Encoded, Event, Explained, Referred, Taught
from entrenar_py.shared.verdict import Verdict
from tests import traces

USED = Referred(sample=0, use=0, chosen=-3.5, rejected=-7.25)
AGAIN = replace(USED, use=1)

CHOSEN = Encoded(
    sample=0,
    row=0,
    tokens=(1, 5, 6, 7, 2),
    predicted=(3, 4),
    stock_tokens=(1, 5, 6, 7, 2),
    completion=(3, 4),
    label=-1,
    side="chosen",
)
REJECTED = replace(
    CHOSEN,
    side="rejected",
    tokens=(1, 5, 6, 8, 9, 2),
    stock_tokens=(1, 5, 6, 8, 9, 2),
    predicted=(3, 4, 5),
    completion=(3, 4, 5),
)
LEARNED = (
    Taught(sample=0, positions=(2, 3), side="chosen"),
    Taught(sample=0, positions=(2, 3, 4), side="rejected"),
)
STEP = Explained(
    of="step",
    tensor="loss",
    step=0,
    device="cpu",
    software=False,
    finite=True,
    num_elements=1,
    num_bounded=1,
    element=0,
    error=1e-7,
    bound=1e-6,
    total_error=1e-7,
    total_bound=1e-6,
)


def judged(check: str, *events: Event) -> Any:
    return traces.judge(check, [traces.hand_written(*events)])


@pytest.mark.parametrize(
    ("events", "verdict", "words"),
    [
        ((USED, AGAIN), Verdict.HELD, ""),
        ((USED, replace(AGAIN, chosen=-3.25)), Verdict.FALSIFIED, "chosen side of pair 0 is -3.25"),
        ((USED, replace(AGAIN, rejected=-7.0)), Verdict.FALSIFIED, "was -7.25"),
        ((USED, replace(USED, sample=1)), Verdict.INCONCLUSIVE, "no pair was used twice"),
        ((), Verdict.INCONCLUSIVE, "no event Referred"),
    ],
)
def test_a_reference_keeps_its_bits(
    events: tuple[Event, ...], verdict: Verdict, words: str
) -> None:
    finding = judged("preference_reference", *events)
    assert finding.verdict is verdict, finding
    assert words in finding.reason


def shard(weight: float = 1.0) -> Event:
    return traces.shard(0, ids=(0,), weight=weight)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((CHOSEN, REJECTED, *LEARNED, shard()), ""),
        ((CHOSEN, REJECTED, *LEARNED, shard(5.0)), "counts 5, and has 1 pairs"),
        ((CHOSEN, *LEARNED, shard()), "pair 0 lacks a side"),
        (
            (CHOSEN, replace(REJECTED, tokens=(1, 5, 5, 8, 9, 2)), *LEARNED, shard()),
            "the rejected side of pair 0 has different tokens than transformers",
        ),
        (
            (
                CHOSEN,
                replace(REJECTED, tokens=(1, 4, 6, 8), stock_tokens=(1, 4, 6, 8)),
                shard(),
            ),
            "begin with different tokens before their completions",
        ),
        (
            (CHOSEN, REJECTED, replace(LEARNED[0], positions=(1, 2, 3)), LEARNED[1], shard()),
            "the loss of the chosen side of pair 0 depends on states [1], that predict no target",
        ),
        (
            (CHOSEN, REJECTED, LEARNED[0], replace(LEARNED[1], positions=(2, 3, 4, 7)), shard()),
            "the loss of the rejected side of pair 0 depends on states [7], beyond its last",
        ),
    ],
)
def test_only_completions_count_after_one_prompt(events: tuple[Event, ...], words: str) -> None:
    finding = judged("pair_tokens", *events)
    assert finding.verdict is (Verdict.FALSIFIED if words else Verdict.HELD), finding
    assert words in finding.reason


def test_pairs_that_were_not_watched_are_open() -> None:
    assert judged("pair_tokens", CHOSEN, REJECTED, shard()).verdict is Verdict.INCONCLUSIVE
    assert judged("pair_tokens").verdict is Verdict.INCONCLUSIVE


def test_other_clauses_leave_sides_alone() -> None:
    assert judged("completion_tokens", CHOSEN, REJECTED, *LEARNED).verdict is Verdict.INCONCLUSIVE


def test_steps_with_pairs_are_compared() -> None:
    """Steps of a run without pairs are left to F-FT-009."""
    assert judged("preference_steps", USED, STEP).verdict is Verdict.HELD
    off = replace(STEP, error=1e-3, total_error=1e-3)
    assert judged("preference_steps", USED, off).verdict is Verdict.FALSIFIED
    assert judged("preference_steps", STEP).verdict is Verdict.INCONCLUSIVE
    assert judged("preference_steps").verdict is Verdict.INCONCLUSIVE
