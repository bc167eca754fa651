"""A small training, and the plain loop that says what elastic training of it must give.

The loop shares no code with the trainer: it adds the gradients of the micro-batches pairwise, in
lists, and knows of no ranks.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.coordinator.recorder import Recorder

SAMPLES = 3  # of a micro-batch
_FEATURES, _HIDDEN, _OUTPUTS = 5, 7, 2
_DECAY, _CLIP_NORM = 0.75, 0.5


class _Model(nn.Module):
    """A model with dropout, and with weights of two dtypes, so that there are two buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout = nn.Linear(_FEATURES, _HIDDEN), nn.Dropout(0.2)
        self.second = nn.Linear(_HIDDEN, _OUTPUTS, dtype=torch.bfloat16)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.dropout(self.first(inputs).tanh())
        outputs: Tensor = self.second(hidden.bfloat16())
        return outputs


class Average:
    """An average of the weights over the steps, which is state besides the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.tensors = {name: one.detach().clone() for name, one in model.named_parameters()}

    def update(self) -> None:
        """Count the current weights."""
        for name, parameter in self._model.named_parameters():
            self.tensors[name].lerp_(parameter.detach(), 1 - _DECAY)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average."""
        return self.tensors

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from another average."""
        self.tensors = state


class Script:
    """What a user's script has: model, optimizer, schedule, an average of the weights, data."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        torch.manual_seed(scenario.seed)
        self.model = _Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=scenario.learning_rate)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, scenario.num_steps
        )
        self.average = Average(self.model)

    def batches(self, step: int) -> list[Tensor]:
        """Return the micro-batches of a step, each [samples, features + outputs]."""
        draw = torch.Generator().manual_seed(1_000 * self._scenario.seed + step)
        sizes = (self._scenario.num_shards, SAMPLES, _FEATURES + _OUTPUTS)
        return [*torch.randn(sizes, generator=draw)]

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean squared error of a micro-batch."""
        inputs, targets = batch[:, :_FEATURES], batch[:, _FEATURES:]
        loss: Tensor = (self.model(inputs).float() - targets).square().mean()
        return loss

    def clip(self) -> None:
        """Clip the gradients."""
        nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP_NORM)

    def shard(self, step: int, shard: int, *, rank: int) -> trace.Shard:
        """Return the record of a micro-batch that begins. `draws` is the state of the generator."""
        first = (step * self._scenario.num_shards + shard) * SAMPLES
        return trace.Shard(
            step=step,
            epoch=0,
            rank=rank,
            shard=shard,
            ids=tuple(range(first, first + SAMPLES)),
            loss_sum=None,
            weight=SAMPLES,
            finite=True,
            draws=hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:32],
        )

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def update(self, step: int, *, rank: int, learning_rate: float) -> trace.Update:
        """Return the record of a step that was made, at this rate."""
        return trace.Update(
            step=step,
            rank=rank,
            loss=None,
            weight=self._scenario.num_shards * SAMPLES,
            learning_rate=learning_rate,
            finite=True,
            schedule=self.schedule.last_epoch,
            **self.state(),
        )

    def state(self) -> dict[str, Any]:
        """Return the records of all tensors, as fields of an event."""
        moments = {
            f"{name}.{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        return {
            "weights": self._records(dict(self.model.named_parameters())),
            "optimizer": self._records(moments),
            "extra": self._records(self.average.tensors),
        }

    def _records(self, tensors: dict[str, Tensor]) -> trace.Tensors:
        values = self._scenario.detail == "values"
        # numpy has no bfloat16. Every one is a float32, too.
        return {
            name: trace.record_tensor(one.detach().float().contiguous().numpy(), values=values)
            for name, one in tensors.items()
        }


def run(scenario: Scenario) -> trace.Trace:
    """Train in one loop, and record each micro-batch and each step as rank 0."""
    recorder, before = Recorder(scenario), torch.get_rng_state()
    script = Script(scenario)
    recorder.emit(trace.Start(step=0, rank=0, **script.state()))
    parameters = [*script.model.parameters()]
    for step in range(scenario.num_steps):
        leaves = []
        for shard, batch in enumerate(script.batches(step)):
            # Part of what the trainer promises: dropout doesn't change with a release.
            digest = hashlib.sha256(f"{scenario.seed},{step},{shard}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            recorder.emit(script.shard(step, shard, rank=0))
            leaves.append([*torch.autograd.grad(script.loss(batch), parameters)])
        for parameter, gradient in zip(parameters, _sum(leaves), strict=True):
            parameter.grad = gradient / len(leaves)
        script.clip()
        rate = script.rate
        script.optimizer.step()
        script.schedule.step()
        script.average.update()
        recorder.emit(script.update(step, rank=0, learning_rate=rate))
    torch.set_rng_state(before)
    return recorder.finish(status="completed")


def _sum(nodes: list[list[Tensor]]) -> list[Tensor]:
    """Return the sum of the leaves, added pairwise. Their number is a power of two."""
    while len(nodes) > 1:
        pairs = zip(nodes[::2], nodes[1::2], strict=True)
        nodes = [[a + b for a, b in zip(left, right, strict=True)] for left, right in pairs]
    return nodes[0]
