"""A pipeline worker's hands: a stage is loaded in a thread, while its connection may end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from entrenar_py.train.stages.member import StageHands
from entrenar_py.train.wire.messages import Welcome


class Loading:
    """A stage's work that records which states it took over; `meanwhile` is done during a load."""

    def __init__(self) -> None:
        self.states: list[int] = []
        self.meanwhile: list[Welcome] = []
        self.hands: StageHands | None = None

    def load(self, welcome: Welcome, payload: Any) -> None:
        for other in self.meanwhile:
            assert self.hands is not None
            self.meanwhile = []
            self.hands.take(other, b"")
        self.states.append(welcome.step)


def welcome(step: int) -> Welcome:
    """Return the message that brings the state before `step`."""
    return Welcome(rank=0, step=step, blocks=1, resumed=False, proof="0" * 32)


def hands_of(stage: Loading) -> StageHands:
    """Return hands whose only stage is `stage`."""
    cut = cast(Any, SimpleNamespace(stage_of_rank=lambda rank: 0))
    stage.hands = StageHands(cut, lambda number: cast(Any, stage), hidden_bytes=0)
    return stage.hands


def test_a_state_that_comes_during_a_load_is_loaded_after_it() -> None:
    """The stage is loaded once the last one is taken over."""
    stage = Loading()
    hands = hands_of(stage)
    stage.meanwhile = [welcome(2)]
    hands.take(welcome(1), b"")
    hands.load_taken()
    was_loaded = hands._is_loaded
    hands.load_taken()
    assert (was_loaded, hands._is_loaded) == (False, True)
    assert stage.states == [1, 2]


def test_a_state_that_comes_before_a_load_replaces_the_first() -> None:
    """The second load has nothing to do."""
    stage = Loading()
    hands = hands_of(stage)
    hands.take(welcome(1), b"")
    hands.take(welcome(2), b"")
    hands.load_taken()
    hands.load_taken()
    assert hands._is_loaded
    assert stage.states == [2]
