"""The costs of a stage as functions of its blocks: bytes on a worker's device, and operations.

All functions of blocks take one stage, or arrays of many. A matrix [num_blocks + 1, num_blocks + 1]
has at [a, b] the value of a stage with blocks a to b - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.arithmetic.reduction import num_nodes
from entrenar_py.train.model import precision
from entrenar_py.train.plan import costs
from entrenar_py.train.plan.plan import Run
from entrenar_py.train.plan.shape import FLOAT_BYTES, Cut

Number = Any  # an int, or an int64 array with one element for each stage
_FROZEN, _TRAINED = 4, 6  # operations per weight and token, forward and backward; 2 are forward
_UPDATE = 16  # bytes per trained element at the coordinator: value, gradient and two moments


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Bytes of a stage's worker on its device, term by term.

    - `weights`: frozen weights of its blocks and of its embedding or head, in the run's dtype.
    - `trained`: trained tensors, float32, in the model and in the replica that computes passes.
    - `gradients`: on the CPU one shard's gradient, and one node for each level of the tree along
      which shards are added; on a GPU one shard's gradient alone, since nodes are on the host.
    - `arriving`: on the host, new weights before they are committed.
    - `kept`: activations of the shards between their forward and their backward pass. Stage s of P
      has min(P - s + 1, shards) of them, the last stage 1, since it runs both passes at once.
    - `hidden`: hidden states that were received, some ahead of time, and those that were sent.
    - `passing`: temporary tensors of a pass at its peak; in the last stage including the loss.
    - `runtime`: the memory in use before the first tensor exists.
    """

    weights: Number
    trained: Number
    gradients: Number
    arriving: Number
    kept: Number
    hidden: Number
    passing: Number
    runtime: Number

    @property
    def needed(self) -> Number:
        """The sum of all terms."""
        held = self.weights + self.trained + self.gradients + self.arriving
        return held + self.kept + self.hidden + self.passing + self.runtime


@dataclass(frozen=True, kw_only=True)
class Place:
    """Stage `stage`, from 0, of `num_stages`. Its device of `kind` computes `shards` a step."""

    stage: int
    num_stages: int
    kind: str
    shards: int

    @property
    def is_first(self) -> bool:
        """True if the stage has the token embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if the stage has the head."""
        return self.stage == self.num_stages - 1

    @property
    def num_kept(self) -> int:
        """The maximal number of shards between their two passes (`train.wire.pipeline.order`)."""
        return 1 if self.is_last else min(self.num_stages - self.stage + 1, self.shards)

    @property
    def num_hidden(self) -> int:
        """The maximal number of hidden states: received ones, some ahead of time, and sent ones."""
        came = 0 if self.is_first else min(self.num_stages - self.stage + 2, self.shards)
        return came + (0 if self.is_last else self.num_kept)


class StageCosts:
    """The costs of stages of the model of `run`. Its shards are the run's micro-batches."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.num_blocks = run.shape.num_blocks
        counts = run.shape.block_counts()
        self._frozen = _sums(one.frozen_bytes for one in counts)
        self._trained = _sums(one.trained for one in counts)
        self._work = _sums(self._block_work(block) for block in run.shape.blocks)

    @property
    def num_shards(self) -> int:
        """The number of shards of a step."""
        return self.run.settings.training.num_shards

    @property
    def hidden_bytes(self) -> int:
        """The bytes of one shard's hidden states."""
        width = precision.of_checkpoint(self.run.settings).itemsize
        size = int(self.run.shape.config.hidden_size)
        return width * self.run.rows * self.run.length * size

    def every(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return begin and end of each stage, each as int64 [num_blocks + 1, num_blocks + 1]."""
        ends = np.arange(self.num_blocks + 1)
        begin, end = np.meshgrid(ends, ends, indexing="ij")
        return begin, np.maximum(begin, end)

    def trained_bytes(self, place: Place, begin: Number, end: Number) -> Number:
        """Return the bytes of one gradient of the stage, in float32."""
        own = self._trained[end] - self._trained[begin]
        return FLOAT_BYTES * (own + self._ends(place).trained)

    def work(self, place: Place, begin: Number, end: Number) -> Number:
        """Return the operations of one shard in the stage, forward and backward.

        Embedding look-ups and losses are not counted; the matrix product of the head is.
        """
        head = self._head_work if place.is_last else 0
        return self._work[end] - self._work[begin] + head

    @property
    def block_work(self) -> float:
        """The operations of one shard in a block, averaged over the blocks."""
        return float(self._work[-1]) / self.num_blocks

    def terms(self, place: Place, begin: Number, end: Number) -> Terms:
        """Return the bytes of the stage's worker, term by term."""
        on_host = place.kind == "cpu"
        vector = self.trained_bytes(place, begin, end)
        block, before, passing = self._activations(place)
        return Terms(
            weights=self._frozen[end] - self._frozen[begin] + self._ends(place).frozen_bytes,
            trained=2 * vector,
            gradients=(1 + place.shards.bit_length() if on_host else 1) * vector,
            arriving=vector if on_host else 0 * vector,
            kept=place.num_kept * ((end - begin) * block + before),
            hidden=place.num_hidden * self.hidden_bytes,
            passing=passing,
            runtime=costs.RUNTIME_BYTES[place.kind],
        )

    def nodes(self, num_workers: int) -> int:
        """Return how many sums of gradients `num_workers` workers of one stage send in a step."""
        runs = sharding.runs(range(self.num_shards), range(num_workers)).values()
        return sum(num_nodes(own[0], own[-1] + 1) for own in runs if len(own))

    @property
    def coordinator_bytes(self) -> int:
        """The coordinator's bytes: all trained tensors and their state, twice during a step."""
        counts = self.run.shape.counts()
        held = counts.weight_bytes if not self.run.settings.adapts else 0
        return 2 * _UPDATE * counts.trained + held + costs.RUNTIME_BYTES["cpu"]

    def _ends(self, place: Place) -> Any:
        """Return the sizes of what the stage has in addition to its blocks."""
        cut = Cut(blocks=0, has_table=place.is_first, has_head=place.is_last)
        return self.run.shape.counts(cut)

    def _activations(self, place: Place) -> tuple[int, int, int]:
        """Return a shard's bytes: kept in a block, kept outside of blocks, temporary in a pass."""
        two = min(2, self.num_blocks)
        block = self._rehearsed(place, two).kept
        if two == 2:
            block -= self._rehearsed(place, 1).kept
        most = self._rehearsed(place, two)
        return block, max(0, most.kept - two * block), max(0, most.peak - most.kept)

    def _rehearsed(self, place: Place, blocks: int) -> Any:
        """Return the memory of one shard in this many blocks, with the loss in the last stage."""
        return self.run.shape.rehearsed(
            rows=self.run.rows,
            length=self.run.length,
            kind=place.kind,
            recompute=self.run.recompute,
            cut=Cut(blocks=blocks, has_head=place.is_last),
        )

    def _block_work(self, block: nn.Module) -> int:
        """Return the operations of one shard in `block`: matrices, and attention between all pairs.

        Experts are counted as if each token passed through all of them.
        """
        tokens = self.run.rows * self.run.length
        products = _work(block, tokens, again=self.run.recompute)
        config = self.run.shape.config
        heads = getattr(config, "num_attention_heads", 0)
        size = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        passes = 4 if self.run.recompute else 3
        return int(products + passes * 4 * tokens * self.run.length * heads * size)

    @cached_property
    def _head_work(self) -> int:
        head = cast("Any", self.run.shape.whole).get_output_embeddings()
        return (
            0 if head is None else _work(cast("nn.Module", head), self.run.rows * self.run.length)
        )


def matrix(costs: StageCosts, of: Callable[[Number, Number], Number]) -> NDArray[np.float64]:
    """Return the value of `of` for each stage, float64 [num_blocks + 1, num_blocks + 1]."""
    begin, end = costs.every()
    return np.broadcast_to(np.asarray(of(begin, end), np.float64), begin.shape)


def _work(module: nn.Module, tokens: int, *, again: bool = False) -> int:
    return sum(
        tokens * one.numel() * ((_TRAINED if one.requires_grad else _FROZEN) + (2 if again else 0))
        for one in module.parameters()
        if one.dim() > 1
    )


def _sums(numbers: Any) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum([*numbers])]).astype(np.int64)
