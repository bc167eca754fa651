"""Bugs in the initial weights of the ranks."""

from __future__ import annotations

import numpy as np
import torch

from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems import textbook as trainer
from entrenar_py.systems.textbook import Replica, Setup

from .subjects import TEXTBOOK, textbook

_build_replica, _broadcast = trainer.build_replica, trainer.broadcast


def seeded_by_rank(scenario: Scenario, rank: int) -> np.random.Generator:
    """Draws the initial weights of every rank from another stream."""
    return scenario.rng("initial", rank)


def not_broadcast(replicas: list[Replica]) -> None:
    """Does not broadcast: every rank keeps the weights that it drew."""


def own_adapter(setup: Setup, rank: int) -> Replica:
    """Draws the adapters from the rank's own stream, after the broadcast."""
    replica = _build_replica(setup, rank)
    rng = setup.scenario.rng("adapter", rank)
    for name, tensor in replica.tensors.items():
        if name.endswith("lora_a"):
            drawn = rng.uniform(-0.3, 0.3, tuple(tensor.shape)).astype(np.float32)
            tensor.data.copy_(torch.from_numpy(drawn))
    return replica


def base_broadcast(replicas: list[Replica]) -> None:
    """Broadcasts all tensors but the adapters."""
    base = [
        Replica(**{**vars(replica), "tensors": _without_adapters(replica)}) for replica in replicas
    ]
    _broadcast(base)


def _without_adapters(replica: Replica) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in replica.tensors.items() if "lora" not in name}


VARIANTS = (
    Variant(
        name="init-rankseed",
        summary="weights are drawn from a seed per rank and never broadcast",
        source="detr #544, litgpt #269",
        plants={
            f"{TEXTBOOK}.initial_rng": seeded_by_rank,
            f"{TEXTBOOK}.broadcast": not_broadcast,
        },
        scenario=textbook(),
        invariants=("F-DP-001", "F-TI-005"),
        place={"step": -1, "rank": 1, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="lora-rankinit",
        summary="adapters are injected after the broadcast, drawn differently on each rank",
        source="Megatron-Bridge #5396",
        plants={
            f"{TEXTBOOK}.build_replica": own_adapter,
            f"{TEXTBOOK}.broadcast": base_broadcast,
        },
        scenario=textbook(workload="decoder", num_steps=2),
        invariants=("F-DP-001", "F-TI-005"),
        place={"step": -1, "rank": 1, "tensor": "blocks.0.attention.q.lora_a"},
    ),
)
