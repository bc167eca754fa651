"""DiLoCo (Douillard et al. 2023, arXiv:2311.08105), a local SGD: gloo on the CPU, NCCL on GPUs.

In a round, each worker takes a number of steps on its own; its optimizer keeps its state across
rounds. Then one Nesterov step is applied to the outer weights, which are the same on all workers,
along the mean change of the workers' weights. Every worker continues from the new outer weights.
This takes one all-reduce per round. If a worker dies, its round is lost. A worker that joins gets
the outer weights and their momentum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

import entrenar_py
from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.workers import Outer
from entrenar_py.systems.torch import ddp, modules, ranks
from entrenar_py.systems.torch.ranks import Rank
from entrenar_py.systems.torch.steps import FiniteGuard, NotFinite, global_batch
from entrenar_py.train.arithmetic import sharding


def run(scenario: Scenario) -> trace.Trace:
    """Train as `scenario` says, each worker in its own process."""
    Outer.of(scenario.options)  # raises at once if an option is out of range
    return replace(ranks.run(scenario), promises=("rounds",))


@dataclass(frozen=True)
class Bad:
    """A non-finite value that one worker detected, with its step and samples."""

    step: int
    ids: tuple[int, ...]
    error: NotFinite


@dataclass
class Round:
    """A worker's position: `step` is its next step, `begun` the first step of the round.

    The global batch is divided among `members`, including a worker that died in this round: the
    other workers learn of that only when the round is over. `weight` is the weight of the worker's
    samples in this round.
    """

    members: tuple[int, ...]
    step: int = 0
    begun: int = 0
    weight: float = 0.0
    position: sharding.Position = field(default_factory=sharding.Position)


class Worker:
    """The state of one worker: its own model, and the outer weights, equal on all workers."""

    def __init__(self, rank: Rank) -> None:
        scenario = rank.scenario
        self.rank = rank
        self.rule = Outer.of(scenario.options)
        self.model = modules.Model(scenario).to(rank.device)
        self.inner = modules.optimizer_of(scenario, self.model)
        self.scheduler = modules.scheduler_of(scenario, self.inner)
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.outer = {name: p.detach().clone() for name, p in self.trained.items()}
        self.averaged = {name: one.clone() for name, one in self.model.named_buffers()}
        self.outer_optimizer = outer_optimizer_of(self.rule, list(self.outer.values()))
        self.round = Round(members=rank.workers)


def outer_optimizer_of(rule: Outer, weights: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return SGD with Nesterov momentum over the rounds; all workers keep equal copies of it."""
    return torch.optim.SGD(
        weights,
        lr=rule.outer_learning_rate,
        momentum=rule.outer_momentum,
        nesterov=rule.outer_momentum > 0,
    )


def train(rank: Rank) -> None:
    """Train one worker, from its start or its checkpoint to its last step.

    Raises NotFinite if a loss or a gradient is not finite.
    """
    torch.manual_seed(rank.seed)  # for dropout, different on every worker
    worker = Worker(rank)
    begin(worker)
    obs = entrenar_py.observe(worker.model, worker.inner, step=worker.round.step)
    # After observe: hooks run in the order of registration, and observe plants the faults.
    guard = FiniteGuard(worker.trained)
    bad: Bad | None = None
    while True:
        if is_due(worker):
            if not synchronise(worker):
                halt(obs, bad)
            obs.synchronised(worker.outer_optimizer, worker.outer)
            save(worker)
        if worker.round.step >= rank.until:
            break
        bad = inner_step(worker, guard, obs)
        save(worker)
    if worker.round.step > worker.round.begun and average([torch.zeros(1)], worker) is None:
        halt(obs, bad)  # a worker has found a bad value in the unfinished last round
    obs.close()


# --- inner steps ------------------------------------------------------------------------------


def inner_step(worker: Worker, guard: FiniteGuard, obs: entrenar_py.Observation) -> Bad | None:
    """Take one step of this worker's optimizer with the mean gradient of its own samples.

    If a value is not finite, return it without a step, and end the round for this worker. The other
    workers learn of the value at the end of their round.
    """
    now, scenario = worker.round, worker.rank.scenario
    own = samples(worker)
    ids = [i for part in own for i in part]
    weight = worker.model.count(ids)
    worker.inner.zero_grad()
    for part in own:
        obs.samples(part, epoch=worker.round.position.epoch)
        # A worker without samples takes the step, too, with a loss of zero.
        loss = worker.model(part) if part else worker.model([0]) * 0
        guard.begin(loss)
        count = worker.model.count(part)
        obs.loss(loss.detach() / max(count, 1.0), count)
        (loss / max(weight, 1.0)).backward()
    error = guard.found(worker.rank.index)
    if error is not None:
        bad = Bad(now.step, tuple(own[error.micro]), error)
        end = worker.rule.round_end(now.step, scenario.num_steps)
        now.step, now.weight = min(end, worker.rank.until), math.nan
        return bad
    obs.reduced()
    if ids:  # by this worker's own batch: running means are averaged with the weights
        worker.model.move_buffers(worker.model.statistics(ids), len(ids))
    clip(worker)
    worker.inner.step()
    worker.scheduler.step()
    drawn = len(global_batch(scenario, now.position))
    now.position = sharding.advance(now.position, drawn, scenario.num_samples)
    now.weight += weight
    now.step += 1
    return None


def samples(worker: Worker) -> list[sharding.Ids]:
    """Return this worker's part of the global batch, in micro-batches; some may be empty."""
    ids = global_batch(worker.rank.scenario, worker.round.position)
    members = worker.round.members
    local = sharding.cut(ids, len(members))[members.index(worker.rank.worker)]
    return sharding.cut(local, worker.rank.scenario.accumulation)


def clip(worker: Worker) -> None:
    """Clip this worker's gradient, in place, by its own norm."""
    ddp.clip(worker.rank.scenario, worker.model)


# --- outer steps ------------------------------------------------------------------------------


def is_due(worker: Worker) -> bool:
    """Return whether a round is over and its outer step is still due."""
    now, num_steps = worker.round, worker.rank.scenario.num_steps
    return now.step > now.begun and worker.rule.ends_round(now.step - 1, num_steps)


@torch.no_grad()
def synchronise(worker: Worker) -> bool:
    """Take the outer step along the mean pseudo-gradient, and continue from the outer weights.

    Returns False, without a step, if a worker has detected a non-finite value.
    """
    buffers = dict(worker.model.named_buffers())
    mean = average([*pseudo_gradient(worker), *buffers.values()], worker)
    if mean is None:
        return False
    outer_step(worker, mean[: len(worker.outer)])
    for buffer, value in zip(buffers.values(), mean[len(worker.outer) :], strict=True):
        buffer.copy_(value)
    worker.averaged = {name: buffer.clone() for name, buffer in buffers.items()}
    go_on_from_outer(worker)
    now = worker.round
    now.members, now.begun, now.weight = worker.rank.workers, now.step, 0.0
    return True


def pseudo_gradient(worker: Worker) -> list[Tensor]:
    """Return the outer weights minus this worker's weights, per tensor."""
    return [outer - worker.trained[name].detach() for name, outer in worker.outer.items()]


def average(tensors: Sequence[Tensor], worker: Worker) -> list[Tensor] | None:
    """Return the mean of `tensors` over all workers, weighted by samples, by one all-reduce.

    Returns None if a worker's weight is NaN, which means that it detected a non-finite value.
    """
    weight = worker.round.weight
    device = worker.rank.device
    parts = [tensor.to(device, torch.float32).reshape(-1) * weight for tensor in tensors]
    flat = torch.cat([*parts, parts[0].new_tensor([weight])])
    dist.all_reduce(flat)
    if bool(flat[-1].isnan()):
        return None
    means = (flat[:-1] / flat[-1]).split_with_sizes([tensor.numel() for tensor in tensors])
    return [
        mean.view_as(tensor).to(tensor.dtype) for mean, tensor in zip(means, tensors, strict=True)
    ]


def outer_step(worker: Worker, gradient: Sequence[Tensor]) -> None:
    """Update the outer weights along `gradient` with the outer optimizer."""
    for outer, mean in zip(worker.outer.values(), gradient, strict=True):
        outer.grad = mean
    worker.outer_optimizer.step()


def go_on_from_outer(worker: Worker) -> None:
    """Copy the outer weights to the worker's model; the inner optimizer keeps its state."""
    for name, outer in worker.outer.items():
        worker.trained[name].copy_(outer)


def halt(obs: entrenar_py.Observation, own: Bad | None) -> NoReturn:
    """Raise NotFinite on every worker, for the bad value that was found in the earliest step."""
    own_place = own and (own.step, own.ids, own.error.rank, own.error.micro, own.error.tensor)
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, own_place)
    step, ids, *place = min((one for one in places if one), key=lambda one: one[0])
    error = NotFinite(*place)
    obs.halted(str(error), step=step, ids=ids, **error.place)
    raise error


# --- start, resume and join -------------------------------------------------------------------


def begin(worker: Worker) -> None:
    """Load the worker's own checkpoint; if it has none, take another worker's outer state."""
    rank = worker.rank
    own = load(worker)
    holders: list[Any] = [None] * rank.world_size
    dist.all_gather_object(holders, own or (rank.life == 0 and rank.index == 0))
    if not all(holders):
        source = holders.index(True)
        state: list[Any] = [outer_state(worker) if rank.index == source else None]
        dist.broadcast_object_list(state, source, device=rank.device)
        if not holders[rank.index]:
            welcome(worker, state[0])
    now = worker.round
    now.members = tuple(sorted({*now.members, *rank.workers}))
    save(worker)


def outer_state(worker: Worker) -> dict[str, Any]:
    """Return the state that is equal on all workers, and that a joining worker receives."""
    now, states = worker.round, worker.outer_optimizer.state
    momentum = {
        name: states[outer]["momentum_buffer"]
        for name, outer in worker.outer.items()
        if "momentum_buffer" in states[outer]  # none before the first outer step
    }
    return {
        "weights": on_cpu(worker.outer),
        "buffers": on_cpu(worker.averaged),
        "momentum": on_cpu(momentum),
        "scheduler": worker.scheduler.state_dict(),
        "round": (now.members, now.step, now.begun, now.position.epoch, now.position.offset),
    }


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU, which any rank can read."""
    return {name: one.detach().cpu().clone() for name, one in tensors.items()}


@torch.no_grad()
def take(worker: Worker, state: dict[str, Any]) -> None:
    """Set the worker's outer state to `state`, and leave its own model unchanged."""
    for name, outer in worker.outer.items():
        outer.copy_(state["weights"][name])
    worker.averaged = {name: one.to(worker.rank.device) for name, one in state["buffers"].items()}
    for name, momentum in state["momentum"].items():
        kept = worker.outer_optimizer.state[worker.outer[name]]
        kept["momentum_buffer"] = momentum.to(worker.rank.device)
    worker.scheduler.load_state_dict(state["scheduler"])
    members, step, begun, epoch, offset = state["round"]
    worker.round = Round(members, step, begun, 0.0, sharding.Position(epoch, offset))


@torch.no_grad()
def welcome(worker: Worker, state: dict[str, Any]) -> None:
    """Start a joining worker from the outer weights and momentum, with a new inner optimizer."""
    take(worker, state)
    go_on_from_outer(worker)
    for name, buffer in worker.model.named_buffers():
        buffer.copy_(worker.averaged[name])
    rates = worker.scheduler.get_last_lr()
    for group, rate in zip(worker.inner.param_groups, rates, strict=True):
        group["lr"] = rate


def checkpoint(rank: Rank) -> Path:
    """Return the path of this worker's checkpoint: each has one, because their weights differ."""
    return rank.checkpoint.with_name(f"{rank.checkpoint.name}-{rank.worker}")


def save(worker: Worker) -> None:
    """Write this worker's state for a resume, without communication."""
    if not worker.rank.saves:
        return
    content: dict[str, Any] = {
        "life": worker.rank.life,
        "outer": outer_state(worker),
        "weight": worker.round.weight,
        "model": worker.model.state_dict(),
        "inner": worker.inner.state_dict(),
        "random": worker.rank.random_states(),
    }
    ranks.write(checkpoint(worker.rank), content)


def load(worker: Worker) -> bool:
    """Restore the worker from the checkpoint of its previous life; return False without one."""
    rank = worker.rank
    if not rank.resumes or not checkpoint(rank).exists():
        return False
    saved = torch.load(checkpoint(rank), map_location=rank.device, weights_only=True)
    if saved["life"] != rank.life - 1:  # the worker was absent in the last life
        return False
    take(worker, saved["outer"])
    worker.round.weight = saved["weight"]
    worker.model.load_state_dict(saved["model"])
    worker.inner.load_state_dict(saved["inner"])
    rank.restore_random(saved["random"])
    return True
