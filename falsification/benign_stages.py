"""Correct layer pipelines that are not ours: no check may report any of these."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.train.stages import member
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import Message
from entrenar_py.train.wire.pipeline import Places

from .stages import COPIES, MEMBER, staged

PROTOCOL = "entrenar_py.train.wire.pipeline"

_receive = member.StageMember.receive
_BITS = ("F-LP-001", "F-LP-002")


def all_forward_first(
    shards: Sequence[int], *, stage: int, num_stages: int
) -> list[tuple[int, bool]]:
    """Makes all forward passes first, as GPipe does."""
    forward = [(shard, True) for shard in shards]
    return forward if stage == num_stages - 1 else [*forward, *((one, False) for one in shards)]


def first_has_all(self: Places, there: Collection[int], num_shards: int) -> list[int]:
    """Gives all shards to the first worker of each stage."""
    first = [min(set(ranks) & set(there)) for ranks in self.ranks]
    return [rank for rank in first for _ in range(num_shards)]


def receive_a_copy(self: Any, message: Message, payload: Buffer) -> None:
    """Copies what it receives."""
    _receive(self, message, bytearray(payload))


VARIANTS = (
    Variant(
        name="lp-gpipe",
        summary="all forward passes of a step come before its backward passes",
        source="Huang et al., GPipe",
        plants={f"{PROTOCOL}.order": all_forward_first},
        scenario=staged(world_size=3, num_samples=13, num_steps=3),
        tried=(*_BITS, "F-LP-008"),
    ),
    Variant(
        name="lp-gpipe-halts",
        summary="with all forward passes first, one stage's gradient is not finite",
        plants={f"{PROTOCOL}.order": all_forward_first},
        scenario=staged(
            world_size=3,
            faults=(Fault(kind="non_finite_gradient", step=1, rank=1, shard=2, value="inf"),),
        ),
        tried=("F-LP-004",),
    ),
    Variant(
        name="lp-one-copy-works",
        summary="of two workers with one stage the second has nothing to do",
        plants={f"{PROTOCOL}.Places.holders": first_has_all},
        scenario=staged(world_size=3, options={"cuts": COPIES}),
        tried=_BITS,
    ),
    Variant(
        name="lp-copied",
        summary="stages copy what they receive, and take more memory",
        plants={f"{MEMBER}.receive": receive_a_copy},
        scenario=staged(detail="values", clip_norm=0.05, schedule="linear"),
        tried=(*_BITS, "F-LP-005"),
    ),
    Variant(
        name="lp-tied-head",
        summary="the first and the last stage hold the embedding, which is also the output layer",
        plants={},
        scenario=staged(
            world_size=4,
            detail="values",
            num_steps=1,
            dropout=0.0,
            options={"family": "qwen3", "facts": ["gradients"]},
        ),
        tried=(*_BITS, "F-LP-003"),
    ),
    Variant(
        name="lp-one-stage",
        summary="the whole model is one stage",
        plants={},
        scenario=staged(world_size=1, options={"family": "qwen3"}),
        tried=_BITS,
    ),
    Variant(
        name="lp-restless",
        summary="messages arrive late or twice, and workers freeze and die",
        plants={},
        scenario=staged(
            world_size=3,
            num_steps=4,
            options={"blocks": 3, "network_seed": 7},
            faults=(
                Fault(kind="delay", step=0, rank=1, at="Activation", seconds=5.0),
                Fault(kind="duplicate", step=1, rank=2, at="ActivationGradient"),
                Fault(kind="freeze", step=2, rank=0, at="Weights", seconds=60.0),
                Fault(kind="kill", step=3, rank=2, at="Applied"),
            ),
        ),
        tried=("F-LP-007",),
    ),
    Variant(
        name="lp-stopped-each-step",
        summary="the run is stopped after each step, and resumed with different cuts",
        plants={},
        scenario=staged(
            num_steps=4,
            stops=(1, 2, 3),
            options={"cuts": [[[0, 1], [1, 4]], [[0, 3], [3, 4]], [[0, 2], [2, 4]]]},
        ),
        tried=("F-LP-006",),
    ),
)
