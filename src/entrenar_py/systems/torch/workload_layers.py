"""A scenario's workload as a chain of torch layers that can be sharded and cut into stages.

Parameters have the names of the workload's tensors. The decoders are in `decoder_module`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.torch import decoder_module
from entrenar_py.systems.torch.decoder_module import Decoder
from entrenar_py.train.arithmetic import decoder, engine, sharding
from entrenar_py.train.arithmetic.workload import DigitClassifier, LinearRegression
from entrenar_py.train.coordinator import models

__all__ = ["Classifier", "Data", "Decoder", "Layers", "Regression", "build", "num_units"]


class Regression(nn.Linear):
    """y = w x + b, a single unit."""

    num_units = 1

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(
        self, x: Tensor, targets: Tensor | None = None, units: Iterable[int] | None = None
    ) -> Tensor:
        """[n, 1] -> [n, 1], or with `targets` the loss."""
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
    """Return the number of units (the most stages); UsageError for a workload without layers."""
    if scenario.workload not in _KINDS:
        raise UsageError(
            f"workload={scenario.workload!r} on system {scenario.system}: it has no layers; use "
            f"{', '.join(_KINDS)}"
        )
    return _KINDS[scenario.workload].num_units


def build(scenario: Scenario, units: Iterable[int] | None = None) -> Layers:
    """Return the workload's layers with initial values: those of `units`, by default all."""
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
            more = decoder_module.LENGTH - decoder.POSITIONS
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
            hidden = (decoder_module.LENGTH, decoder.HIDDEN)
            scores = (decoder_module.LENGTH, decoder.VOCABULARY)
            return [(decoder_module.LENGTH,), *[hidden] * (Decoder.num_units - 1), scores]
        return [(1,), (1,)]

    def move_buffers(self, model: nn.Module, ids: sharding.Ids) -> None:
        """Move the running means towards the mean of the whole global batch `ids`."""
        totals = self._workload.statistics(ids)
        for name, buffer in model.named_buffers():
            total = torch.from_numpy(totals[name]).to(buffer)
            buffer.lerp_(total / len(ids), engine.BUFFER_MOMENTUM)
