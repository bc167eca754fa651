"""The samples of one step, and the loss of each of their logical shards.

Batches, shards and random numbers are the reference trainer's: they follow from the scenario alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.arithmetic.engine import Dropout
from entrenar_py.train.model.workload import Finetuning

Objective = Callable[..., Tensor]  # of what a batch has: the summed loss, 0-d


@dataclass(frozen=True, kw_only=True)
class Step:
    """Step `number`: the ids of each logical shard, some perhaps empty, and the `weight` of all."""

    number: int
    epoch: int
    shards: tuple[sharding.Ids, ...]
    weight: float

    @property
    def num_samples(self) -> int:
        """The number of samples in all shards."""
        return sum(map(len, self.shards))


class Shards:
    """Cuts a run's batches into logical shards, and computes losses of shards on `device`."""

    def __init__(self, workload: Finetuning, scenario: Scenario, device: torch.device) -> None:
        self.workload, self.scenario, self.device = workload, scenario, device
        self._visit: tuple[int, sharding.Ids] | None = None

    def step(self, number: int, position: sharding.Position) -> Step:
        """Return the step at `position`."""
        scenario = self.scenario
        if self._visit is None or self._visit[0] != position.epoch:
            rng = scenario.rng("order", position.epoch)
            self._visit = position.epoch, sharding.order(scenario.num_samples, rng)
        ids = sharding.batch(self._visit[1], position, scenario.batch_size)
        self.workload.require(ids)  # all ranks wait here, and not in a collective
        return Step(
            number=number,
            epoch=position.epoch,
            shards=tuple(sharding.cut(ids, scenario.num_shards)),
            weight=self.workload.weight(ids),
        )

    def share(self, rank: int, world_size: int) -> range:
        """Return the consecutive shards of `rank`, of W ranks that each have S / W or one more."""
        shards = sharding.cut(range(self.scenario.num_shards), world_size)[rank]
        return range(shards[0], shards[-1] + 1)

    def loss(self, objective: Objective, step: Step, shard: int) -> Tensor:
        """Return the summed loss of `shard`, computed by `objective`.

        A shard without samples has a loss of zero: of another sample, times zero.
        """
        ids = step.shards[shard]
        self.seed(step, shard)
        batch = self.workload.batch(ids or step.shards[0][:1])
        loss = self.workload.loss(lambda given: objective(*given), batch, self.device)
        return loss if ids else loss * 0

    def seed(self, step: Step, shard: int, *place: int) -> None:
        """Seed all that the model draws in `shard`, as the reference trainer does.

        A `place` in the model, such as a stage, gets a stream of its own.
        """
        rng = self.scenario.rng("dropout", step.number, shard, *place)
        self.workload.seed(Dropout(0.0, rng))

    def zeros(self) -> Tensor:
        """Return a loss of zero for each shard, float64 [num_shards], on the device."""
        return torch.zeros(self.scenario.num_shards, dtype=torch.float64, device=self.device)

    def padded(self, rank: int, world_size: int) -> Iterator[int | None]:
        """Yield the shards of `rank`, then None as often as others have one more than this rank.

        For models whose forward pass is a collective: all ranks call it equally often.
        """
        share = self.share(rank, world_size)
        yield from share
        longest = -(-self.scenario.num_shards // world_size)
        yield from [None] * (longest - len(share))
