"""Pipeline parallelism by torch's schedules, with data parallelism over groups of ranks.

Each rank of a group holds one or two stages of the model. `options.pp` is the number of ranks in a
group, by default 2. If it does not divide the number of ranks, the largest common divisor is used
for which the model can be cut. `options.schedule` is one of SCHEDULES, by default `1f1b`. The
embedding is also the weight of the output: the first and the last rank each hold a copy.
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
from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.torch import modules, ranks, whole_checkpoint
from entrenar_py.systems.torch.ranks import Rank
from entrenar_py.systems.torch.steps import FiniteGuard, NotFinite, global_batch
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.coordinator import models

# name -> torch's schedule, and its number of stages per rank.
SCHEDULES = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero_bubble": (ScheduleInterleavedZeroBubble, 2),
}
TIED = "embedding.weight"


def run(scenario: Scenario) -> trace.Trace:
    """Train as `scenario` says, each rank in its own process."""
    degree(scenario, scenario.world_size)
    return ranks.run(scenario, group_size=degree, in_stages=True)


# --- how the model is cut ---------------------------------------------------------------------


def degree(scenario: Scenario, world_size: int) -> int:
    """Return the number of ranks in a group; raise UsageError for an impossible pp or schedule."""
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
            f"option pp={size} on system pipeline_parallel: {scenario.workload} can't be cut "
            f"into so many stages with trainable weights for schedule {name}; use fewer ranks, "
            "or another schedule"
        )
    return max(n for n in possible if math.gcd(size, world_size) % n == 0)


def stages_of(scenario: Scenario, size: int) -> list[list[range]]:
    """Return the stages of each of `size` ranks, as ranges of the model's units.

    Consecutive stages are on consecutive ranks: 0, 1, ..., 0, 1, ...
    """
    per_rank = SCHEDULES[scenario.options.get("schedule", "1f1b")][1] if size > 1 else 1
    cuts = sharding.cut(range(modules.num_units(scenario)), size * per_rank)
    return [[range(c[0], c[-1] + 1) if c else range(0) for c in cuts[i::size]] for i in range(size)]


def _can_share(scenario: Scenario, size: int) -> bool:
    """Return whether no stage is empty, and each of `size` ranks has something to train."""
    stages = stages_of(scenario, size)
    adapters_only = scenario.workload == "decoder"  # in attention, which is every second unit
    return all(all(own) for own in stages) and all(
        not adapters_only or any(unit % 2 == 0 for stage in own for unit in stage) for own in stages
    )


class Stage(nn.Module):
    """Some units of a rank's model."""

    def __init__(self, model: modules.Layers, units: range) -> None:
        super().__init__()
        self.model, self._units = model, units

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the stage's units."""
        out: Tensor = self.model(x, units=self._units)
        return out


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A rank's part of the pipeline. `mesh` has the axes dp and pp.

    Each input has `num_rows` rows, with padding for missing samples: buffers have a fixed size.
    `ends` is the process group of the first and the last rank of the pipeline.
    """

    mesh: DeviceMesh
    ends: dist.ProcessGroup
    model: modules.Layers
    data: modules.Data
    schedule: ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble
    num_rows: int

    @property
    def index(self) -> int:
        """The index of this rank in its group."""
        return self.mesh.get_local_rank("pp")

    @property
    def size(self) -> int:
        """The number of ranks in a group."""
        return self.mesh["pp"].size()

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this rank trains, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def counted(self) -> Iterable[Tensor]:
        """Yield this rank's gradients that enter the norm; of tied copies only the first counts."""
        for name, parameter in self.trainable().items():
            if parameter.grad is not None and (name != TIED or self.index == 0):
                yield parameter.grad


def build(rank: Rank) -> Pipeline:
    """Build this rank's part of the model, and the schedule by which it computes."""
    scenario, size = rank.scenario, degree(rank.scenario, rank.world_size)
    shape = (rank.world_size // size, size)
    mesh = init_device_mesh(rank.device.type, shape, mesh_dim_names=("dp", "pp"))
    cuts = stages_of(scenario, size)
    index, own = mesh.get_local_rank("pp"), cuts[mesh.get_local_rank("pp")]
    model = modules.build(scenario, [unit for units in own for unit in units])
    model.to(rank.device)
    data = modules.Data(scenario, rank.device)
    # One micro-batch per rank is enough for every schedule. `accumulation` comes on top of it.
    num_rows = -(-scenario.batch_size // (shape[0] * scenario.accumulation * size))
    stages = [
        PipelineStage(
            Stage(model, units),
            index + turn * size,
            len(own) * size,
            rank.device,
            # Given here, because torch's shape inference runs a forward pass, which draws dropout.
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
        scale_grads=False,  # the loss is a sum, which `reduce` divides by the batch's weight
    )
    return Pipeline(
        mesh=mesh,
        ends=_ends(mesh),
        model=model,
        data=data,
        schedule=schedule,
        num_rows=num_rows * size,
    )


def loss_sum(model: modules.Layers, scores: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss, 0-d. Padding rows add 0, or NaN if their scores are not finite."""
    return model.loss_sum(scores, targets) + 0 * scores.sum()


def _ends(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of this pipeline's first and last rank. All ranks create all such groups."""
    rows = mesh.mesh.tolist()
    groups: list[dist.ProcessGroup] = [dist.new_group(sorted({row[0], row[-1]})) for row in rows]
    return groups[mesh.get_local_rank("dp")]


# --- the training loop ------------------------------------------------------------------------


def train(rank: Rank) -> None:
    """Train one rank, from its start or the last checkpoint to its last step.

    Raises NotFinite if a loss or a gradient is not finite.
    """
    scenario = rank.scenario
    torch.manual_seed(rank.seed)  # for dropout, different on every rank
    pipeline = build(rank)
    model, trainable = pipeline.model, pipeline.trainable()
    optimizer = modules.optimizer_of(scenario, model)
    scheduler = modules.scheduler_of(scenario, optimizer)
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
            # The whole step of a pipeline is recorded as one micro-batch.
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
    """Leave this rank's gradient of the loss, summed over `parts`, in `.grad`.

    Each part goes through the pipeline in micro-batches.
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
    """Sum gradients over copies and groups, and divide them by the global batch's `weight`."""
    trainable = pipeline.trainable()
    for parameter in trainable.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    add_copies(pipeline, trainable)
    for parameter in trainable.values():
        dist.all_reduce(parameter.grad, group=pipeline.mesh["dp"].get_group())
        parameter.grad.div_(weight)  # type: ignore[union-attr]


def add_copies(pipeline: Pipeline, trainable: Mapping[str, nn.Parameter]) -> None:
    """Add the gradients of the tied tensor's two copies, in the first and the last stage.

    This comes before the sum over groups, after which all copies of all groups are equal.
    """
    if TIED in trainable and pipeline.size > 1:
        dist.all_reduce(trainable[TIED].grad, group=pipeline.ends)


def clip(pipeline: Pipeline, clip_norm: float | None) -> None:
    """Clip all gradients, in place, by their float64 norm over all stages."""
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
