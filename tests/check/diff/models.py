"""Two small models with a training loop, in which each line can be planted with a change by name.

The changes of `PLANTED` are bugs. Those of `BENIGN` compute the same in another order.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
# A call of a module returns Any.

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (as everyone calls it)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from entrenar_py.check.observing.borders import Borders
from entrenar_py.check.rank_files.border_file import Border, RankBorders, Settings

VOCABULARY, LENGTH, WIDTH, HEADS, KEY_HEADS, SIZE = 48, 12, 32, 4, 2, 8


class RMSNorm(nn.Module):
    def __init__(self, width: int, change: str, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.change = eps, change

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "norm in float64":
            wide = x.double()
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * normed.to(x.dtype)
        if self.change == "norm with eps outside":
            return self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps))
        if self.change == "norm divided":
            return self.weight * (
                x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-6)
            )
        if self.change == "fused norm":
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        if self.change == "norm without mean":
            return self.weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps))
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotated(
    x: Tensor,
    first: int = 0,
    *,
    base: float = 10000.0,
    adjacent: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return queries or keys, [batch, heads, length, size], with rotary positions."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=dtype) / half)
    angles = torch.arange(first, first + x.shape[2])[:, None] * rates
    cos, sin = angles.cos().float(), angles.sin().float()
    if adjacent:
        one, other = x[..., ::2], x[..., 1::2]
        return torch.stack([one * cos - other * sin, other * cos + one * sin], -1).flatten(-2)
    one, other = x[..., :half], x[..., half:]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Attention(nn.Module):
    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.q_proj = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.k_proj = nn.Linear(WIDTH, KEY_HEADS * SIZE, bias=False)
        self.v_proj = nn.Linear(WIDTH, KEY_HEADS * SIZE, bias=False)
        self.o_proj = nn.Linear(HEADS * SIZE, WIDTH, bias=False)
        self.q_norm, self.k_norm = RMSNorm(SIZE, ""), RMSNorm(SIZE, "")
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        change, (batch, length, _) = self.change, x.shape
        q = self.q_proj(x).view(batch, length, HEADS, SIZE)
        k = self.k_proj(x).view(batch, length, KEY_HEADS, SIZE)
        v = self.v_proj(x).view(batch, length, KEY_HEADS, SIZE).transpose(1, 2)
        if change == "view instead of transpose":
            v = v.transpose(1, 2).reshape(batch, KEY_HEADS, length, SIZE)
        if change == "no q norm":
            q, k = q.transpose(1, 2), self.k_norm(k).transpose(1, 2)
        else:
            q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        if change == "swapped k and v":
            k, v = v, k
        if change == "stale cache":
            if self.cache is not None and self.cache.shape == k.shape:
                k, fresh = self.cache, k
            else:
                fresh = k
            self.cache = fresh.detach()
        first = 1 if change == "rope off by one for keys" else 0
        base = 500000.0 if change == "rope base" else 10000.0
        if change == "rope once":
            q = rotated(q)
        elif change == "rope in float64":
            q, k = rotated(q, dtype=torch.float64), rotated(k, dtype=torch.float64)
        elif change == "adjacent rope":
            q, k = rotated(q, adjacent=True), rotated(k, adjacent=True)
        else:
            q, k = rotated(q, base=base), rotated(k, first, base=base)
        if change == "interleaved groups":
            k, v = k.repeat(1, HEADS // KEY_HEADS, 1, 1), v.repeat(1, HEADS // KEY_HEADS, 1, 1)
        else:
            k = k.repeat_interleave(HEADS // KEY_HEADS, 1)
            v = v.repeat_interleave(HEADS // KEY_HEADS, 1)
        if change == "detached keys":
            k = k.detach()
        return self.o_proj(self._mixed(q, k, v).transpose(1, 2).reshape(batch, length, -1))

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        change, length = self.change, q.shape[2]
        if change == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if change == "sdpa with a mask":
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if change in ("sdpa math", "sdpa flash"):
            kernel = change.removeprefix("sdpa ")
            with nn.attention.sdpa_kernel(
                nn.attention.SDPBackend.MATH
                if kernel == "math"
                else nn.attention.SDPBackend.FLASH_ATTENTION
            ):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scale = 1 / SIZE if change == "wrong scale" else 1 / math.sqrt(SIZE)
        if change == "float16 products":
            scores = (q.half() @ k.half().transpose(-1, -2)).float() * scale
        elif change == "scaled queries":
            scores = (q * scale) @ k.transpose(-1, -2)
        elif change == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
        elif change == "float64 scores":
            scores = (q.double() @ k.double().transpose(-1, -2)).float() * scale
        else:
            scores = q @ k.transpose(-1, -2) * scale
        diagonal = 2 if change == "mask off by one" else 1
        mask = torch.ones(length, length, dtype=torch.bool).triu(diagonal)
        if change == "added mask":
            scores = scores + torch.zeros(length, length).masked_fill(mask, -math.inf)
        elif change == "weak mask":
            scores = scores.masked_fill(mask, -5.0)
        elif change != "dropped mask":
            scores = scores.masked_fill(mask, -math.inf)
        if change == "softmax over queries":
            shares = scores.clamp(-50).softmax(-2)
        elif change == "softmax by hand":
            high = (scores - scores.amax(-1, keepdim=True).detach()).exp()
            shares = high / high.sum(-1, keepdim=True)
        else:
            shares = scores.softmax(-1)
        if change == "products by head":
            return torch.stack([shares[:, h] @ v[:, h] for h in range(HEADS)], 1)
        return shares @ v


class SwiGLU(nn.Module):
    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.gate, self.up = (nn.Linear(WIDTH, 64, bias=False) for _ in range(2))
        self.down = nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        if self.change == "swapped gate":
            gate, up = up, gate
        if self.change == "gelu gate":
            return self.down(F.gelu(gate) * up)
        if self.change == "detached gate":
            return self.down(F.silu(gate).detach() * up)
        if self.change == "transposed weights":
            return (F.silu(gate) * up) @ self.down.weight.t().contiguous()
        if self.change == "columns first":
            hidden = (F.silu(gate) * up).flatten(0, 1)
            return (self.down.weight @ hidden.t()).t().reshape(x.shape)
        if self.change == "sigmoid by hand":
            return self.down(gate * torch.sigmoid(gate) * up)
        if self.change == "chunked product":
            hidden, weight = F.silu(gate) * up, self.down.weight
            return sum(
                (
                    F.linear(hidden[..., n : n + 16], weight[:, n : n + 16])
                    for n in range(0, 64, 16)
                ),
                start=torch.zeros(()),
            )
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, change: str, norm: str) -> None:
        super().__init__()
        self.change = change
        eps = 1e-5 if change == "wrong eps" else 1e-6
        self.norm1, self.norm2 = RMSNorm(WIDTH, norm, eps), RMSNorm(WIDTH, norm)
        self.attention, self.mlp = Attention(change), SwiGLU(change)

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "norm after":
            x = x + self.norm1(self.attention(x))
        elif self.change == "residual from the norm":
            x = self.norm1(x)
            x = x + self.attention(x)
        else:
            x = x + self.attention(self.norm1(x))
        if self.change == "no second residual":
            return self.mlp(self.norm2(x))
        if self.change == "norm left out":
            return x + self.mlp(x)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A decoder as Qwen3's. The change is planted in the second block."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        of_all = change if "norm" in change else ""
        first = change if change == "wrong eps" else ""
        self.blocks = nn.ModuleList(
            Block(change if n == 1 else first, of_all if n else "") for n in range(2)
        )
        self.norm = RMSNorm(WIDTH, "")
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.change == "embedding as a product":
            x = F.one_hot(tokens, VOCABULARY).float() @ self.embedding.weight
        else:
            x = self.embedding(tokens)
        if self.change == "scaled embedding":
            x = x * math.sqrt(WIDTH)
        for block in self.blocks:
            if self.change == "checkpointing":
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        if self.change == "final norm left out":
            return self.head(x)
        x = self.norm(x)
        if self.change == "chunked head":
            return torch.cat([F.linear(x, part) for part in self.head.weight.chunk(4)], -1)
        if self.change == "head in bfloat16":
            return F.linear(x.bfloat16(), self.head.weight.bfloat16()).float()
        return self.head(x)


class Encoder(nn.Module):
    """A block of a ViT."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        eps = 1e-12 if change == "layer norm eps" else 1e-5
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=eps), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.act = nn.GELU(approximate="tanh" if change == "gelu tanh" else "none")
        self.dropout = nn.Dropout(0.2 if change == "dropout rate" else 0.1)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        change, (batch, length, _) = self.change, x.shape
        if change == "layer norm by hand":
            variance = x.var(-1, keepdim=True, correction=0)
            normed = (x - x.mean(-1, keepdim=True)) / (variance + self.norm1.eps).sqrt()
            normed = normed * self.norm1.weight + self.norm1.bias
        else:
            normed = self.norm1(x)
        if change == "three products":
            parts_of = zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True)
            qkv = torch.cat([F.linear(normed, weight, bias) for weight, bias in parts_of], -1)
        else:
            qkv = self.qkv(normed)
        if change == "qkv by head":
            parts = qkv.view(batch, length, HEADS, 3, SIZE).permute(3, 0, 2, 1, 4)
        else:
            parts = qkv.view(batch, length, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        q, k, v = parts
        mixed = (q @ k.transpose(-1, -2) / math.sqrt(SIZE)).softmax(-1) @ v
        if change == "heads not transposed":
            mixed = mixed.reshape(batch, length, WIDTH)
        else:
            mixed = mixed.transpose(1, 2).reshape(batch, length, WIDTH)
        out = self.dropout(self.out(mixed))
        x = x + (out if change == "layer scale left out" else out * self.scale)
        hidden = self.up(self.norm2(x))
        if change == "gelu by hand":
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        else:
            hidden = self.act(hidden)
        if change == "dropout left out":
            return x + self.down(hidden)
        return x + self.dropout(self.down(hidden))


class ViT(nn.Module):
    """A ViT of one block for 8 x 8 pictures."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.bn = nn.BatchNorm2d(3, momentum=0.2 if change == "batch norm momentum" else 0.1)
        self.cls = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH) * 0.02)
        self.block = Encoder(change)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        if self.change == "channels last":
            pictures = pictures.contiguous(memory_format=torch.channels_last)
        if self.change == "swapped channels":
            pictures = pictures.flip(1)
        if self.change == "patches unfolded":
            columns = F.unfold(self.bn(pictures), 4, stride=4).transpose(1, 2)
            x = F.linear(columns, self.patches.weight.flatten(1), self.patches.bias)
        else:
            x = self.patches(self.bn(pictures))
            x = x.transpose(-1, -2) if self.change == "patches transposed" else x
            x = x.flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        if self.change == "positions of patches only":
            x = torch.cat([x[:, :1], x[:, 1:] + self.positions[:, 1:]], 1)
        else:
            x = x + self.positions
        x = self.block(x)
        if self.change == "mean pooled":
            return self.head(x.mean(1))
        return self.head(x[:, 0])


@dataclass(frozen=True)
class Planted:
    """A bug and where it is first seen: step, phase, module, and a word of the operation."""

    change: str
    module: str
    operation: str = ""
    phase: str = "forward"
    step: int = 0
    model: str = "decoder"
    script: dict[str, Any] = field(default_factory=dict)


def build(model: str, change: str) -> nn.Module:
    """Return a model with the change, and the same weights for any change."""
    torch.manual_seed(7)
    made = ViT(change) if model == "vit" else Decoder(change)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            elif "norm" in name and "weight" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made


def batches(model: str, steps: int, parts: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Return for each step its micro-batches, inputs and labels."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps):
        if model == "vit":
            x = torch.randn(4, 3, 8, 8, generator=generator)
            y = torch.randint(0, 10, (4,), generator=generator)
        else:
            tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
            x, y = tokens[:, :-1], tokens[:, 1:]
        found.append([*zip(x.chunk(parts), y.chunk(parts), strict=True)])
    return found


def loss_of(change: str, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of a micro-batch."""
    if change == "label shift":
        labels = labels.roll(1, -1)
    flat, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if change == "sum of losses":
        return F.cross_entropy(flat, labels, reduction="sum")
    if change == "term of no value":
        return F.cross_entropy(flat, labels) + 0.1 * (flat - flat.detach()).sum()
    if change == "label smoothing":
        return F.cross_entropy(flat, labels, label_smoothing=0.01)
    if change == "first token ignored":
        return F.cross_entropy(flat[1:], labels[1:])
    if change == "loss by hand":
        return (flat.logsumexp(-1) - flat.gather(-1, labels[:, None])[:, 0]).mean()
    if change == "loss added up backwards":
        return F.cross_entropy(flat, labels, reduction="none").flip(0).cumsum(0)[-1] / len(flat)
    if change == "loss in float64":
        return F.cross_entropy(flat.double(), labels).float()
    if change == "loss in chunks":
        parts = zip(flat.chunk(4), labels.chunk(4), strict=True)
        return sum(
            (F.cross_entropy(x, y, reduction="sum") for x, y in parts), start=torch.zeros(())
        ) / len(flat)
    return F.cross_entropy(flat, labels)


def train(
    model: str,
    change: str = "",
    *,
    noise: int | None = None,
    operations: tuple[int, int] | None = None,
    steps: int = 2,
    parts: int = 1,
) -> list[RankBorders]:
    """Return the borders of a training run in this process."""
    if change in _SETTINGS:
        get, put, value = _SETTINGS[change]
        before = get()
        put(value)
        try:
            return train(model, noise=noise, operations=operations, steps=steps, parts=parts)
        finally:
            put(before)
    trained = build(model, change)
    if change == "weights in channels last":
        trained.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    borders: list[Border] = []
    failures: list[str] = []
    recorder = Borders(
        trained,
        borders.append,
        Settings(noise=noise, operations=operations),
        failed=failures.append,
    )
    optimizer = optimizer_of(change, trained)
    torch.manual_seed(5)
    if change == "one more draw":
        torch.rand(1)
    data = batches(model, steps, parts)
    for step in range(steps):
        micro_batches = data[step]
        if change == "micro-batches in another order":
            micro_batches = micro_batches[::-1]
        if change == "other samples" and step == 1:
            micro_batches = data[0]
        for index, (x, y) in enumerate(micro_batches):
            if change == "evaluation mode":
                trained.eval()
            recorder.begin_pass(step, index)
            loss = loss_of(change, trained(x.clone()), y)
            if change != "not divided by micro-batches":
                loss = loss / parts
            recorder.loss(float(loss.detach()), 1.0)
            loss.backward()
        if change != "gradients not cleared":
            _step(change, step, trained, optimizer, recorder)
            optimizer.zero_grad()
        else:
            _step(change, step, trained, optimizer, recorder)
    assert not failures, failures
    return [RankBorders(rank=0, borders=borders)]


def _step(
    change: str, step: int, trained: nn.Module, optimizer: torch.optim.Optimizer, recorder: Borders
) -> None:
    limit = 0.5 if change == "clipped harder" else 1.0
    if change == "clipped by value":
        torch.nn.utils.clip_grad_value_(trained.parameters(), 0.01)
    elif change != "not clipped":
        foreach = False if change == "clipped one by one" else None
        torch.nn.utils.clip_grad_norm_(trained.parameters(), limit, foreach=foreach)
    if change == "rate of the next step":
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 2)
    else:
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
    recorder.before_step(step, [optimizer])
    optimizer.step()
    if change == "weights scaled in the step":
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(0.999)
    recorder.after_step()
    if change == "weights rounded to bfloat16":
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.copy_(parameter.bfloat16())


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Any]] = {
    "more threads": (torch.get_num_threads, torch.set_num_threads, 3),
    "products of high precision": (
        *(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    ),
    "products without oneDNN": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "deterministic algorithms": (
        *(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    ),
}
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "weight decay": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "coupled weight decay": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.01),
    "beta2": lambda p: torch.optim.AdamW(p, 1e-2, betas=(0.9, 0.95), weight_decay=0.01),
    "optimizer eps": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-5, weight_decay=0.01),
    "for each": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.01, foreach=True),
    "one by one": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.01, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.01, amsgrad=True),
}


def optimizer_of(change: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a run."""
    make = _OPTIMIZERS.get(change, lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.01))
    return make(model.parameters())
