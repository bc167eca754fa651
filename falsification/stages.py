"""Bugs of layer pipelines: in what stages pass on, in what they share, and in their checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic import optimizer, reduction, sharding
from entrenar_py.train.coordinator import replicas
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.model import blocks, masks
from entrenar_py.train.stages import member, stage_model, stage_step
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import Message

from .finetuning import WORKLOAD, clip_halves, unshifted
from .subjects import MEMBER as WORKER
from .subjects import REPLICAS, SERVER, TRAINING

PIPELINE = "entrenar_py.train.stages"
MEMBER = f"{PIPELINE}.member.StageMember"
PASSES = f"{PIPELINE}.stage_step.TorchStage"
RATE = 0.01  # before any schedule
ROOM = 2**20  # bytes; no hidden states here are larger
COPIES = [[[0, 2], [0, 2], [2, 4]]]  # two workers share the first stage's shards

_receive, _shorten = member.StageMember.receive, stage_model.shorten
_backward, _enter = stage_step.TorchStage.backward, stage_model.Stage._enter
_hold, _restore = Member.hold, Server.restore
_step, _guard = optimizer.step, replicas.Replicas.guard


def staged(**changes: Any) -> Scenario:
    """Return a run in two stages: 12 texts in batches of 6, adapters of rank 2 on four blocks."""
    options = {"task": "text", "family": "llama", "blocks": 4, **changes.pop("options", {})}
    usual: dict[str, Any] = {
        "system": "finetuned_by_stages",
        "workload": "finetune",
        "world_size": 2,
        "seed": 0,
        "num_shards": 4,
        "num_samples": 12,
        "batch_size": 6,
        "num_steps": 2,
        "optimizer": "adamw",
        "learning_rate": RATE,
        "dropout": 0.2,
        "options": options,
    }
    return Scenario(**{**usual, **changes})


# --- what stages pass on --------------------------------------------------------------------------


def receive_into_one_buffer(self: Any, message: Message, payload: Buffer) -> None:
    """Receives every shard's tensor into the same memory."""
    room = self.__dict__.setdefault("room_of_all", bytearray(ROOM))
    room[: len(payload)] = payload
    _receive(self, message, memoryview(room)[: len(payload)])


def draw_from_0(
    self: stage_model.Stage, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """Numbers the draws of each stage from 0."""
    if self._received is not None:
        self._received = self._received[0], 0
    return _enter(self, module, inputs, named)


def other_masks(self: masks.Masks) -> masks.Masks:
    """Draws anew where a block is computed again."""
    return masks.Masks(self._key, self._number + 1)


# --- one training, not several --------------------------------------------------------------------


def scaled_once_more(
    self: stage_step.TorchStage, shard: int, gradient: Tensor
) -> stage_step.Backward:
    """Leaves the loss scale in the gradients of all stages but the last."""
    found = _backward(self, shard, gradient)
    return replace(found, gradients=[2 * one for one in found.gradients])


def rate_without_schedule(
    rule: optimizer.Rule,
    weights: optimizer.Vector,
    gradient: optimizer.Vector,
    state: optimizer.State,
    rate: float,
) -> None:
    """Steps the later stage's tensors, the second half, with the rate before its schedule."""
    half = weights.size // 2
    later, moments = weights.copy(), {name: one.copy() for name, one in state.items()}
    _step(rule, later, gradient, moments, RATE)
    _step(rule, weights, gradient, state, rate)
    weights[half:] = later[half:]


def nan_to_0(self: Any, leaf: reduction.Node, *place: Any) -> Any:
    """Replaces what is not finite by 0, and goes on."""
    np.nan_to_num(leaf.vector, copy=False, posinf=0.0, neginf=0.0)
    return _guard(self, leaf, *place)


def leave_a_shard_over(
    self: stage_step.TorchStage, shard: int, gradient: Tensor
) -> stage_step.Backward:
    """Counts the last shard's gradient in the next step, of whichever epoch."""
    found = _backward(self, shard, gradient)
    if shard < 3:
        return found
    nothing = [np.zeros_like(one) for one in found.gradients]
    before = self.__dict__.get("left_over", nothing)
    self.__dict__["left_over"] = found.gradients
    return replace(found, gradients=before)


def add_as_they_come(nodes: Iterable[reduction.Node], num_shards: int) -> reduction.Node:
    """Adds the copies' sums in the order in which they arrive, not along the tree."""
    arrived = list(nodes)
    total = np.copy(arrived[0].vector)
    for node in arrived[1:]:
        total = total + node.vector
    losses, weights = ([getattr(one, name) for one in arrived] for name in ("loss", "weight"))
    level = num_shards.bit_length() - 1
    return reduction.Node(level, 0, total, sum(losses), sum(weights))


# --- the parts of a checkpoint, and steps ---------------------------------------------------------


def one_more(module: nn.Module, own: range) -> None:
    """Lets each worker load a block of the next stage, too, which it doesn't use."""
    last = len(blocks.of(module)) - 1
    _shorten(module, range(own.start, max(own.stop, min(own.stop + 1, last))))


def not_strictly(self: Server) -> int:
    """Resumes with one layer's adapters as they were before the training."""
    step, first = _restore(self), self.replicas.initial()
    for name, array in self.replica.replica.arrays.items():
        if ".layers.1." in name and step:
            array[...] = first[name]
    return step


def step_alone(self: Member, message: Any, payload: Buffer) -> None:
    """Uses new weights once they are there, though another stage may not have its own."""
    _hold(self, message, payload)
    if set(self.held.blocks.order()) <= set(self.held.there):
        self.worker.replica.copy_from(self.held.vector)


def equal_shards(ids: sharding.Ids, num_shards: int) -> list[sharding.Ids]:
    """Makes all shards of a batch equally large, and leaves the remainder out."""
    size = len(ids) // num_shards
    return [ids[size * shard : size * (shard + 1)] for shard in range(num_shards)]


VARIANTS = (
    Variant(
        name="lp-activation-overwritten",
        summary="hidden states that arrive early overwrite those that are still needed",
        source="classic",
        plants={f"{MEMBER}.receive": receive_into_one_buffer},
        scenario=staged(),
        invariants=("F-LP-001",),
        place={"step": 0},
    ),
    Variant(
        name="lp-labels-unshifted",
        summary="the last stage compares the logits at a position with the token there",
        source="classic",
        plants={f"{WORKLOAD}.batch": unshifted},
        scenario=staged(
            detail="values", num_steps=1, dropout=0.0, options={"facts": ["gradients"]}
        ),
        invariants=("F-LP-001", "F-LP-003"),
        place={"step": 0},
    ),
    Variant(
        name="lp-draws-from-0",
        summary="each stage numbers its dropout's draws from 0",
        source="classic",
        plants={f"{PIPELINE}.stage_model.Stage._enter": draw_from_0},
        scenario=staged(),
        invariants=("F-LP-001",),
        place={"step": 0},
    ),
    Variant(
        name="lp-recomputed-otherwise",
        summary="a block that is recomputed drops different elements",
        source="torch.utils.checkpoint, preserve_rng_state=False",
        plants={"entrenar_py.train.model.masks.Masks.again": other_masks},
        scenario=staged(options={"recompute": "blocks"}),
        invariants=("F-LP-001",),
        place={"step": 0},
    ),
    Variant(
        name="lp-scale-on-one-stage",
        summary="the loss scale stays in the gradients of all stages but the last",
        source="DeepSpeed #8154 (a factor for each stage)",
        plants={f"{PASSES}.backward": scaled_once_more},
        scenario=staged(
            detail="values", num_steps=1, dropout=0.0, options={"facts": ["gradients"]}
        ),
        invariants=("F-LP-001", "F-LP-003"),
        place={"step": 0},
    ),
    Variant(
        name="lp-leftover",
        summary="the last shard of a step counts in the next one, across epochs",
        source="DeepSpeed #7967",
        plants={f"{PASSES}.backward": leave_a_shard_over},
        scenario=staged(),
        invariants=("F-LP-001",),
        place={"step": 0},
    ),
    Variant(
        name="lp-copies-as-they-come",
        summary="sums of a stage's copies are added in the order in which they arrive",
        source="classic",
        plants={f"{TRAINING}.reduction.root": add_as_they_come},
        scenario=staged(world_size=3, num_shards=6, options={"cuts": COPIES}),
        invariants=("F-LP-001",),
        place={"step": 0},
    ),
    Variant(
        name="lp-block-in-two-stages",
        summary="a worker loads a block of the next stage, too",
        source="the earlier framework (each worker loads the whole model)",
        plants={f"{PIPELINE}.stage_model.shorten": one_more},
        scenario=staged(),
        invariants=("F-LP-002",),
        place={"tensor": "model.layers.2.input_layernorm.weight"},
    ),
    Variant(
        name="lp-nan-to-num",
        summary="a stage replaces NaN in its gradient by 0",
        source="the earlier framework",
        plants={f"{REPLICAS}.Replicas.guard": nan_to_0},
        scenario=staged(faults=(Fault(kind="non_finite_gradient", step=1, rank=0, value="nan"),)),
        invariants=("F-LP-004",),
        place={"step": 1},
    ),
    Variant(
        name="lp-clip-per-stage",
        summary="each stage clips its gradient by its own norm",
        source="the earlier framework; Megatron-LM abf10f8590 (two norms)",
        plants={f"{TRAINING}.optimizer.clip": clip_halves},
        scenario=staged(clip_norm=0.05, detail="values"),
        invariants=("F-LP-001", "F-LP-005"),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="lp-schedule-of-one-stage",
        summary="the later stage's rate follows no schedule",
        source="the earlier framework",
        plants={f"{TRAINING}.optimizer.step": rate_without_schedule},
        scenario=staged(schedule="linear", warmup_steps=1, num_steps=3, detail="values"),
        invariants=("F-LP-001", "F-LP-005"),
        place={"step": 0},
    ),
    Variant(
        name="lp-resume-skips-a-layer",
        summary="a resumed run continues with old adapters in one layer",
        source="load_state_dict(strict=False)",
        plants={f"{SERVER}.Server.restore": not_strictly},
        scenario=staged(num_steps=3, stops=(2,)),
        invariants=("F-LP-006",),
        place={"step": 2},
    ),
    Variant(
        name="lp-step-alone",
        summary="a stage takes a step although another stage died before it had its weights",
        source="classic",
        plants={f"{WORKER}.Member.hold": step_alone},
        scenario=staged(faults=(Fault(kind="kill", step=0, rank=0, at="Weights"),)),
        invariants=("F-LP-007",),
        place={"step": 0},
    ),
    Variant(
        name="lp-equal-micro-batches",
        summary="samples that do not fill an equal micro-batch are left out",
        source="classic",
        plants={f"{TRAINING}.sharding.cut": equal_shards},
        scenario=staged(num_steps=3),
        invariants=("F-LP-008",),
        place={"step": 0},
    ),
)
