"""Bugs in the canonical all-reduce: correct sums whose bits depend on the number of workers."""

from __future__ import annotations

import torch
from torch import Tensor

from entrenar_py.shared.mutants import Variant
from entrenar_py.train.canonical import reducer
from entrenar_py.train.canonical.reducer import Counter, Gradients

from .subjects import textbook


def in_rank_order(rows: Tensor, *, scale: float, out: Tensor) -> None:
    """Adds the sums of ranks one after the other."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    torch.mul(total, scale, out=out)


def one_after_the_other(self: Counter, node: Gradients) -> None:
    """Adds a rank's micro-batches one after the other, as `.grad` would."""
    if self._nodes:
        reducer.add(self._nodes[0][1].values(), node.values())
    else:
        self._nodes.append((range(1), node))


_FOUR = textbook(
    system="ddp_canonical", world_size=4, num_shards=8, num_samples=16, batch_size=16, num_steps=2
)

VARIANTS = (
    Variant(
        name="canonical-rank-order",
        summary="the ranks' gradients are added in rank order, not along the tree",
        source="classic (a ring, or a loop over ranks)",
        plants={"entrenar_py.train.canonical.exchange.add_tree": in_rank_order},
        scenario=_FOUR,
        invariants=("F-TI-006",),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="canonical-local-order",
        summary="a rank adds up its micro-batches one after the other",
        source="classic (torch's accumulation in .grad)",
        plants={"entrenar_py.train.canonical.reducer.Counter.push": one_after_the_other},
        scenario=_FOUR,
        invariants=("F-TI-006",),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
)
