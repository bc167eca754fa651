"""Pipeline parallelism by torch's schedules, beside data parallelism: each rank of a group holds a
stage of the model (or two of them) and computes micro-batches as they come.

`options.pp` is the number of ranks in a group (2), `options.schedule` one of SCHEDULES (`1f1b`). Of
a world that it does not divide, and of a model that can't be cut so often, it is the largest number
that does. The embedding is the output's weight, too: the first and the last rank hold a copy each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import entrenar_py
from entrenar_py import trace
from entrenar_py.errors import UsageError
from entrenar_py.scenario import Scenario
from entrenar_py.systems import models
from entrenar_py.systems.torch import ranks, whole_checkpoint, workload_layers, workload_module
from entrenar_py.systems.torch.batches import global_batch
from entrenar_py.systems.torch.finite_guard import FiniteGuard, NotFinite
from entrenar_py.systems.torch.ranks import Rank
from entrenar_py.training import sharding

# name -> torch's schedule, and how many stages a rank has in it.
SCHEDULES = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero_bubble": (ScheduleInterleavedZeroBubble, 2),
}
TIED = "embedding.weight"


def run(scenario: Scenario) -> trace.Trace:
    """Trains as `scenario` says, each rank a process of its own."""
    degree(scenario, scenario.world_size)
    return ranks.run(scenario, group_size=degree, in_stages=True)


# --- how the model is cut ---------------------------------------------------------------------


def degree(scenario: Scenario, world_size: int) -> int:
    """Return how many ranks share the model; UsageError for a schedule, and for a number of ranks,
    that there can't be.
    """
    size, name = scenario.options.get("pp"), scenario.options.get("schedule", "1f1b")
    if name not in SCHEDULES:
        raise UsageError(
            f"option schedule={name!r} on system pipeline_parallel: allowed are "
            f"{', '.join(SCHEDULES)}"
        )
    possible = [n for n in range(1, world_size + 1) if n == 1 or _can_share(scenario, n)]
    if size is None:
        return max(n for n in possible if math.gcd(2, world_size) % n == 0)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UsageError(f"option pp={size!r} on system pipeline_parallel: use a number of ranks")
    if size > 1 and not _can_share(scenario, size):
        raise UsageError(
            f"option pp={size} on system pipeline_parallel: {scenario.workload} can't be cut into "
            f"stages for schedule {name} that train each; use fewer ranks, or another schedule"
        )
    return max(n for n in possible if math.gcd(size, world_size) % n == 0)


def stages_of(scenario: Scenario, size: int) -> list[list[range]]:
    """Return the stages of each of `size` ranks, which are units of the model: 0, 1, .. 0, 1, .."""
    per_rank = SCHEDULES[scenario.options.get("schedule", "1f1b")][1] if size > 1 else 1
    cuts = sharding.cut(range(workload_layers.num_units(scenario)), size * per_rank)
    return [[range(c[0], c[-1] + 1) if c else range(0) for c in cuts[i::size]] for i in range(size)]


def _can_share(scenario: Scenario, size: int) -> bool:
    """Return whether each stage holds something, and each of `size` ranks something to train."""
    stages = stages_of(scenario, size)
    adapters_only = scenario.workload == "decoder"  # in attention, which is every second unit
    return all(all(own) for own in stages) and all(
        not adapters_only or any(unit % 2 == 0 for stage in own for unit in stage) for own in stages
    )


class Stage(nn.Module):
    """Some units of a rank's model."""

    def __init__(self, model: workload_layers.Layers, units: range) -> None:
        super().__init__()
        self.model, self._units = model, units

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes out of the units."""
        out: Tensor = self.model(x, units=self._units)
        return out


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A rank's part of the pipeline: its `mesh` has axes dp and pp, what goes in at once has
    `num_rows`, whatever the number of samples, since buffers are of one size. `ends` are the first
    and the last rank of its group.
    """

    mesh: DeviceMesh
    ends: dist.ProcessGroup
    model: workload_layers.Layers
    data: workload_layers.Data
    schedule: ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble
    num_rows: int

    @property
    def index(self) -> int:
        """Its rank in its group."""
        return self.mesh.get_local_rank("pp")

    @property
    def size(self) -> int:
        """The number of ranks in a group."""
        return self.mesh["pp"].size()

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank trains."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def counted(self) -> Iterable[Tensor]:
        """The gradients of which the norm is made: of copies the first one's."""
        for name, parameter in self.trainable().items():
            if parameter.grad is not None and (name != TIED or self.index == 0):
                yield parameter.grad


def build(rank: Rank) -> Pipeline:
    """The part of the model that this rank holds, and the schedule by which it computes."""
    scenario, size = rank.scenario, degree(rank.scenario, rank.world_size)
    shape = (rank.world_size // size, size)
    mesh = init_device_mesh(rank.device.type, shape, mesh_dim_names=("dp", "pp"))
    cuts = stages_of(scenario, size)
    index, own = mesh.get_local_rank("pp"), cuts[mesh.get_local_rank("pp")]
    model = workload_layers.build(scenario, [unit for units in own for unit in units])
    model.to(rank.device)
    data = workload_layers.Data(scenario, rank.device)
    # As many micro-batches as ranks are enough to show the order; `accumulation` is apart from it.
    num_rows = -(-scenario.batch_size // (shape[0] * scenario.accumulation * size))
    stages = [
        PipelineStage(
            Stage(model, units),
            index + turn * size,
            len(own) * size,
            rank.device,
            # Said, not found out: a first forward pass that only looks would draw dropout, too.
            input_args=data.example(units[0], num_rows),
            output_args=data.example(units[-1] + 1, num_rows),
            group=mesh["pp"].get_group(),
        )
        for turn, units in enumerate(own)
    ]
    kind = SCHEDULES[scenario.options.get("schedule", "1f1b")][0] if size > 1 else ScheduleGPipe
    schedule = kind(
        stages if len(stages) > 1 else stages[0],
        size,
        loss_fn=partial(loss_sum, model),
        scale_grads=False,  # the loss is a sum: it is divided once, by what the batch counts
    )
    return Pipeline(
        mesh=mesh,
        ends=_ends(mesh),
        model=model,
        data=data,
        schedule=schedule,
        num_rows=num_rows * size,
    )


def loss_sum(model: workload_layers.Layers, scores: Tensor, targets: Tensor) -> Tensor:
    """0-d. Rows that are there to fill a buffer count nothing, but what is not finite in them shows
    as it does in all others.
    """
    return model.loss_sum(scores, targets) + 0 * scores.sum()


def _ends(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The first and the last rank of this rank's group; every rank makes all of them."""
    rows = mesh.mesh.tolist()
    made: list[dist.ProcessGroup] = [dist.new_group(sorted({row[0], row[-1]})) for row in rows]
    return made[mesh.get_local_rank("dp")]


# --- the training loop ------------------------------------------------------------------------


def train(rank: Rank) -> None:
    """Train one rank, from its start or the last checkpoint to its last step.

    Raises NotFinite where that is why training stops.
    """
    scenario = rank.scenario
    torch.manual_seed(rank.seed)  # dropout's: another on every rank
    pipeline = build(rank)
    model, trainable = pipeline.model, pipeline.trainable()
    optimizer = workload_module.optimizer_of(scenario, model)
    scheduler = workload_module.scheduler_of(scenario, optimizer)
    position, step = sharding.Position(), 0
    if rank.resumes:
        position, step = whole_checkpoint.load(rank, model, optimizer, scheduler)
    elif rank.saves:
        whole_checkpoint.save(rank, model, optimizer, position, step)
    obs = entrenar_py.observe(model, optimizer, step=step, layout=pipeline.mesh)
    names = [one.name for one in models.model_of(scenario).specs if one.role == "trainable"]
    guard = FiniteGuard(trainable, names=names)
    while step < rank.until:
        ids = global_batch(scenario, position)
        groups = sharding.cut(ids, pipeline.mesh["dp"].size())
        parts = sharding.cut(groups[pipeline.mesh.get_local_rank("dp")], scenario.accumulation)
        try:
            compute(pipeline, guard, obs, parts, position.epoch)
            guard.agree()
        except NotFinite as error:
            there = groups[error.rank // pipeline.size]
            # What a pipeline computes in a step is recorded as one micro-batch.
            parts = [there] if pipeline.size > 1 else sharding.cut(there, scenario.accumulation)
            micro = 0 if pipeline.size > 1 else error.micro
            obs.halted(str(error), ids=parts[micro], **{**error.place, "micro_batch": micro})
            raise
        reduce(pipeline, pipeline.data.count(ids))
        obs.reduced()
        pipeline.data.move_buffers(model, ids)
        clip(pipeline, scenario.clip_norm)
        optimizer.step()
        scheduler.step()
        position = sharding.advance(position, len(ids), scenario.num_samples)
        step += 1
        if rank.saves:
            whole_checkpoint.save(rank, model, optimizer, position, step)
    obs.close()


def compute(
    pipeline: Pipeline,
    guard: FiniteGuard,
    obs: entrenar_py.Observation,
    parts: Iterable[sharding.Ids],
    epoch: int,
) -> None:
    """Leaves in `.grad`, of what this rank holds, the gradient of the loss's sum over `parts`, each
    of which goes through the pipeline in micro-batches.
    """
    pipeline.model.zero_grad()
    is_first, is_last = pipeline.index == 0, pipeline.index == pipeline.size - 1
    for part in parts:
        obs.samples(part, epoch=epoch)
        inputs, targets = pipeline.data.batch(part, pipeline.num_rows)
        losses: list[Tensor] = []
        pipeline.schedule.step(
            *([inputs] if is_first else []),
            target=targets if is_last else None,
            losses=losses if is_last else None,
        )
        loss = torch.stack(losses).sum() if is_last else torch.zeros((), device=inputs.device)
        if is_last:
            own = pipeline.data.count(part)
            obs.loss(loss.detach() / max(own, 1.0), own)
        guard.begin(loss)
        guard.look()


def reduce(pipeline: Pipeline, weight: float) -> None:
    """Leaves in `.grad` the mean over a global batch that counts `weight`, on whoever holds it."""
    trainable = pipeline.trainable()
    for parameter in trainable.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    add_copies(pipeline, trainable)
    for parameter in trainable.values():
        dist.all_reduce(parameter.grad, group=pipeline.mesh["dp"].get_group())
        parameter.grad.div_(weight)  # type: ignore[union-attr]


def add_copies(pipeline: Pipeline, trainable: Mapping[str, nn.Parameter]) -> None:
    """Adds the gradients of the tied tensor's copies: of its uses in the first and the last stage.

    Before the sum over groups: all copies of all groups are then the same.
    """
    if TIED in trainable and pipeline.size > 1:
        dist.all_reduce(trainable[TIED].grad, group=pipeline.ends)


def clip(pipeline: Pipeline, clip_norm: float | None) -> None:
    """Scales all gradients, in place, by the norm over all stages, in float64."""
    if clip_norm is None:
        return
    squares = torch.zeros((), dtype=torch.float64, device=pipeline.data.device)
    for gradient in pipeline.counted():
        squares += gradient.double().square().sum()
    dist.all_reduce(squares, group=pipeline.mesh["pp"].get_group())
    factor = (clip_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for parameter in pipeline.trainable().values():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.dtype))
