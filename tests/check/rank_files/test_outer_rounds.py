"""The rounds of ranks that step alone, as their files show them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check.rank_files import outer_rounds, rank_trace
from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.shared.errors import TraceError
from entrenar_py.shared.trace import Synchronised

NESTEROV = {"rule": "nesterov", "lr": 0.7, "momentum": 0.9}


def meeting(rank: int, *steps: int) -> list[Synchronised]:
    """Return the synchronisations of a rank after these steps."""
    return [Synchronised(step=step, rank=rank, weights={}) for step in steps]


def ranks(**rule: Any) -> list[RankTrace]:
    """Return the records of two ranks that were brought together by `rule`."""
    return [
        RankTrace(
            life=0,
            header={"rank": rank, "world_size": 2},
            events=(),
            ended=True,
            problem="",
            outer={**NESTEROV, **rule},
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("steps", "length"),
    [
        ((1, 3, 5), 2),
        ((2, 5, 7), 3),  # the last round is short
        ((0, 2, 4), None),  # rounds of 1, 2, 2 steps
        ((3,), 4),
    ],
)
def test_the_length_of_a_round(steps: tuple[int, ...], length: int | None) -> None:
    """All rounds but the last have one length, or none is known."""
    options, _ = outer_rounds.shown(ranks(), meeting(0, *steps) + meeting(1, *steps))
    assert options.get("inner_steps") == length


def test_ranks_that_meet_at_different_steps() -> None:
    """The length is that of most rounds, and a declared one counts before what is seen."""
    events = meeting(0, 1, 3, 5) + meeting(1, 1, 5)
    assert outer_rounds.shown(ranks(), events)[0]["inner_steps"] == 2
    assert outer_rounds.shown(ranks(inner_steps=4), events)[0]["inner_steps"] == 4


def test_the_rule_of_the_outer_step() -> None:
    """Rate and momentum are options, the kind of momentum is a trait; nothing without a rule."""
    events = meeting(0, 1)
    options, traits = outer_rounds.shown(ranks(rule="momentum"), events)
    assert (options["outer_learning_rate"], options["outer_momentum"]) == (0.7, 0.9)
    assert traits == {"outer": "momentum"}
    options, traits = outer_rounds.shown(ranks(rule="other"), events)
    assert traits == {"outer": "other"}
    assert "outer_learning_rate" not in options
    seen, _ = outer_rounds.shown(ranks(), [])  # an outer optimizer, before weights show rounds
    assert seen == {"outer_learning_rate": 0.7, "outer_momentum": 0.9}
    bare = [replace(rank, outer={}) for rank in ranks()]
    assert outer_rounds.shown(bare, []) == ({}, {})


@pytest.mark.parametrize(
    "record",
    [
        {"rule": "unheard of"},
        {"rule": "nesterov"},
        {"rule": "nesterov", "lr": "0.7", "momentum": 0.9},
        {**NESTEROV, "inner_steps": 0},
    ],
)
def test_a_damaged_rule_is_refused(record: dict[str, Any]) -> None:
    """A rule that no rank writes is an error."""
    with pytest.raises(TraceError):
        rank_trace._NOTES["outer"](ranks()[0], record)


def test_a_rule_that_changes_is_another_one() -> None:
    """A rate that differs from round to round is no rule that is known."""
    found = rank_trace._NOTES["outer"](ranks()[0], {**NESTEROV, "lr": 0.1})
    assert found.outer["rule"] == "other"
