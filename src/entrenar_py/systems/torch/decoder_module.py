"""The `decoder` workloads as torch modules that can be sharded.

Parameters have the names of the workload's tensors. Letters in shape comments: n sequences, t
positions, d = HIDDEN, h heads of size e. A rank may have a part of the heads and feed-forwards.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from entrenar_py.train.arithmetic import decoder

LENGTH = decoder.POSITIONS + 1  # even, so that ranks can share a sequence; the end is padding


def drop(x: Tensor, probability: float) -> Tensor:
    """Apply dropout from this rank's generator; torch would use another one for a DTensor."""
    if not isinstance(x, DTensor) or not probability:
        return F.dropout(x, probability)
    dropped = F.dropout(x.to_local(), probability)
    return DTensor.from_local(dropped, x.device_mesh, x.placements, run_check=False)


class Adapted(nn.Linear):
    """A linear layer with a low-rank adapter: W x + s B A drop(x)."""

    def __init__(self, fan_in: int, fan_out: int, dropout: float) -> None:
        super().__init__(fan_in, fan_out, bias=False)
        self.lora_a = nn.Parameter(torch.empty(decoder.LORA_RANK, fan_in))
        self.lora_b = nn.Parameter(torch.empty(fan_out, decoder.LORA_RANK))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(drop(x, self.dropout), self.lora_a)
        return super().forward(x) + decoder.LORA_SCALE * F.linear(low, self.lora_b)


class Attention(nn.Module):
    """Causal grouped-query attention; the number of heads follows from the layers' outputs."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        wide, narrow = (n * decoder.HEAD_DIM for n in (decoder.NUM_HEADS, decoder.NUM_KV_HEADS))
        self.q = Adapted(decoder.HIDDEN, wide, dropout)
        self.k = nn.Linear(decoder.HIDDEN, narrow, bias=False)
        self.v = Adapted(decoder.HIDDEN, narrow, dropout)
        self.o = nn.Linear(wide, decoder.HIDDEN, bias=False)
        self._rotary = decoder.rotary_table(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        """[n, t, d] -> [n, t, d]."""
        q, k, v = (self._split(layer(x)) for layer in (self.q, self.k, self.v))  # [n, h, t, e]
        cosine, sine = (one.to(q) for one in self._rotary)
        mixed = F.scaled_dot_product_attention(
            decoder.rotate(q, cosine, sine),
            decoder.rotate(k, cosine, sine),
            v,
            is_causal=True,
            enable_gqa=True,
        )
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], -1, decoder.HEAD_DIM).transpose(1, 2)


class FeedForward(nn.Module):
    """The SwiGLU feed-forward layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(decoder.HIDDEN, decoder.FEED_FORWARD, bias=False)
        self.up = nn.Linear(decoder.HIDDEN, decoder.FEED_FORWARD, bias=False)
        self.down = nn.Linear(decoder.FEED_FORWARD, decoder.HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, t, d] -> [n, t, d]."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Head(nn.Module):
    """The output layer: scores of all bytes, by the embedding's weight."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """[n, t, d] -> [n, t, VOCABULARY]."""
        return F.linear(x, weight)


class Block(nn.Module):
    """Attention and feed-forward, or one of them, each with its norm before and a residual."""

    def __init__(self, parts: Iterable[str], dropout: float) -> None:
        super().__init__()
        for part in parts:
            norm = nn.RMSNorm(decoder.HIDDEN, eps=decoder.NORM_EPSILON)
            self.add_module(f"{part}_norm", norm)
            self.add_module(part, Attention(dropout) if part == "attention" else FeedForward())

    def forward(self, x: Tensor, part: str) -> Tensor:
        """[n, t, d] -> [n, t, d]."""
        normed: Tensor = self.get_submodule(f"{part}_norm")(x)
        out: Tensor = self.get_submodule(part)(normed)
        return x + out


class Decoder(nn.Module):
    """A chain of units, attention and feed-forward in turn; a pipeline may cut between any two.

    The embedding belongs to both the first and the last unit.
    """

    num_units = 2 * decoder.NUM_BLOCKS

    def __init__(self, dropout: float, units: Iterable[int] = range(num_units)) -> None:
        super().__init__()
        self.units = sorted(units)
        is_last = self.num_units - 1 in self.units
        if 0 in self.units or is_last:
            self.embedding = nn.Embedding(decoder.VOCABULARY, decoder.HIDDEN)
        self.blocks = nn.ModuleDict()
        for block in sorted({unit // 2 for unit in self.units}):
            parts = [_part(unit) for unit in self.units if unit // 2 == block]
            self.blocks[str(block)] = Block(parts, dropout)
        if is_last:
            self.norm = nn.RMSNorm(decoder.HIDDEN, eps=decoder.NORM_EPSILON)
            self.head = Head()

    def forward(
        self, x: Tensor, targets: Tensor | None = None, units: Iterable[int] | None = None
    ) -> Tensor:
        """Return the output of `units`, by default of all that this module has.

        The first unit takes bytes, int64 [n, t]. The last one returns scores [n, t, VOCABULARY], or
        their loss if there are `targets`. In between the shape is [n, t, d].
        """
        for unit in self.units if units is None else units:
            if unit == 0:
                x = self.embedding(x)
            x = self.blocks[str(unit // 2)](x, _part(unit))
            if unit == self.num_units - 1:
                x = self.head(self.norm(x), self.embedding.weight)
        return x if targets is None else self.loss_sum(x, targets)

    @staticmethod
    def loss_sum(scores: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss, 0-d; targets equal to PADDING are ignored."""
        scores, targets = scores.flatten(0, 1), targets.flatten()
        return F.cross_entropy(scores, targets, ignore_index=decoder.PADDING, reduction="sum")


def _part(unit: int) -> str:
    return "mlp" if unit % 2 else "attention"
