"""One rank of the textbook trainer: builds, saves, restores and records it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic import checkpoint, sharding
from entrenar_py.train.arithmetic import optimizer as rules
from entrenar_py.train.arithmetic.tensors import Workload
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
        path,
        checkpoint.as_arrays(tensors=arrays, optimizer=optimizer_arrays(first)),
        progress,
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
    """Set the scheduler to `schedule_step`, and the optimizer to the learning rate there."""
    scheduler = replica.scheduler
    scheduler.last_epoch = schedule_step
    groups = replica.optimizer.param_groups
    for group, peak, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = peak * factor(schedule_step)


def rng_state(replica: Replica) -> dict[str, Any]:
    """Return the rank's random state in a form that JSON can hold."""
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
    setup: Setup,
    replica: Replica,
    step: int,
    position: sharding.Position,
    *,
    resumed: bool = False,
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
