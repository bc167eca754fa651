"""The work of a stage's worker: what it takes, what it refuses, and how it loads its stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.stages import member
from entrenar_py.train.stages.member import StageHands, StageMember
from entrenar_py.train.wire.messages import Activation, ActivationGradient, Welcome

SHAPE = (1, 2, 3)
NUM_BYTES = 4 * 6
GRADIENT = ActivationGradient(step=0, round=1, shard=0)
HIDDEN = Activation(step=0, round=1, shard=0, dtype="float32", draws=0)


@pytest.fixture
def stage() -> StageMember:
    """Return a stage in step 0 that has sent nothing yet, of one shard with hidden states SHAPE."""
    made: Any = StageMember.__new__(StageMember)
    made.workload = SimpleNamespace(hidden_shape=lambda ids: SHAPE)
    made.member, made._round = SimpleNamespace(shards=[(0,)], step=0), member._Round(0)
    return cast(StageMember, made)


def test_a_gradient_of_a_round_that_is_over_may_come(stage: StageMember) -> None:
    """The machine drops it; were it one of this round, it would be refused."""
    stage.require(GRADIENT, bytes(NUM_BYTES))
    with pytest.raises(ProtocolError, match="shard=0: its hidden states were not sent"):
        stage.receive(GRADIENT, bytes(NUM_BYTES))


def test_a_gradient_has_the_size_of_its_hidden_states(stage: StageMember) -> None:
    """In their format."""
    stage._round.dtypes[0] = torch.bfloat16
    stage.require(GRADIENT, bytes(NUM_BYTES // 2))
    with pytest.raises(ProtocolError, match=f"with {NUM_BYTES} bytes: expected {NUM_BYTES // 2}"):
        stage.require(GRADIENT, bytes(NUM_BYTES))


def test_hidden_states_have_the_size_of_their_shard(stage: StageMember) -> None:
    """They are checked as they come."""
    stage.require(HIDDEN, bytes(NUM_BYTES))
    with pytest.raises(ProtocolError, match=f"with 4 bytes: expected {NUM_BYTES}"):
        stage.require(HIDDEN, bytes(4))


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
