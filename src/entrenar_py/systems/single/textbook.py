"""A data-parallel trainer as textbooks write it: replicas, torch.optim, one sum over ranks.

It is written independently of the reference trainer, so that each is an oracle for the other. It
uses torch's own optimizers, schedulers, clipping and autograd accumulation. With one rank and no
accumulation it is the plain single-device loop. Gradients are added in rank order: runs with
different numbers of ranks agree up to rounding, not in bits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from entrenar_py.shared import trace, workers
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.single import textbook_faults, textbook_replica
from entrenar_py.systems.single.textbook_replica import Replica, Setup
from entrenar_py.train.arithmetic import engine, sharding
from entrenar_py.train.coordinator import models
from entrenar_py.train.coordinator.models import Devices
from entrenar_py.train.coordinator.recorder import Recorder


def run(scenario: Scenario) -> trace.Trace:
    """Train as `scenario` says."""
    recorder = Recorder(scenario)
    status = train(scenario, recorder)
    return recorder.finish(status=status)


def train(scenario: Scenario, recorder: Recorder) -> str:
    """Run all steps; return `completed` or `halted`."""
    setup = Setup(scenario, models.model_of(scenario), recorder, Devices(scenario, recorder))
    for rank in range(scenario.world_size):
        setup.devices.of(rank)  # fails before training starts if a device is missing
    ranks = workers.initial_ranks(scenario)
    replicas = [textbook_replica.build_replica(setup, rank) for rank in ranks]
    textbook_replica.broadcast(replicas)
    position = sharding.Position()
    for replica in replicas:
        textbook_replica.record_start(setup, replica, 0, position)
    for step in range(scenario.num_steps):
        if step in scenario.stops:
            replicas, position = stop_and_resume(setup, replicas, step, position)
        replicas = textbook_faults.join(setup, replicas, step, position)
        replicas = textbook_faults.leave(setup, replicas, step)
        ids = global_batch(setup, position)
        if not train_step(setup, replicas, step, position.epoch, ids):
            return "halted"
        position = sharding.advance(position, len(ids), scenario.num_samples)
    return "completed"


def global_batch(setup: Setup, position: sharding.Position) -> sharding.Ids:
    """Return the sample ids of the step at `position`, over all ranks."""
    scenario = setup.scenario
    visit = sharding.order(scenario.num_samples, order_rng(scenario, position.epoch))
    return visit[position.offset : position.offset + scenario.batch_size]


def order_rng(scenario: Scenario, epoch: int) -> np.random.Generator:
    """Return the random stream of an epoch's order, which is the same on every rank."""
    return scenario.rng("order", epoch)


def local_batch(ids: sharding.Ids, index: int, num_ranks: int) -> sharding.Ids:
    """Return the part of the global batch that the rank at `index` of `num_ranks` computes."""
    return split(ids, num_ranks)[index]


def split(ids: sharding.Ids, num_parts: int) -> list[sharding.Ids]:
    """Split `ids`, in order, into parts whose sizes differ by at most one, larger ones first."""
    return [part.tolist() for part in np.array_split(np.asarray(ids, np.int64), num_parts)]


def train_step(
    setup: Setup, replicas: list[Replica], step: int, epoch: int, ids: sharding.Ids
) -> bool:
    """Run forward and backward on every rank, sum over ranks, and step; return False on a halt."""
    weight = float(setup.model.weight(ids))
    shards: list[trace.Shard] = []
    for index, replica in enumerate(replicas):
        local = local_batch(ids, index, len(replicas))
        zero_grad(replica)
        for micro, part in enumerate(split(local, setup.scenario.accumulation)):
            shards.append(micro_step(setup, replica, step, epoch, micro, part, weight))
    culprit = non_finite_shard(shards)
    if culprit is not None:
        setup.recorder.emit(
            trace.Halt(
                step=step,
                reason=f"non-finite gradient or loss on rank {culprit.rank}, step {step}",
                rank=culprit.rank,
                shard=culprit.shard,
                ids=culprit.ids,
            )
        )
        return False
    all_reduce(setup, replicas)
    update_buffers(setup, replicas, ids)
    loss = reported_loss(shards, weight)
    for replica in replicas:
        apply(setup, replica, step, loss, weight)
    return True


def zero_grad(replica: Replica) -> None:
    """Forget the gradients of the step before."""
    replica.optimizer.zero_grad()


def micro_step(
    setup: Setup,
    replica: Replica,
    step: int,
    epoch: int,
    micro: int,
    ids: sharding.Ids,
    weight: float,
) -> trace.Shard:
    """Add a micro-batch's share of the global mean gradient to `.grad`; record the micro-batch."""
    scenario = setup.scenario
    drop = masks(setup, replica, step, ids)
    faults = textbook_faults.MicroBatchFaults(setup, replica, step, micro, ids)
    loss_sum = 0.0
    if len(ids):
        linear = setup.devices.of(replica.rank).linear
        batch = setup.model.batch(ids)
        loss = setup.model.loss_of(
            replica.tensors, batch, linear=linear, drop=drop or engine.no_dropout
        )
        backward(loss, weight, setup, ids)
        loss_sum = loss.item()
    loss_sum = faults.apply(loss_sum, len(ids) / weight)
    shard = trace.Shard(
        step=step,
        epoch=epoch,
        rank=replica.rank,
        shard=replica.rank * scenario.accumulation + micro,
        ids=tuple(ids),
        loss_sum=loss_sum,
        weight=float(setup.model.weight(ids)) if len(ids) else 0.0,
        finite=bool(np.isfinite(loss_sum)) and gradients_finite(setup, replica),
        draws=drop.digest() if drop else None,
    )
    setup.recorder.emit(shard)
    return shard


def masks(setup: Setup, replica: Replica, step: int, ids: sharding.Ids) -> engine.Dropout | None:
    """Return dropout that draws from the rank's own stream, or None without dropout.

    A single rank without accumulation draws from the streams of the logical shards: it is the
    oracle of trainers whose dropout depends on the shard.
    """
    scenario = setup.scenario
    if not scenario.dropout:
        return None
    if scenario.world_size > 1 or scenario.accumulation > 1:
        return engine.Dropout(scenario.dropout, replica.rng)
    shards = enumerate(sharding.cut(ids, scenario.num_shards))
    streams = [(scenario.rng("dropout", step, shard), len(part)) for shard, part in shards]
    return engine.Dropout(scenario.dropout, engine.ShardStreams(streams))


def backward(loss: Tensor, weight: float, setup: Setup, ids: sharding.Ids) -> None:
    """Back-propagate a micro-batch's summed `loss`, divided by the global batch's `weight`."""
    (loss / weight).backward()  # type: ignore[no-untyped-call]


def gradients_finite(setup: Setup, replica: Replica) -> bool:
    """Return whether the gradients accumulated so far have no NaN or Inf."""
    grads = [replica.tensors[name].grad for name in setup.trainable]
    return all(bool(grad.isfinite().all()) for grad in grads if grad is not None)


def non_finite_shard(shards: Sequence[trace.Shard]) -> trace.Shard | None:
    """Return the first micro-batch of any rank whose loss or gradient is not finite, or None."""
    return next((shard for shard in shards if not shard.finite), None)


def all_reduce(setup: Setup, replicas: list[Replica]) -> None:
    """Sum each gradient over ranks, in rank order, and give every rank the sum."""
    for name in setup.trainable:
        total = sum_ranks([gradient_of(replica, name) for replica in replicas])
        for replica in replicas:
            replica.tensors[name].grad = total.clone()


def gradient_of(replica: Replica, name: str) -> Tensor:
    """Return the rank's local gradient of a tensor; zeros if the rank had no samples."""
    grad = replica.tensors[name].grad
    return torch.zeros_like(replica.tensors[name]) if grad is None else grad


def sum_ranks(gradients: list[Tensor]) -> Tensor:
    """Return the sum over ranks, in rank order."""
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total


def reported_loss(shards: Sequence[trace.Shard], weight: float) -> float:
    """Return the mean loss over the global batch."""
    return sum(shard.loss_sum or 0.0 for shard in shards) / weight


def update_buffers(setup: Setup, replicas: list[Replica], ids: sharding.Ids) -> None:
    """Move every replica's running means towards the global batch's mean."""
    for name, total in setup.model.statistics(ids).items():
        mean = torch.from_numpy(total) / len(ids)
        for replica in replicas:
            replica.tensors[name].lerp_(mean, engine.BUFFER_MOMENTUM)


def apply(setup: Setup, replica: Replica, step: int, loss: float, weight: float) -> None:
    """Clip one rank's gradient, step its optimizer and scheduler, and record the update."""
    recorder = setup.recorder
    gradient = recorder.tensors(
        {name: gradient_of(replica, name).detach().numpy() for name in setup.trainable}
    )
    norm = grad_norm(setup, replica)
    clip(setup, replica)
    applied_norm = grad_norm(setup, replica)
    rate = float(replica.optimizer.param_groups[0]["lr"])
    optimizer_step(replica)
    scheduler_step(setup, replica)
    recorder.emit(
        trace.Update(
            step=step,
            rank=replica.rank,
            loss=loss,
            weight=weight,
            learning_rate=rate,
            rates={},
            finite=all(bool(t.isfinite().all()) for t in replica.tensors.values()),
            gradient=gradient,
            grad_norm=norm,
            applied_norm=applied_norm,
            **textbook_replica.state_records(setup, replica),
        )
    )


def grad_norm(setup: Setup, replica: Replica) -> float:
    """Return the L2 norm over all trainable gradients, accumulated in float64."""
    squares = [gradient_of(replica, n).double().square().sum() for n in setup.trainable]
    return float(torch.stack(squares).sum().sqrt())


def clip(setup: Setup, replica: Replica) -> None:
    """Clip the reduced gradient, in place, by its float64 norm: float32 squares may overflow."""
    if setup.scenario.clip_norm is not None:
        tensors = [replica.tensors[name] for name in setup.trainable]
        norm = torch.tensor(grad_norm(setup, replica), dtype=torch.float64)
        torch.nn.utils.clip_grads_with_norm_(tensors, setup.scenario.clip_norm, norm)


def optimizer_step(replica: Replica) -> None:
    """Make one optimizer step."""
    replica.optimizer.step()


def scheduler_step(setup: Setup, replica: Replica) -> None:
    """Make one scheduler step; there is one for each optimizer step."""
    replica.scheduler.step()


def stop_and_resume(
    setup: Setup, replicas: list[Replica], step: int, position: sharding.Position
) -> tuple[list[Replica], sharding.Position]:
    """Save a checkpoint, and return new replicas and a position that are read from the file."""
    setup.recorder.emit(
        trace.Saved(
            step=step,
            rank=replicas[0].rank,
            progress=textbook_replica.progress_of(replicas[0], position),
            **textbook_replica.state_records(setup, replicas[0]),
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint")
        textbook_replica.save(path, replicas, position)
        resumed = [textbook_replica.build_replica(setup, replica.rank) for replica in replicas]
        position = textbook_replica.load(path, setup, resumed)
    for replica in resumed:
        textbook_replica.record_start(setup, replica, step, position, resumed=True)
    return resumed, position
