"""The `decoder` workload: a two-block byte language model, fine-tuned through LoRA.

RMSNorm, rotary embedding, grouped-query attention, SwiGLU, tied embedding, as in the Llama family.
Only the low-rank adapters are trained; in `decoder_full` all weights are. The formulas are written
out instead of calling torch's layers, so that every backend computes the same formulas. Letters in
shape comments: n sequences, t positions, r = n*t rows, d = HIDDEN, h heads of size e.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.train.arithmetic import datasets
from entrenar_py.train.arithmetic.tensors import (
    Array,
    Batch,
    DropFunction,
    LinearFunction,
    Tensors,
    TensorSpec,
    Workload,
    uniform,
)

VOCABULARY = 256
HIDDEN = 32
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 8
FEED_FORWARD = 64
NUM_BLOCKS = 2
POSITIONS = datasets.LINE_BYTES_MAX - 1  # the last byte is only a target
LORA_RANK = 4
LORA_SCALE = 2.0  # alpha / rank with alpha = 8
ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-5
PADDING = -100  # the target that cross entropy ignores


class ByteDecoder(Workload):
    """Next-byte prediction on lines of Python source. A sample's weight is its count of targets."""

    weight_max = POSITIONS

    def __init__(self, num_samples: int, *, full: bool = False) -> None:
        samples = datasets.lines(num_samples)
        inputs = np.zeros((num_samples, POSITIONS), np.int64)
        targets = np.full((num_samples, POSITIONS), PADDING, np.int64)
        for row, sample in enumerate(samples):
            tokens = np.frombuffer(sample, np.uint8)
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            targets[row, : len(tokens) - 1] = tokens[1:]
        self.name = "decoder_full" if full else "decoder"
        specs = _specs()
        if full:  # weight decay applies to matrices, not to gains
            specs = [
                TensorSpec(spec.name, spec.shape, "trainable", decayed=len(spec.shape) > 1)
                for spec in specs
            ]
        self.specs = tuple(specs)
        self.num_samples = num_samples
        self.data_digest = datasets.digest(inputs, targets)
        self._weights = [len(sample) - 1 for sample in samples]
        self._inputs = torch.from_numpy(inputs)
        self._targets = torch.from_numpy(targets)
        self._cosine, self._sine = rotary_table(POSITIONS)

    def initial(self, rng: np.random.Generator) -> dict[str, Array]:
        return {spec.name: _initial(rng, spec) for spec in self.specs}

    def weight(self, ids: Sequence[int]) -> int:
        return sum(self._weights[i] for i in ids)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the input bytes and the bytes to predict, int64 [n, POSITIONS] each."""
        rows = torch.tensor(ids)
        return self._inputs.index_select(0, rows), self._targets.index_select(0, rows)

    def loss_of(
        self, tensors: Tensors, batch: Batch, *, linear: LinearFunction, drop: DropFunction
    ) -> Tensor:
        embedding = tensors["embedding.weight"]
        inputs, targets = (tensor.to(embedding.device) for tensor in batch)  # [n, t] each
        rotary = (self._cosine.to(embedding), self._sine.to(embedding))

        x = F.embedding(inputs.flatten(), embedding)  # [r, d]
        for index in range(NUM_BLOCKS):
            block = _Block(tensors, f"blocks.{index}", rotary, linear, drop)
            x = x + block.attention(rms_norm(x, block["attention_norm.weight"]), inputs.shape[0])
            x = x + block.feed_forward(rms_norm(x, block["mlp_norm.weight"]))
        x = rms_norm(x, tensors["norm.weight"])
        logits = linear(x, embedding, None)  # [r, 256], the embedding tied to the output
        # Padded rows are included, so that shapes depend on the number of ids only.
        return F.cross_entropy(logits, targets.flatten(), ignore_index=PADDING, reduction="sum")


class _Block:
    """One decoder block during one forward pass; indexing gives its tensors by short name."""

    def __init__(
        self,
        tensors: Tensors,
        prefix: str,
        rotary: tuple[Tensor, Tensor],
        linear: LinearFunction,
        drop: DropFunction,
    ) -> None:
        self._tensors = tensors
        self._prefix = prefix
        self._rotary = rotary
        self._linear = linear
        self._drop = drop

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[f"{self._prefix}.{name}"]

    def attention(self, x: Tensor, num_sequences: int) -> Tensor:
        """Return the attention layer's output, [r, d], for `x` [r, d]."""
        q = _split_heads(self._adapted("attention.q", x), num_sequences)  # [n, 4, t, e]
        k = _split_heads(self._dense("attention.k", x), num_sequences)  # [n, 2, t, e]
        v = _split_heads(self._adapted("attention.v", x), num_sequences)  # [n, 2, t, e]
        cosine, sine = self._rotary
        mixed = grouped_query_attention(rotate(q, cosine, sine), rotate(k, cosine, sine), v)
        return self._dense("attention.o", mixed.transpose(1, 2).reshape(x.shape[0], -1))

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return the SwiGLU layer's output, [r, d], for `x` [r, d]."""
        gate = F.silu(self._dense("mlp.gate", x))  # [r, 64]
        return self._dense("mlp.down", gate * self._dense("mlp.up", x))

    def _dense(self, name: str, x: Tensor) -> Tensor:
        return self._linear(x, self[f"{name}.weight"], None)

    def _adapted(self, name: str, x: Tensor) -> Tensor:
        """Return the output of layer `name` with its low-rank adapter: W x + s B A drop(x)."""
        low = self._linear(self._drop(x), self[f"{name}.lora_a"], None)  # [r, 4]
        return self._dense(name, x) + LORA_SCALE * self._linear(low, self[f"{name}.lora_b"], None)


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """Return `x` [..., d] over its root mean square along the last dim, times `gain` [d]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPSILON) * gain


def rotary_table(num_positions: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each position's angles, float32 [num_positions, HEAD_DIM / 2]."""
    frequencies = ROTARY_BASE ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = np.outer(np.arange(num_positions), frequencies)
    return (
        torch.from_numpy(np.cos(angles).astype(np.float32)),
        torch.from_numpy(np.sin(angles).astype(np.float32)),
    )


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate dims i and i + e/2 of each head of `x` [n, h, t, e] by the position's angle i.

    Source: RoFormer (Su et al. 2021), section 3.4, in the half-split layout of Llama checkpoints.
    """
    first, second = x.chunk(2, dim=-1)  # [n, h, t, e/2] each
    return torch.cat(
        (first * cosine - second * sine, second * cosine + first * sine), dim=-1
    )  # [n, h, t, e]


def grouped_query_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention [n, h, t, e]; consecutive query heads share one key-value head."""
    heads_per_kv = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(heads_per_kv, dim=1)  # [n, h, t, e]
    v = v.repeat_interleave(heads_per_kv, dim=1)  # [n, h, t, e]
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5  # [n, h, t, t]
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v


def _split_heads(x: Tensor, num_sequences: int) -> Tensor:
    return x.reshape(num_sequences, POSITIONS, -1, HEAD_DIM).transpose(1, 2)  # [n, h, t, e]


def _specs() -> list[TensorSpec]:
    query, key_value = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    specs = [_frozen("embedding.weight", VOCABULARY, HIDDEN)]
    for index in range(NUM_BLOCKS):
        block = f"blocks.{index}"
        specs += [
            _frozen(f"{block}.attention_norm.weight", HIDDEN),
            _frozen(f"{block}.attention.q.weight", query, HIDDEN),
            *_adapter(f"{block}.attention.q", query),
            _frozen(f"{block}.attention.k.weight", key_value, HIDDEN),
            _frozen(f"{block}.attention.v.weight", key_value, HIDDEN),
            *_adapter(f"{block}.attention.v", key_value),
            _frozen(f"{block}.attention.o.weight", HIDDEN, query),
            _frozen(f"{block}.mlp_norm.weight", HIDDEN),
            _frozen(f"{block}.mlp.gate.weight", FEED_FORWARD, HIDDEN),
            _frozen(f"{block}.mlp.up.weight", FEED_FORWARD, HIDDEN),
            _frozen(f"{block}.mlp.down.weight", HIDDEN, FEED_FORWARD),
        ]
    return [*specs, _frozen("norm.weight", HIDDEN)]


def _frozen(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, "frozen", decayed=False)


def _adapter(layer: str, fan_out: int) -> tuple[TensorSpec, TensorSpec]:
    return (
        TensorSpec(f"{layer}.lora_a", (LORA_RANK, HIDDEN), "trainable", decayed=True),
        TensorSpec(f"{layer}.lora_b", (fan_out, LORA_RANK), "trainable", decayed=True),
    )


def _initial(rng: np.random.Generator, spec: TensorSpec) -> Array:
    if spec.name.endswith("lora_b"):
        return np.zeros(spec.shape, np.float32)  # initially the adapters change nothing
    if spec.name.endswith("norm.weight"):
        return np.ones(spec.shape, np.float32)
    return uniform(rng, spec, bound=(3 / spec.shape[-1]) ** 0.5)  # variance 1 / fan-in
