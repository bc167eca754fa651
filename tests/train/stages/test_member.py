"""The work of one stage: which tensors of other stages it takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.stages import member
from entrenar_py.train.stages.member import StageMember
from entrenar_py.train.wire.messages import Activation, ActivationGradient

SHAPE = (1, 2, 3)
NUM_BYTES = 4 * 6
GRADIENT = ActivationGradient(step=0, round=1, shard=0)
HIDDEN = Activation(step=0, round=1, shard=0, dtype="float32", draws=0)


@pytest.fixture
def stage() -> StageMember:
    """Return a stage in step 0 that has sent nothing yet, of one shard with hidden states SHAPE."""
    made: Any = StageMember.__new__(StageMember)
    made.workload = SimpleNamespace(hidden_shape=lambda ids: SHAPE)
    made._shards, made._step, made._round = [(0,)], 0, member._Round(0)
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
