"""The steps after which workers that step alone are synchronised."""

from __future__ import annotations

from typing import Any

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.workers import Outer


def test_the_last_round_may_be_short() -> None:
    """Rounds end after a fixed number of steps, and after the last step."""
    rule = Outer.of({"inner_steps": 2, "deadline_s": 5.0})
    assert [step for step in range(5) if rule.ends_round(step, 5)] == [1, 3, 4]
    assert [rule.round_end(step, 5) for step in range(5)] == [2, 2, 4, 4, 5]


def test_the_defaults_are_the_paper_s() -> None:
    """The defaults are 500 steps alone, 0.7 and 0.9."""
    assert Outer.of({}) == Outer(inner_steps=500, outer_learning_rate=0.7, outer_momentum=0.9)


@pytest.mark.parametrize(
    "options",
    [
        {"inner_steps": 0},
        {"inner_steps": 2.0},
        {"outer_learning_rate": -1.0},
        {"outer_learning_rate": "nan"},
        {"outer_learning_rate": float("nan")},
        {"outer_momentum": 1.0},
    ],
)
def test_what_is_out_of_range_is_refused(options: dict[str, Any]) -> None:
    """Values out of range are refused with the option's name and the value."""
    with pytest.raises(UsageError, match=f"{next(iter(options))}=.*: use a"):
        Outer.of(options)
