"""Bugs in the optimizer step: its tensors, its arithmetic, its precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from entrenar_py.shared.mutants import Variant
from entrenar_py.systems import textbook as trainer
from entrenar_py.systems.textbook import Replica, Setup
from entrenar_py.train.arithmetic import optimizer, workload
from entrenar_py.train.arithmetic.tensors import Array, DropFunction, LinearFunction

from .subjects import TEXTBOOK, TRAINING, reference, textbook

_build_optimizer = trainer.build_optimizer
_step = optimizer.step
_loss_of = workload.DigitClassifier.loss_of


def of_orphans(setup: Setup, tensors: dict[str, Tensor]) -> torch.optim.Optimizer:
    """Builds the optimizer with the tensors from before the model was wrapped."""
    orphans = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return _build_optimizer(setup, orphans)


def returned_early(replica: Replica) -> None:
    """Treats every step as one that overflowed: drops the gradients before the step."""
    replica.optimizer.zero_grad()
    replica.optimizer.step()


def probed(setup: Setup, tensors: dict[str, Tensor]) -> torch.optim.Optimizer:
    """Allocates the optimizer's state by a step with zero gradients, which decays the weights."""
    built = _build_optimizer(setup, tensors)
    for name in setup.trainable:
        tensors[name].grad = torch.zeros_like(tensors[name])
    built.step()
    return built


def groups_swapped(setup: Setup, tensors: dict[str, Tensor]) -> torch.optim.Optimizer:
    """Decays the biases and leaves the weights."""
    built = _build_optimizer(setup, tensors)
    first, second = built.param_groups
    first["weight_decay"], second["weight_decay"] = second["weight_decay"], first["weight_decay"]
    return built


def stepped_twice(replica: Replica) -> None:
    """Steps a second time after the step that a hook has made."""
    replica.optimizer.step()
    replica.optimizer.step()


def decay_everything(replica: Replica) -> None:
    """Decays the frozen tensors, too."""
    replica.optimizer.step()
    for tensor in replica.tensors.values():
        if not tensor.requires_grad:
            tensor.mul_(0.999)


def in_bfloat16(value: Tensor) -> Tensor:
    """Keeps master weights with 8 bits of mantissa."""
    return value.bfloat16().float()


def rounded_each(replica: Replica) -> None:
    """Steps master weights with 8 bits of mantissa: changes of less than half an ulp are lost."""
    replica.optimizer.step()
    for tensor in replica.tensors.values():
        tensor.data.copy_(in_bfloat16(tensor))


def into_a_copy(replica: Replica) -> None:
    """Updates a contiguous copy of the second layer's weight, which is thrown away."""
    kept = replica.tensors["hidden2.weight"].detach().clone()
    replica.optimizer.step()
    replica.tensors["hidden2.weight"].data.copy_(kept)


def detached(
    self: workload.DigitClassifier,
    tensors: Mapping[str, Tensor],
    batch: Sequence[Tensor],
    *,
    linear: LinearFunction,
    drop: DropFunction,
) -> Tensor:
    """Reads the second layer's bias outside the autograd graph."""
    read = {**tensors, "hidden2.bias": tensors["hidden2.bias"].detach()}
    return _loss_of(self, read, batch, linear=linear, drop=drop)


def without_bias_correction(
    rule: optimizer.Rule, weights: Array, gradient: Array, state: optimizer.State, rate: float
) -> None:
    """Corrects every step of Adam as if it were the first: its count of steps never grows."""
    state["count"][:] = 0
    _step(rule, weights, gradient, state, rate)


def decay_in_gradient(
    rule: optimizer.Rule, weights: Array, gradient: Array, state: optimizer.State, rate: float
) -> None:
    """Adds an L2 term to the gradient of Adam, where AdamW decays the weights."""
    assert rule.decayed is not None
    coupled = gradient + rule.weight_decay * rule.decayed * weights
    _step(optimizer.Rule(rule.kind, 0.0, None), weights, coupled, state, rate)


def one_moment_flipped(replica: Replica) -> None:
    """Flips a bit of one of rank 1's moments before its third step."""
    held = replica.optimizer.state[replica.tensors["hidden1.weight"]]
    if replica.rank == 1 and held.get("step") == 2:
        held["exp_avg_sq"].view(-1)[5:6].numpy().view(np.uint32)[0] ^= 1 << 22
    replica.optimizer.step()


# Liveness is judged after three steps, so a tensor can be reported as dead from step 2 on.
_DEAD_STEP = 2

VARIANTS = (
    Variant(
        name="opt-stale",
        summary="the optimizer holds the tensors from before the model was wrapped",
        source="accelerate #2665",
        plants={f"{TEXTBOOK}.build_optimizer": of_orphans},
        scenario=textbook(),
        invariants=("F-TI-004",),
        place={"step": _DEAD_STEP, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="step-return",
        summary="the optimizer step returns early every time",
        source="DeepSpeed #7645",
        plants={f"{TEXTBOOK}.optimizer_step": returned_early},
        scenario=textbook(workload="linear"),
        invariants=("F-TI-004",),
        place={"step": _DEAD_STEP, "rank": 0, "tensor": "weight"},
    ),
    Variant(
        name="mm-noncontig",
        summary="the update of a non-contiguous weight changes only a copy",
        source="pytorch #118115",
        plants={f"{TEXTBOOK}.optimizer_step": into_a_copy},
        scenario=textbook(optimizer="adamw", learning_rate=0.01),
        invariants=("F-TI-004",),
        place={"step": _DEAD_STEP, "rank": 0, "tensor": "hidden2.weight"},
    ),
    Variant(
        name="detached",
        summary="a tensor is read outside the graph and never gets a gradient",
        source="classic",
        plants={f"{TRAINING}.workload.DigitClassifier.loss_of": detached},
        scenario=textbook(),
        invariants=("F-DP-005", "F-TI-001"),
        place={"step": 0, "rank": 0, "tensor": "hidden2.bias"},
    ),
    Variant(
        name="master-half",
        summary="master weights in bfloat16 swallow small updates",
        source="Lightning #21586",
        plants={f"{TEXTBOOK}.master": in_bfloat16, f"{TEXTBOOK}.optimizer_step": rounded_each},
        scenario=textbook(workload="linear", learning_rate=1e-5),
        invariants=("F-TI-004",),
        place={"step": _DEAD_STEP, "rank": 0, "tensor": "weight"},
    ),
    Variant(
        name="frozen-decayed",
        summary="weight decay reaches the frozen base of an adapter",
        source="classic (decay without gradient)",
        plants={f"{TEXTBOOK}.optimizer_step": decay_everything},
        scenario=textbook(workload="decoder", num_steps=2),
        invariants=("F-TI-004",),
        place={"step": 0, "rank": 0, "tensor": "embedding.weight"},
    ),
    Variant(
        name="state-probe",
        summary="a step with zero gradients, made to allocate state, decays the weights",
        source="Megatron-LM #5976",
        plants={f"{TEXTBOOK}.build_optimizer": probed},
        scenario=textbook(optimizer="momentum", weight_decay=0.1),
        invariants=("F-DP-005",),
        place={"step": -1, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="decay-wrong-group",
        summary="weight decay is applied to the biases instead of the weights",
        source="classic (parameter groups)",
        plants={f"{TEXTBOOK}.build_optimizer": groups_swapped},
        scenario=textbook(optimizer="adamw", learning_rate=0.01, weight_decay=0.1),
        invariants=("F-TI-008",),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="step-twice",
        summary="the loop steps after a hook has stepped already",
        source="classic (parameter server)",
        plants={f"{TEXTBOOK}.optimizer_step": stepped_twice},
        scenario=textbook(),
        invariants=("F-TI-008", "F-DP-005"),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="bias-correction-stuck",
        summary="Adam's count of steps never grows, so every step is corrected like the first",
        source="nanotron 4cc62ae8",
        plants={f"{TRAINING}.optimizer.step": without_bias_correction},
        scenario=reference(optimizer="adamw", learning_rate=0.01),
        invariants=("F-TI-008",),
        place={"step": 1, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="sdc-flip-moment",
        summary="one bit of one of rank 1's second moments flips",
        source="Ma et al. arXiv 2502.12340",
        plants={f"{TEXTBOOK}.optimizer_step": one_moment_flipped},
        scenario=textbook(world_size=3, optimizer="adamw", learning_rate=0.01),
        invariants=("F-TI-002",),
        place={"step": 2, "rank": 1, "tensor": "0/exp_avg_sq", "element": 5},
    ),
    Variant(
        name="adam-l2",
        summary="weight decay goes into Adam's gradient and through its moments",
        source="Loshchilov and Hutter, arXiv 1711.05101",
        plants={f"{TRAINING}.optimizer.step": decay_in_gradient},
        scenario=reference(optimizer="adamw", learning_rate=0.01, weight_decay=0.1),
        invariants=("F-TI-008",),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
)
