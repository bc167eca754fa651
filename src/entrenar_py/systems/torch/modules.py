"""The workloads of scenarios as torch modules: whole, cut into stages, or sharded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic import decoder, engine, sharding
from entrenar_py.train.arithmetic import optimizer as rules
from entrenar_py.train.arithmetic.workload import DigitClassifier, LinearRegression
from entrenar_py.train.coordinator import models

LENGTH = decoder.POSITIONS + 1  # even, so that ranks can share a sequence; the end is padding


def drop(x: Tensor, probability: float) -> Tensor:
    """Return `x` with dropout from this rank's generator; for a DTensor torch would use another."""
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
        """Return the layer's output for `x`, [n, t, d] -> [n, t, d]."""
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
        """Return the layers' output for `x`, [n, t, d] -> [n, t, d]."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Head(nn.Module):
    """The output layer: scores for all bytes, with the embedding's weight."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the scores of each next byte, [n, t, d] -> [n, t, VOCABULARY]."""
        return F.linear(x, weight)


class Block(nn.Module):
    """Attention and feed-forward, or one of these, each after a norm and with a residual."""

    def __init__(self, parts: Iterable[str], dropout: float) -> None:
        super().__init__()
        for part in parts:
            norm = nn.RMSNorm(decoder.HIDDEN, eps=decoder.NORM_EPSILON)
            self.add_module(f"{part}_norm", norm)
            self.add_module(part, Attention(dropout) if part == "attention" else FeedForward())

    def forward(self, x: Tensor, part: str) -> Tensor:
        """Return `x` plus the output of `part`, [n, t, d] -> [n, t, d]."""
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


__all__ = ["Classifier", "Data", "Decoder", "Layers", "Regression", "build", "num_units"]


class Regression(nn.Linear):
    """Linear regression, y = w x + b, as a single unit."""

    num_units = 1

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(
        self, x: Tensor, targets: Tensor | None = None, units: Iterable[int] | None = None
    ) -> Tensor:
        """Return y, [n, 1] -> [n, 1], or with `targets` the summed loss."""
        y = super().forward(x)
        return y if targets is None else self.loss_sum(y, targets)

    @staticmethod
    def loss_sum(y: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss, 0-d; targets that are NaN are ignored."""
        real = ~targets.isnan()
        return F.mse_loss(y[real], targets[real], reduction="sum")


class Classifier(nn.Module):
    """Three units: two hidden tanh layers with dropout, and the output layer."""

    num_units = 3
    running_mean: Tensor  # of the pixels

    def __init__(self, width: int, dropout: float, units: Iterable[int] = range(num_units)) -> None:
        super().__init__()
        self.units = sorted(units)
        sizes = {"hidden1": (64, width), "hidden2": (width, width), "output": (width, 10)}
        self._names = list(sizes)
        for unit in self.units:
            self.add_module(self._names[unit], nn.Linear(*sizes[self._names[unit]]))
        if 0 in self.units:
            self.register_buffer("running_mean", torch.empty(64))
        self._dropout = dropout

    def forward(
        self, x: Tensor, targets: Tensor | None = None, units: Iterable[int] | None = None
    ) -> Tensor:
        """Return the output of `units`, by default of all that this module has.

        The first unit takes pixels, float32 [n, 64]. The last one returns scores [n, 10], or their
        loss if there are `targets`.
        """
        for unit in self.units if units is None else units:
            if unit == 0:
                x = x - self.running_mean
            x = self.get_submodule(self._names[unit])(x)
            if unit < self.num_units - 1:
                x = F.dropout(torch.tanh(x), self._dropout)
        return x if targets is None else self.loss_sum(x, targets)

    @staticmethod
    def loss_sum(scores: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss, 0-d; targets equal to PADDING are ignored."""
        return F.cross_entropy(scores, targets, ignore_index=decoder.PADDING, reduction="sum")


Layers: TypeAlias = Regression | Classifier | Decoder


_KINDS: dict[str, type[Layers]] = {
    "linear": Regression,
    "mlp": Classifier,
    "decoder": Decoder,
    "decoder_full": Decoder,
}


def num_units(scenario: Scenario) -> int:
    """Return the number of units, the limit for stages.

    Raises UsageError for a workload without layers.
    """
    if scenario.workload not in _KINDS:
        raise UsageError(
            f"workload={scenario.workload!r} on system {scenario.system}: it has no layers; use "
            f"{', '.join(_KINDS)}"
        )
    return _KINDS[scenario.workload].num_units


def build(scenario: Scenario, units: Iterable[int] | None = None) -> Layers:
    """Return the layers of `units`, by default all, with the workload's initial values."""
    workload = models.model_of(scenario)
    model: Layers
    here = range(num_units(scenario)) if units is None else list(units)
    if scenario.workload == "linear":
        model = Regression()
    elif scenario.workload == "mlp":
        model = Classifier(scenario.width, scenario.dropout, here)
    else:
        model = Decoder(scenario.dropout, here)
    values = workload.initial(scenario.rng("initial"))
    names = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    model.load_state_dict({name: torch.from_numpy(values[name]) for name in names})
    trained = {spec.name for spec in workload.specs if spec.role == "trainable"}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return model


class Data:
    """The samples of a scenario's workload, as inputs and targets of its layers."""

    def __init__(self, scenario: Scenario, device: torch.device) -> None:
        workload = models.model_of(scenario)
        assert isinstance(workload, LinearRegression | DigitClassifier | decoder.ByteDecoder)
        self._workload, self.device = workload, device

    def batch(self, ids: Sequence[int], num_rows: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of `ids`, padded to `num_rows`; the loss ignores padding."""
        workload = self._workload
        # The other rows repeat sample 0, with targets that the loss ignores.
        inputs, targets = workload.batch([*ids, *[0] * (num_rows - len(ids))])
        nothing = torch.nan if targets.is_floating_point() else decoder.PADDING
        targets = targets.clone()
        targets[len(ids) :] = nothing
        if isinstance(workload, decoder.ByteDecoder):
            more = LENGTH - decoder.POSITIONS
            inputs, targets = F.pad(inputs, (0, more)), F.pad(targets, (0, more), value=nothing)
        return inputs.to(self.device), targets.to(self.device)

    def count(self, ids: Sequence[int]) -> float:
        """Return the weight of `ids` in the mean: their number of samples or tokens."""
        return float(self._workload.weight(ids)) if ids else 0.0

    def example(self, unit: int, num_rows: int) -> Tensor:
        """Return a meta tensor like the input of `unit` (`num_units`: like the last output)."""
        shape = self._shapes()[unit]
        kind = self._workload.batch([0])[0].dtype if unit == 0 else torch.float32
        # The output of a unit requires a gradient: otherwise none would be sent back.
        return torch.empty(num_rows, *shape, dtype=kind, device="meta", requires_grad=unit > 0)

    def _shapes(self) -> list[tuple[int, ...]]:
        if isinstance(self._workload, DigitClassifier):
            width = self._workload.specs[0].shape[0]
            return [(64,), (width,), (width,), (10,)]
        if isinstance(self._workload, decoder.ByteDecoder):
            hidden = (LENGTH, decoder.HIDDEN)
            scores = (LENGTH, decoder.VOCABULARY)
            return [(LENGTH,), *[hidden] * (Decoder.num_units - 1), scores]
        return [(1,), (1,)]

    def move_buffers(self, model: nn.Module, ids: sharding.Ids) -> None:
        """Move the running means towards the mean of the whole global batch `ids`."""
        totals = self._workload.statistics(ids)
        for name, buffer in model.named_buffers():
            total = torch.from_numpy(totals[name]).to(buffer)
            buffer.lerp_(total / len(ids), engine.BUFFER_MOMENTUM)


MOMENTUM = 0.9


class Model(nn.Module):
    """A module with the tensors of a workload; it maps sample ids to the SUM of their losses."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.workload = models.model_of(scenario)
        self._dropout = scenario.dropout
        values = self.workload.initial(scenario.rng("initial"))
        for spec in self.workload.specs:
            *path, name = spec.name.split(".")
            place: nn.Module = self
            for part in path:
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            value = torch.from_numpy(values[spec.name])
            if spec.role == "buffer":
                place.register_buffer(name, value)
            else:
                place.register_parameter(name, nn.Parameter(value, spec.role == "trainable"))

    def forward(self, ids: Sequence[int]) -> Tensor:
        """Return the summed loss of `ids`, 0-d; there must be at least one."""
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        batch = self.workload.batch(ids)
        return self.workload.loss_of(tensors, batch, linear=_linear, drop=self._drop)

    def count(self, ids: Sequence[int]) -> float:
        """Return the weight of `ids` in the mean: their number of samples or tokens."""
        return float(self.workload.weight(ids)) if ids else 0.0

    def statistics(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return each buffer's sum, over `ids`, of the values that it averages, on its device."""
        totals = self.workload.statistics(ids) if ids else {}
        return {
            name: torch.from_numpy(totals[name]).to(buffer) if ids else torch.zeros_like(buffer)
            for name, buffer in self.named_buffers()
        }

    def move_buffers(self, totals: dict[str, Tensor], num_samples: int) -> None:
        """Move the running means towards the mean over the whole batch."""
        for name, buffer in self.named_buffers():
            buffer.lerp_(totals[name] / num_samples, engine.BUFFER_MOMENTUM)

    def _drop(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self._dropout) if self._dropout else x


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a linear layer's output in the dtype of the weights, even if `x` has another."""
    return nn.functional.linear(x.to(weight.dtype), weight, bias)


def optimizer_of(scenario: Scenario, model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's optimizer for the model's parameters, in two groups: decayed and others."""
    there = {name: p for name, p in model.named_parameters() if p.requires_grad}
    specs = [spec for spec in models.model_of(scenario).specs if spec.name in there]
    groups = [
        {
            "params": [there[spec.name] for spec in specs if spec.decayed == decayed],
            "weight_decay": scenario.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if scenario.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=scenario.learning_rate)
    momentum = MOMENTUM if scenario.optimizer == "momentum" else 0.0
    return torch.optim.SGD(groups, lr=scenario.learning_rate, momentum=momentum)


def scheduler_of(
    scenario: Scenario, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the scenario's schedule as a factor on the peak learning rate."""

    def factor(step: int) -> float:
        return rules.learning_rate(
            step,
            peak=1.0,
            kind=scenario.schedule,
            warmup_steps=scenario.warmup_steps,
            num_steps=scenario.num_steps,
        )

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
