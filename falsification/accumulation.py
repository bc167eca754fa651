"""Bugs in the loop over micro-batches, and gradients that are kept beyond their step."""

from __future__ import annotations

from entrenar_py.shared import trace
from entrenar_py.shared.mutants import Variant
from entrenar_py.systems import textbook as trainer
from entrenar_py.systems.textbook import Replica, Setup
from entrenar_py.train.arithmetic import sharding

from .subjects import TEXTBOOK, textbook

_micro_step = trainer.micro_step


def cleared_each(
    setup: Setup,
    replica: Replica,
    step: int,
    epoch: int,
    micro: int,
    ids: sharding.Ids,
    weight: float,
) -> trace.Shard:
    """Clears the gradients inside the loop."""
    replica.optimizer.zero_grad()
    return _micro_step(setup, replica, step, epoch, micro, ids, weight)


def cleared_by_evaluation(
    setup: Setup,
    replica: Replica,
    step: int,
    epoch: int,
    micro: int,
    ids: sharding.Ids,
    weight: float,
) -> trace.Shard:
    """Evaluates before the third micro-batch, which clears what was accumulated."""
    if micro == 2:
        replica.optimizer.zero_grad()
    return _micro_step(setup, replica, step, epoch, micro, ids, weight)


def stepped_each(
    setup: Setup,
    replica: Replica,
    step: int,
    epoch: int,
    micro: int,
    ids: sharding.Ids,
    weight: float,
) -> trace.Shard:
    """Steps after every micro-batch; after the last one the training loop does so itself."""
    shard = _micro_step(setup, replica, step, epoch, micro, ids, weight)
    if micro < setup.scenario.accumulation - 1:
        replica.optimizer.step()
        replica.optimizer.zero_grad()
    return shard


def never_cleared(replica: Replica) -> None:
    """Keeps the gradients of the step before."""


def cleared_to_weights(replica: Replica) -> None:
    """The buffer that should be zero holds the gathered weights."""
    for tensor in replica.tensors.values():
        if tensor.grad is not None:
            tensor.grad.copy_(tensor.detach())


_LOST = {"step": 0, "rank": 0, "tensor": "hidden1.weight"}

VARIANTS = (
    Variant(
        name="ga-drop",
        summary="zero_grad inside the accumulation loop: only the last micro-batch counts",
        source="DeepSpeed #6550, #7967",
        plants={f"{TEXTBOOK}.micro_step": cleared_each},
        scenario=textbook(accumulation=4),
        invariants=("F-DP-005", "F-TI-001"),
        place=_LOST,
    ),
    Variant(
        name="ga-drop-evaluation",
        summary="an evaluation between two micro-batches clears the gradients",
        source="DeepSpeed #7981, Lightning #18710",
        plants={f"{TEXTBOOK}.micro_step": cleared_by_evaluation},
        scenario=textbook(accumulation=4),
        invariants=("F-DP-005", "F-TI-001"),
        place=_LOST,
    ),
    Variant(
        name="ga-step-each",
        summary="the optimizer steps after every micro-batch",
        source="accelerate #2790",
        plants={f"{TEXTBOOK}.micro_step": stepped_each},
        scenario=textbook(world_size=1, accumulation=4),
        invariants=("F-DP-005", "F-TI-001"),
        # The loss differs, too: later micro-batches are computed with changed weights.
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="zero-grad-forgotten",
        summary="gradients of earlier steps are kept, and added to",
        source="albor ALB-092",
        plants={f"{TEXTBOOK}.zero_grad": never_cleared},
        scenario=textbook(),
        invariants=("F-DP-005",),
        place={"step": 1, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="buffer-alias",
        summary="the gradient buffer is reused and starts from the gathered weights",
        source="Megatron-LM #4609, #3023",
        plants={f"{TEXTBOOK}.zero_grad": cleared_to_weights},
        scenario=textbook(),
        invariants=("F-DP-005",),
        place={"step": 1, "rank": 0, "tensor": "hidden1.weight"},
    ),
)
