"""Faults in a run of the textbook trainer: ranks that leave or join, and values planted.

Ranks of this trainer have micro-batches and no logical shards. A fault at a logical shard strikes
the micro-batch with that shard's first sample, and is recorded under the number of the micro-batch,
rank * accumulation + micro.
"""

from __future__ import annotations

import torch
from torch import Tensor

from entrenar_py.shared import trace
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.single import textbook_replica
from entrenar_py.systems.single.textbook_replica import Replica, Setup
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.coordinator import models


def leave(setup: Setup, replicas: list[Replica], step: int) -> list[Replica]:
    """Return the ranks that remain in `step`; they take over the samples of those that leave."""
    for fault in _of(setup.scenario, "leave", step):
        replicas = [replica for replica in replicas if replica.rank != fault.rank]
        _record_change(setup, fault, "left")
    return replicas


def join(
    setup: Setup, replicas: list[Replica], step: int, position: sharding.Position
) -> list[Replica]:
    """Return all ranks, with those that join before `step`; these copy the first rank's state."""
    for fault in _of(setup.scenario, "join", step):
        assert fault.rank is not None, "faults.NEEDED has it"
        newcomer = build_newcomer(setup, replicas[0], fault.rank, step)
        replicas = sorted([*replicas, newcomer], key=lambda replica: replica.rank)
        _record_change(setup, fault, "joined")
        textbook_replica.record_start(setup, newcomer, step, position)
    return replicas


def build_newcomer(setup: Setup, donor: Replica, rank: int, step: int) -> Replica:
    """Return rank `rank` with the donor's tensors, optimizer and schedule, and its own dropout.

    The dropout stream depends on the step, too, so that a rank that returns repeats no mask.
    """
    newcomer = textbook_replica.build_replica(setup, rank)
    textbook_replica.broadcast([donor, newcomer])
    textbook_replica.load_optimizer(newcomer, textbook_replica.optimizer_arrays(donor))
    textbook_replica.load_schedule(newcomer, donor.scheduler.last_epoch)
    newcomer.rng = setup.scenario.rng("dropout", rank, step)
    return newcomer


class MicroBatchFaults:
    """Plants values in a micro-batch; to be created before its backward pass, and applied after."""

    def __init__(
        self, setup: Setup, replica: Replica, step: int, micro: int, ids: sharding.Ids
    ) -> None:
        self._setup, self._replica, self._step = setup, replica, step
        self._shard = replica.rank * setup.scenario.accumulation + micro
        self._faults = [
            fault
            for fault in setup.scenario.faults
            if fault.value is not None and _strikes(setup.scenario, fault, step, replica.rank, ids)
        ]
        self._before = [self._element(fault).item() for fault in self._faults]

    def apply(self, loss_sum: float, share: float) -> float:
        """Plant the values and record them; return the summed loss as it is afterwards.

        `share` is the micro-batch's number of samples over the weight of the global batch.
        """
        for fault, before in zip(self._faults, self._before, strict=True):
            assert fault.value is not None, "only such faults are kept"
            value = float(fault.value)
            if fault.kind == "non_finite_loss":
                loss_sum = value
            elif fault.kind == "huge_gradient":
                self._element(fault).fill_(huge_element(before, value, share))
            else:
                self._element(fault).fill_(value)
            self._setup.recorder.emit(
                trace.Injected(
                    fault=fault.to_dict(),
                    step=self._step,
                    rank=self._replica.rank,
                    shard=self._shard,
                )
            )
        return loss_sum

    def _element(self, fault: Fault) -> Tensor:
        """Return a view of the accumulated gradient's element that `fault` changes.

        Without a gradient, as on a rank without samples, a gradient of zeros is made first.
        """
        name, element = models.place_of(fault, self._setup.model)
        tensor = self._replica.tensors[name]
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        return tensor.grad.view(-1)[element]


def huge_element(before: float, value: float, share: float) -> float:
    """Return the accumulated element after a micro-batch whose samples all have gradient `value`.

    `before` is the element before the micro-batch; `share` is that of `MicroBatchFaults.apply`.
    """
    return before + value * share


def _strikes(scenario: Scenario, fault: Fault, step: int, rank: int, ids: sharding.Ids) -> bool:
    if fault.step != step or fault.rank not in (None, rank):
        return False
    return fault.shard is None or _first_sample(scenario, step, fault.shard) in ids


def _first_sample(scenario: Scenario, step: int, shard: int) -> int:
    """Return logical shard `shard`'s first sample, or the batch's last if the shard is empty."""
    num_batches = -(-scenario.num_samples // scenario.batch_size)  # of one epoch
    epoch, index = divmod(step, num_batches)
    visit = sharding.order(scenario.num_samples, scenario.rng("order", epoch))
    batch = sharding.batch(
        visit, sharding.Position(epoch, index * scenario.batch_size), scenario.batch_size
    )
    head = sum(map(len, sharding.cut(batch, scenario.num_shards)[:shard]))
    return batch[min(head, len(batch) - 1)]


def _of(scenario: Scenario, kind: str, step: int) -> list[Fault]:
    return [fault for fault in scenario.faults if (fault.kind, fault.step) == (kind, step)]


def _record_change(setup: Setup, fault: Fault, change: str) -> None:
    assert fault.step is not None, "faults.NEEDED has it"
    assert fault.rank is not None, "faults.NEEDED has it"
    setup.recorder.emit(trace.Injected(fault=fault.to_dict(), step=fault.step, rank=fault.rank))
    setup.recorder.emit(trace.Membership(step=fault.step, rank=fault.rank, change=change))
