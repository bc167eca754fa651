"""Bugs in a star whose server makes the steps and sends the new weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from entrenar_py.shared import workers
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.train.arithmetic import engine, optimizer
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Effect, Prepare
from entrenar_py.train.wire.messages import Weights

from .blocks import held_already, remembers_its_blocks, room_apart
from .subjects import COORDINATOR, MEMBER, SERVER, TRAINING, WORKER, star

ENGINE = f"{TRAINING}.engine.Engine"
_prepare, _apply, _restore = Server.prepare, Server.apply_average, Server.restore
_reduced, _prepared = Coordinator.reduced, Coordinator.prepared


# --- when a step is made, and of what ---------------------------------------------------------


def made_with_the_first_block(
    self: Coordinator, step: int, block: int, loss: float, weight: float, now: float
) -> list[Effect]:
    """Makes the step when the first block is averaged, and sends it when the last one is."""
    if not self.run.server_updates or self.run.num_blocks == 1:
        return _reduced(self, step, block, loss, weight, now)
    self._reducing.remove(block)
    early: list[Effect] = [Prepare(step)] if block == self.run.num_blocks - 1 else []
    if self._missing or self._reducing:
        return early
    blocks = reversed(range(self.run.num_blocks))
    made = [Weights(step=step, block=one, loss=loss, weight=weight) for one in blocks]
    return self._spread(made, last=True, now=now)


def says_nothing(
    self: Coordinator, step: int, loss: float, weight: float, now: float
) -> list[Effect]:
    """Does not send the new weights yet, unless there is only one block."""
    return _prepared(self, step, loss, weight, now) if self.run.num_blocks == 1 else []


def clipped_block_by_block(self: Server, step: int) -> tuple[float, float]:
    """Clips each block by its own norm, as if it were the whole gradient."""
    average, limit = self.average_held(), self.plan.clip_norm
    clipped = average.clipped.gradient.copy()
    blocks, gradient = self.reduction.blocks, average.mean[: self.replicas.layout.num_trainable]
    for block in blocks.order():
        part = gradient[blocks.part(block)]
        clipped[blocks.part(block)] = optimizer.clip(part, optimizer.norm_l2(part), limit)
    self._average = lambda: replace(
        average, clipped=replace(average.clipped, gradient=clipped, is_as_before=False)
    )
    return _prepare(self, step)


def made_in_place(self: Server, step: int) -> tuple[float, float]:
    """Makes the step on the server's own state, before any worker has the new weights."""
    average = self.average_held()
    self.replicas.move(self.replica, average.clipped, average.mean)
    self.replica.replica.copy_to(self.reduction.vector)
    return self.reduction.total


def in_use_already(self: Server, step: int) -> None:
    """Only moves on to the next samples on commit, because `made_in_place` changed the state."""
    if not workers.by_server(self.plan):
        _apply(self, step)
        return
    self.replicas.advance(len(self.replicas.batch()))


# --- what is kept -----------------------------------------------------------------------------


def restored_without_moments(self: Server) -> int:
    """Resumes from a checkpoint without the moments."""
    step = _restore(self)
    if workers.by_server(self.plan):
        self.replica.state = {n: np.zeros_like(one) for n, one in self.replica.state.items()}
    return step


def moments_left_behind(self: Server, step: int) -> None:
    """Uses the prepared weights with the old moments."""
    before = self.replica.state
    _apply(self, step)
    if workers.by_server(self.plan):
        self.replica.state, self._beside.state = before, self.replica.state  # type: ignore[union-attr]


# --- what goes down ---------------------------------------------------------------------------


def weights_in_use_sent(self: Server, step: int) -> tuple[float, float]:
    """Prepares the step, and sends the old weights."""
    total = _prepare(self, step)
    self.replica.replica.copy_to(self.reduction.vector)
    return total


def buffers_stay(self: engine.Engine, vector: Array) -> None:
    """Takes the new parameters from the server, and keeps the old buffers."""
    self.parameters[:] = vector[: self.layout.num_trainable]


_SERVED = {"updates": "server", "block_bytes": 400}
_STAR = star(options=_SERVED)
_ALL_DIE = tuple(Fault(kind="kill", rank=rank, step=1, at="Weights") for rank in (0, 1))

VARIANTS = (
    Variant(
        name="made-with-the-first-block",
        summary="the server takes the step when the first block is averaged, not the last",
        source="classic (fused optimizer on partial buckets)",
        plants={
            f"{COORDINATOR}.Coordinator.reduced": made_with_the_first_block,
            f"{COORDINATOR}.Coordinator.prepared": says_nothing,
        },
        scenario=_STAR,
        invariants=("F-DP-005",),
        place={"step": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="clipped-block-by-block",
        summary="the server clips each block by its own norm",
        source="classic (clipping per bucket)",
        plants={f"{SERVER}.Server.prepare": clipped_block_by_block},
        scenario=star(options=_SERVED, clip_norm=0.05),
        invariants=("F-TI-008", "F-DP-005"),
        place={"step": 0},
    ),
    Variant(
        name="prepared-in-place",
        summary="the server takes a step before any worker has it; if all die, it takes it again",
        source="classic (two-phase commit)",
        plants={
            f"{SERVER}.Server.prepare": made_in_place,
            f"{SERVER}.Server.apply_average": in_use_already,
        },
        scenario=star(options=_SERVED, world_size=2, faults=_ALL_DIE),
        invariants=("F-DP-001", "F-WP-005"),
        place={"tensor": "hidden1.weight"},
    ),
    Variant(
        name="restored-without-moments",
        summary="a coordinator that updates resumes from its checkpoint with weights only",
        source="classic (state of one owner not saved)",
        plants={f"{SERVER}.Server.restore": restored_without_moments},
        scenario=star(options=_SERVED, stops=(2,), optimizer="momentum"),
        invariants=("F-TI-003", "F-TI-008"),
        place={"step": 2, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="moments-left-behind",
        summary="a commit swaps in the server's new weights, but not its new moments",
        source="classic (half a double buffer)",
        plants={f"{SERVER}.Server.apply_average": moments_left_behind},
        scenario=star(options=_SERVED, optimizer="momentum"),
        invariants=("F-DP-005", "F-TI-008"),
        place={"step": 1, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="weights-in-use-sent",
        summary="the server sends the weights from before the step",
        source="classic (the wrong one of two buffers)",
        plants={f"{SERVER}.Server.prepare": weights_in_use_sent},
        scenario=_STAR,
        invariants=("F-DP-005", "F-TI-008"),
        place={"step": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="buffers-stay-behind",
        summary="a worker uses the new weights, but not the new buffers",
        source="classic (parameter server of parameters alone)",
        plants={f"{ENGINE}.copy_from": buffers_stay},
        scenario=_STAR,
        invariants=("F-DP-005",),
        place={"step": 0, "tensor": "running_mean"},
    ),
    Variant(
        name="stale-weights-held",
        summary="a worker that rejoins uses old weight blocks as those of the next step",
        source="classic (elastic training)",
        plants={
            f"{WORKER}.Worker._enter": remembers_its_blocks,
            f"{WORKER}.Worker._hold": held_already,
            f"{MEMBER}.Member.room": room_apart,
        },
        scenario=star(options=_SERVED, faults=(Fault(kind="cut", rank=1, step=1, at="Staged"),)),
        invariants=("F-DP-001", "F-WP-005"),
        place={"step": 2, "rank": 1},
    ),
)
