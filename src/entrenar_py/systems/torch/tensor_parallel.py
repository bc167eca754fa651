"""Tensor parallelism by `parallelize_module`, with data parallelism over groups of ranks.

The ranks of a group share each layer and compute the same batch. Groups hold copies of the model
and compute different batches. `options.tp` is the size of a group, by default 2; it is reduced to
its greatest common divisor with the number of ranks. The checkpoint holds whole tensors, so that
any number of ranks can resume from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import entrenar_py
from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.torch import modules, ranks, whole_checkpoint
from entrenar_py.systems.torch.ranks import Rank
from entrenar_py.systems.torch.steps import FiniteGuard, NotFinite, global_batch
from entrenar_py.train.arithmetic import decoder, sharding

Parallelize = Callable[[modules.Layers, DeviceMesh], None]


def run(scenario: Scenario) -> trace.Trace:
    """Train as `scenario` says, each rank in its own process."""
    degree(scenario, scenario.world_size)
    return ranks.run(scenario, group_size=degree)


def train(rank: Rank) -> None:
    """Train one rank, from its start or the last checkpoint to its last step."""
    by_sequence = rank.scenario.system == "sequence_parallel"
    train_with(rank, parallelize_sequences if by_sequence else parallelize)


def degree(scenario: Scenario, world_size: int) -> int:
    """Return how many ranks share a layer; raise UsageError if they can't share heads evenly."""
    size = scenario.options.get("tp", 2)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UsageError(f"option tp={size!r} on system {scenario.system}: use a number of ranks")
    if scenario.workload.startswith("decoder") and decoder.NUM_KV_HEADS % size:
        raise UsageError(
            f"option tp={size} on system {scenario.system}: {scenario.workload} has "
            f"{decoder.NUM_KV_HEADS} key-value heads; use a number that divides them"
        )
    return math.gcd(size, world_size)


# --- how the model is cut ---------------------------------------------------------------------


def parallelize(model: modules.Layers, mesh: DeviceMesh) -> None:
    """Cut `model`, in place, over the ranks of `mesh`.

    The first layer of each pair is cut by columns, the second by rows. This needs one all-reduce
    after the second layer, and one of the gradient before the first. The embedding, which is also
    the weight of the output, is cut by the vocabulary.
    """
    if isinstance(model, modules.Classifier):
        # Dropout between the layers is drawn for the whole output, the same on all ranks.
        whole = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh, dict.fromkeys(("hidden1", "hidden2", "output"), whole))
    elif isinstance(model, modules.Decoder):
        parallelize_module(
            model,
            mesh,
            {
                "embedding": RowwiseParallel(input_layouts=Replicate()),
                "blocks.*.attention_norm": Replicated(),
                "blocks.*.attention.q": AdaptedColwise(),
                "blocks.*.attention.k": ColwiseParallel(),
                "blocks.*.attention.v": AdaptedColwise(),
                "blocks.*.attention.o": RowwiseParallel(),
                "blocks.*.mlp_norm": Replicated(),
                "blocks.*.mlp.gate": ColwiseParallel(),
                "blocks.*.mlp.up": ColwiseParallel(),
                "blocks.*.mlp.down": RowwiseParallel(),
                "norm": Replicated(),
                "head": PrepareModuleInputOutput(
                    input_layouts=(Replicate(), None),
                    desired_input_layouts=(Replicate(), None),
                    output_layouts=Shard(-1),
                    desired_output_layouts=Replicate(),
                ),
            },
        )


class AdaptedColwise(ColwiseParallel):
    """Cuts a layer with an adapter by columns: the small A is replicated, B is cut like W."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            placement = Replicate() if key == "lora_a" else Shard(0)
            cut = distribute_tensor(parameter.detach(), device_mesh, [placement])
            module.register_parameter(key, nn.Parameter(cut))


class Replicated(ParallelStyle):
    """A parallel style that replicates a module.

    Its parameters become DTensors like all others, because the optimizer's multi-tensor kernels
    can't mix DTensors with plain tensors.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            input_fn=lambda _, inputs, mesh: tuple(  # type: ignore[arg-type]
                DTensor.from_local(one, mesh, [Replicate()], run_check=False) for one in inputs
            ),
            output_fn=lambda _, output, mesh: output.to_local(),
        )


def parallelize_sequences(model: modules.Layers, mesh: DeviceMesh) -> None:
    """Cut `model`, in place, over the ranks of `mesh`, and each sequence between the cut layers.

    Between the cut layers, each rank holds a part of each sequence: a reduce-scatter and an
    all-gather replace each all-reduce. The traffic is the same, and norms and residuals take 1/tp
    of the memory and the time. A model without sequences is cut by `parallelize`. A norm's gradient
    on a rank covers only its part of the sequence; `add_terms` sums over ranks.
    """
    if not isinstance(model, modules.Decoder):
        parallelize(model, mesh)
        return
    part, whole = Shard(1), Replicate()  # of [n, t, d]
    # One gather serves all layers that read the input. Their gradients are added, then scattered.
    gather = PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,))
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=whole, output_layouts=part),
            "blocks.*.attention_norm": SequenceParallel(),
            "blocks.*.attention": gather,
            "blocks.*.attention.q": AdaptedColwise(),
            "blocks.*.attention.k": ColwiseParallel(),
            "blocks.*.attention.v": AdaptedColwise(),
            "blocks.*.attention.o": RowwiseParallel(output_layouts=part),
            "blocks.*.mlp_norm": SequenceParallel(),
            "blocks.*.mlp": gather,
            "blocks.*.mlp.gate": ColwiseParallel(),
            "blocks.*.mlp.up": ColwiseParallel(),
            "blocks.*.mlp.down": RowwiseParallel(output_layouts=part),
            "norm": SequenceParallel(),
            "head": PrepareModuleInputOutput(
                input_layouts=(part, None),
                desired_input_layouts=(whole, None),
                output_layouts=Shard(-1),
                desired_output_layouts=whole,
            ),
        },
    )


def cut_model(
    model: modules.Layers, mesh: DeviceMesh, parallelize: Parallelize
) -> list[nn.Parameter]:
    """Cut `model`, in place; return its trainable parameters."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    parallelize(model, mesh)
    for name, parameter in model.named_parameters():
        # Parallel styles create new parameters, which are all trainable.
        parameter.requires_grad_(name not in frozen)
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        if isinstance(parameter, DTensor) and parameter.placements[0].is_replicate():
            parameter.register_hook(add_terms)  # type: ignore[no-untyped-call]
    return trainable


def add_terms(gradient: Tensor) -> Tensor:
    """Return a replicated parameter's gradient, summed over the group if it is partial.

    It is partial where each rank has only the term from its part of the following layers.
    """
    assert isinstance(gradient, DTensor)
    return gradient.redistribute(placements=[Replicate()])


# --- the training loop ------------------------------------------------------------------------


def train_with(rank: Rank, parallelize: Parallelize) -> None:
    """Train one rank, its model cut by `parallelize`; raise NotFinite for a non-finite value."""
    scenario, size = rank.scenario, degree(rank.scenario, rank.world_size)
    shape = (rank.world_size // size, size)
    mesh = init_device_mesh(rank.device.type, shape, mesh_dim_names=("dp", "tp"))
    place, group = mesh.get_local_rank("dp"), mesh["tp"].get_group()
    # The ranks of a group draw the same dropout; groups differ.
    torch.manual_seed(rank.seed_of(rank.workers[place * size]))
    model = modules.build(scenario).to(rank.device)
    trainable = cut_model(model, mesh["tp"], parallelize)
    data = modules.Data(scenario, rank.device)
    optimizer = modules.optimizer_of(scenario, model)
    scheduler = modules.scheduler_of(scenario, optimizer)
    position, step = sharding.Position(), 0
    if rank.resumes:
        position, step = whole_checkpoint.load(rank, model, optimizer, scheduler)
    elif rank.saves:
        whole_checkpoint.save(rank, model, optimizer, position, step)
    obs = entrenar_py.observe(model, optimizer, step=step, layout=mesh)
    guard = FiniteGuard({n: p for n, p in model.named_parameters() if p.requires_grad})
    while step < rank.until:
        ids = global_batch(scenario, position)
        parts = sharding.cut(local_batch(ids, mesh, place), scenario.accumulation)
        try:
            accumulate(model, data, guard, obs, parts, position.epoch, data.count(ids))
            guard.agree()
        except NotFinite as error:
            there = sharding.cut(local_batch(ids, mesh, error.rank // size), scenario.accumulation)
            obs.halted(str(error), ids=there[error.micro], **error.place)
            raise
        for parameter in trainable:  # over groups; within a group backward has added everything
            dist.all_reduce(local_gradient(parameter), group=mesh["dp"].get_group())
        obs.reduced()
        data.move_buffers(model, ids)
        clip(trainable, scenario.clip_norm, group)
        optimizer.step()
        scheduler.step()
        position = sharding.advance(position, len(ids), scenario.num_samples)
        step += 1
        if rank.saves:
            whole_checkpoint.save(rank, model, optimizer, position, step)
    obs.close()


def local_batch(ids: sharding.Ids, mesh: DeviceMesh, place: int) -> sharding.Ids:
    """Return the part of a global batch that the group of ranks at `place` computes."""
    return sharding.cut(ids, mesh["dp"].size())[place]


def accumulate(
    model: modules.Layers,
    data: modules.Data,
    guard: FiniteGuard,
    obs: entrenar_py.Observation,
    parts: Iterable[sharding.Ids],
    epoch: int,
    weight: float,
) -> None:
    """Leave this group's share of the mean gradient in `.grad`; `weight` is the global batch's."""
    model.zero_grad()
    for part in parts:
        obs.samples(part, epoch=epoch)
        loss = model(*data.batch(part, max(len(part), 1)))
        guard.begin(loss)
        own = data.count(part)
        obs.loss(loss.detach() / max(own, 1.0), own)
        (loss / weight).backward()


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's piece of the gradient, not a copy. A missing gradient becomes zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def norm_l2(trainable: Iterable[nn.Parameter], group: dist.ProcessGroup) -> Tensor:
    """Return the norm of the whole gradient, float64, 0-d.

    The squares of pieces are added over `group`; the squares of copies count once.
    """
    squares: dict[bool, list[Tensor]] = {True: [], False: []}  # sums for pieces and for copies
    for parameter in trainable:
        in_pieces = isinstance(parameter, DTensor) and parameter.placements[0].is_shard()
        squares[in_pieces].append(local_gradient(parameter).double().square().sum())
    zero = torch.zeros_like(next(iter(squares[True] + squares[False])))
    pieces = torch.stack([zero, *squares[True]]).sum()
    dist.all_reduce(pieces, group=group)
    return (pieces + torch.stack([zero, *squares[False]]).sum()).sqrt()


def clip(
    trainable: Iterable[nn.Parameter], clip_norm: float | None, group: dist.ProcessGroup
) -> None:
    """Clip this rank's pieces of the gradient, in place, by the norm of the whole."""
    if clip_norm is None:
        return
    factor = (clip_norm / (norm_l2(trainable, group) + 1e-6)).clamp(max=1.0)
    for parameter in trainable:
        local_gradient(parameter).mul_(factor.to(parameter.dtype))
