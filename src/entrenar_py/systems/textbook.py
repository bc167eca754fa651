"""A data-parallel trainer as in a textbook: replicas, torch.optim, one sum over ranks.

It is written independently of the reference trainer, so that each is an oracle for the other. It
uses torch's own optimizers, schedulers, clipping and autograd accumulation. With one rank and no
accumulation it is the plain single-device loop. Gradients are added in rank order: runs with
different numbers of ranks agree up to rounding, not in bits.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entrenar_py.shared import trace, workers
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic import checkpoint, engine, sharding
from entrenar_py.train.arithmetic import optimizer as rules
from entrenar_py.train.arithmetic.tensors import Workload
from entrenar_py.train.coordinator import models
from entrenar_py.train.coordinator.models import Devices
from entrenar_py.train.coordinator.recorder import Recorder


@dataclass
class Replica:
    """One rank: its tensors, its optimizer and scheduler, and its own dropout stream."""

    rank: int
    tensors: dict[str, Tensor]
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    rng: np.random.Generator


@dataclass(frozen=True)
class Setup:
    """The part of a run that does not change."""

    scenario: Scenario
    model: Workload
    recorder: Recorder
    devices: Devices

    @property
    def trainable(self) -> list[str]:
        """Names of the trainable tensors, in order."""
        return [spec.name for spec in self.model.specs if spec.role == "trainable"]

    @property
    def buffers(self) -> list[str]:
        """Names of the buffers, in order."""
        return [spec.name for spec in self.model.specs if spec.role == "buffer"]


def build_replica(setup: Setup, rank: int) -> Replica:
    """Return a new replica; every rank draws the same initial values from the same stream."""
    scenario = setup.scenario
    values = setup.model.initial(initial_rng(scenario, rank))
    tensors = {name: master(torch.tensor(value)) for name, value in values.items()}
    for name in setup.trainable:
        tensors[name].requires_grad_()
    optimizer = build_optimizer(setup, tensors)
    scheduler = build_scheduler(scenario, optimizer)
    return Replica(rank, tensors, optimizer, scheduler, scenario.rng("dropout", rank))


def initial_rng(scenario: Scenario, rank: int) -> np.random.Generator:
    """Return the random stream of the initial weights, which is the same on every rank."""
    return scenario.rng("initial")


def master(value: Tensor) -> Tensor:
    """Return the float32 master copy of a weight."""
    return value.float()


def build_optimizer(setup: Setup, tensors: dict[str, Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer of torch.optim with two groups: weights that decay, and the rest."""
    scenario = setup.scenario
    specs = [spec for spec in setup.model.specs if spec.role == "trainable"]
    groups = [
        {
            "params": [tensors[spec.name] for spec in specs if spec.decayed == decayed],
            "weight_decay": scenario.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if scenario.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=scenario.learning_rate)
    momentum = 0.9 if scenario.optimizer == "momentum" else 0.0
    return torch.optim.SGD(groups, lr=scenario.learning_rate, momentum=momentum)


def build_scheduler(
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


def broadcast(replicas: list[Replica]) -> None:
    """Copy the tensors of the first replica to all others."""
    for replica in replicas[1:]:
        for name, tensor in replica.tensors.items():
            tensor.data.copy_(replicas[0].tensors[name])


def save(path: Path, replicas: list[Replica], position: sharding.Position) -> None:
    """Save the first rank's tensors and optimizer, every rank's random state, and the position."""
    first = replicas[0]
    arrays = {name: tensor.detach().numpy() for name, tensor in first.tensors.items()}
    progress = progress_of(first, position)
    progress["rng"] = {str(r.rank): json.dumps(rng_state(r)) for r in replicas}
    checkpoint.save(
        path, checkpoint.as_arrays(tensors=arrays, optimizer=optimizer_arrays(first)), progress
    )


def load(path: Path, setup: Setup, replicas: list[Replica]) -> sharding.Position:
    """Fill `replicas` from the checkpoint; return the position in the data."""
    arrays, progress = checkpoint.load(path)
    for replica in replicas:
        for name, array in checkpoint.group_of(arrays, "tensors").items():
            replica.tensors[name].data.copy_(torch.from_numpy(array))
        load_optimizer(replica, checkpoint.group_of(arrays, "optimizer"))
        load_schedule(replica, progress["schedule_step"])
        replica.rng.bit_generator.state = restored_rng(progress["rng"], replica.rank)
    return sharding.Position(progress["epoch"], progress["offset"])


def progress_of(replica: Replica, position: sharding.Position) -> dict[str, Any]:
    """Return epoch, offset and schedule step, which a resume must restore besides the tensors."""
    return {
        "epoch": position.epoch,
        "offset": position.offset,
        "schedule_step": replica.scheduler.last_epoch,
    }


def optimizer_arrays(replica: Replica) -> dict[str, np.ndarray[Any, Any]]:
    """Return the optimizer's state as arrays under `index/key`, in parameter order."""
    state = replica.optimizer.state_dict()["state"]
    return {
        f"{index}/{key}": np.atleast_1d(value.detach().numpy())
        for index, entries in state.items()
        for key, value in entries.items()
        if value is not None
    }


def load_optimizer(replica: Replica, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    """Restore the optimizer's state from the result of `optimizer_arrays`, in any order."""
    content = replica.optimizer.state_dict()
    for name, array in sorted(arrays.items()):
        index, key = name.split("/")
        value = torch.tensor(array)
        content["state"].setdefault(int(index), {})[key] = value[0] if key == "step" else value
    replica.optimizer.load_state_dict(content)


def load_schedule(replica: Replica, schedule_step: int) -> None:
    """Set the scheduler to `schedule_step`, and the optimizer to the learning rate of that step."""
    scheduler = replica.scheduler
    scheduler.last_epoch = schedule_step
    groups = replica.optimizer.param_groups
    for group, peak, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = peak * factor(schedule_step)


def rng_state(replica: Replica) -> dict[str, Any]:
    """Return the rank's random state as JSON values."""
    state: dict[str, Any] = replica.rng.bit_generator.state  # type: ignore[assignment]
    plain = {name: value.tolist() for name, value in state["state"].items()}
    return {**state, "state": plain, "buffer": state["buffer"].tolist()}


def restored_rng(states: dict[str, str], rank: int) -> dict[str, Any]:
    """Return the state that `rng_state` saved for `rank`."""
    state: dict[str, Any] = json.loads(states[str(rank)])
    arrays = {name: np.array(value, np.uint64) for name, value in state["state"].items()}
    return {**state, "state": arrays, "buffer": np.array(state["buffer"], np.uint64)}


def state_records(setup: Setup, replica: Replica) -> dict[str, Any]:
    """Return records of a rank's weights, optimizer state and buffers."""
    arrays = {name: tensor.detach().numpy() for name, tensor in replica.tensors.items()}
    return {
        "weights": setup.recorder.tensors(
            {name: array for name, array in arrays.items() if name not in setup.buffers}
        ),
        "optimizer": setup.recorder.tensors(optimizer_arrays(replica)),
        "buffers": setup.recorder.tensors({name: arrays[name] for name in setup.buffers}),
    }


def record_start(
    setup: Setup, replica: Replica, step: int, position: sharding.Position, *, resumed: bool = False
) -> None:
    """Emit a Start event with the state of a rank before `step`."""
    specs = setup.model.specs
    setup.recorder.emit(
        trace.Start(
            step=step,
            rank=replica.rank,
            trainable=tuple(spec.name for spec in specs if spec.role == "trainable"),
            frozen=tuple(spec.name for spec in specs if spec.role == "frozen"),
            decayed=tuple(spec.name for spec in specs if spec.decayed),
            progress=progress_of(replica, position),
            resumed=resumed,
            **state_records(setup, replica),
        )
    )


def leave(setup: Setup, replicas: list[Replica], step: int) -> list[Replica]:
    """Return the ranks that remain in `step`; they take over the samples of those that leave."""
    for fault in _of(setup.scenario, "leave", step):
        replicas = [replica for replica in replicas if replica.rank != fault.rank]
        _record_change(setup, fault, "left")
    return replicas


def join(
    setup: Setup, replicas: list[Replica], step: int, position: sharding.Position
) -> list[Replica]:
    """Return all ranks, including those that join before `step` and copy the first rank's state."""
    for fault in _of(setup.scenario, "join", step):
        assert fault.rank is not None, "faults.NEEDED has it"
        newcomer = build_newcomer(setup, replicas[0], fault.rank, step)
        replicas = sorted([*replicas, newcomer], key=lambda replica: replica.rank)
        _record_change(setup, fault, "joined")
        record_start(setup, newcomer, step, position)
    return replicas


def build_newcomer(setup: Setup, donor: Replica, rank: int, step: int) -> Replica:
    """Return rank `rank` with the donor's tensors, optimizer and schedule, and its own dropout.

    The dropout stream depends on the step, too, so that a returning rank never repeats a mask.
    """
    newcomer = build_replica(setup, rank)
    broadcast([donor, newcomer])
    load_optimizer(newcomer, optimizer_arrays(donor))
    load_schedule(newcomer, donor.scheduler.last_epoch)
    newcomer.rng = setup.scenario.rng("dropout", rank, step)
    return newcomer


class MicroBatchFaults:
    """The faults of a micro-batch; created before its backward pass, and applied after it."""

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
        """Plant the faults' values and record them; return the summed loss afterwards.

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

        If the rank has no gradient, because it has no samples, a gradient of zeros is created
        first.
        """
        name, element = models.place_of(fault, self._setup.model)
        tensor = self._replica.tensors[name]
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        return tensor.grad.view(-1)[element]


def huge_element(before: float, value: float, share: float) -> float:
    """Return the accumulated element after a micro-batch of samples with gradient `value` each.

    `before` is the element before the micro-batch; `share` is as in `MicroBatchFaults.apply`.
    """
    return before + value * share


def _strikes(scenario: Scenario, fault: Fault, step: int, rank: int, ids: sharding.Ids) -> bool:
    if fault.step != step or fault.rank not in (None, rank):
        return False
    return fault.shard is None or _first_sample(scenario, step, fault.shard) in ids


def _first_sample(scenario: Scenario, step: int, shard: int) -> int:
    """Return the first sample of logical shard `shard`; if it is empty, the batch's last sample."""
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
    ranks = workers.initial_ranks(scenario.world_size, scenario.faults)
    replicas = [build_replica(setup, rank) for rank in ranks]
    broadcast(replicas)
    position = sharding.Position()
    for replica in replicas:
        record_start(setup, replica, 0, position)
    for step in range(scenario.num_steps):
        if step in scenario.stops:
            replicas, position = stop_and_resume(setup, replicas, step, position)
        replicas = join(setup, replicas, step, position)
        replicas = leave(setup, replicas, step)
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
    """Return `ids` in consecutive parts; sizes differ by at most one, larger first."""
    return [part.tolist() for part in np.array_split(np.asarray(ids, np.int64), num_parts)]


def train_step(
    setup: Setup, replicas: list[Replica], step: int, epoch: int, ids: sharding.Ids
) -> bool:
    """Run one step on every rank, with one sum over ranks; return False on a halt."""
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
    """Forget the gradients of the previous step."""
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
    faults = MicroBatchFaults(setup, replica, step, micro, ids)
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
    oracle of trainers with a dropout that depends on the shard.
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
    """Return the first micro-batch of any rank with a loss or gradient that is not finite."""
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
            **state_records(setup, replica),
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
    """Take one optimizer step."""
    replica.optimizer.step()


def scheduler_step(setup: Setup, replica: Replica) -> None:
    """Take one scheduler step, as after each optimizer step."""
    replica.scheduler.step()


def stop_and_resume(
    setup: Setup, replicas: list[Replica], step: int, position: sharding.Position
) -> tuple[list[Replica], sharding.Position]:
    """Save a checkpoint; return new replicas and the position, read from the file."""
    setup.recorder.emit(
        trace.Saved(
            step=step,
            rank=replicas[0].rank,
            progress=progress_of(replicas[0], position),
            **state_records(setup, replicas[0]),
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint")
        save(path, replicas, position)
        resumed = [build_replica(setup, replica.rank) for replica in replicas]
        position = load(path, setup, resumed)
    for replica in resumed:
        record_start(setup, replica, step, position, resumed=True)
    return resumed, position
