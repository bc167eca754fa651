"""Ranks with sharded models: whole tensors are made of their pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor import Shard as Cut
from torch.testing._internal.distributed.fake_pg import FakeStore

from entrenar_py.check.observing import planned_faults, surroundings, tensors
from entrenar_py.check.observing.module_hooks import GradientHooks
from entrenar_py.check.observing.subject import Subject
from entrenar_py.check.rank_files import assembly
from entrenar_py.check.rank_files.layout import Layout, Piece
from entrenar_py.check.rank_files.rank_file import RankTrace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import Shard, Start, Tensors, Update
from tests import traces
from tests.check.command import zygote

BEGIN = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
import entrenar_py
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
"""
# Three rows on two ranks; the bias of one element is on one rank alone. The mesh has no names.
FSDP = """
mesh = init_device_mesh("cpu", (2,))
model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1))
fully_shard(model[0], mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
obs = entrenar_py.observe(model, optimizer)
fully_shard(model, mesh=mesh)
optimizer.param_groups[0]["params"] = list(model.parameters())
for step in range(2):
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        obs.samples([8 * step + 4 * micro + rank])
        loss = model(torch.ones(3, 2) * (rank + step + micro)).square().mean()
        obs.loss(loss, 1)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
obs.close()
"""
# As Lightning arranges and begins it: the root's parameters stay whole after the evaluation.
EVALUATED = """
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
fully_shard(model[0], mesh=mesh["data_parallel"])
fully_shard(model, mesh=mesh["data_parallel"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
with torch.no_grad():
    model(torch.ones(3, 2))
obs = entrenar_py.observe(model, optimizer)
obs.samples([rank])
model(torch.ones(3, 2)).square().mean().backward()
optimizer.step()
obs.close()
"""
# Three rows on two ranks. Only the script's own hook makes the bias's gradient whole.
UNEVEN = """
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
column = ColwiseParallel(output_layouts=Replicate())
parallelize_module(model, mesh, {"0": column, "1": column})
given = {}
for name, parameter in model.named_parameters():
    parameter.register_hook(lambda g, name=name: given.update({name: g.to_local().data_ptr()}))
model[0].bias.register_hook(lambda g: g.redistribute(placements=[Replicate()]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
obs = entrenar_py.observe(model, optimizer)
obs.samples([0, 1, 2])
model(torch.ones(3, 2)).square().mean().backward()
for name, parameter in model.named_parameters():
    if name != "0.bias":
        assert parameter.grad.placements == parameter.placements, name
        assert parameter.grad.to_local().data_ptr() == given[name], name
model[0].bias.grad = model[0].bias.grad.redistribute(placements=model[0].bias.placements)
optimizer.step()
obs.close()
"""
PIPELINE = """
stages = (nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Tanh(), nn.Linear(3, 1)))
stages[1][1].register_parameter("copy", nn.Parameter(stages[0][0].bias.detach().clone()))
model = nn.Module()
model.add_module(str(rank), stages[rank])
model.forward = lambda x: stages[rank](x) + (model.get_submodule("1.1").copy.sum() if rank else 0)
stage = PipelineStage(model, rank, 2, torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
obs = entrenar_py.observe(
    model, optimizer, layout={"pp": 2}, tied=(("0.0.bias", "1.1.copy"),)
)
losses = []
schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().mean())
for step in range(2):
    obs.samples(range(4 * step, 4 * step + 4))
    x = torch.arange(8.0).reshape(4, 2) + step
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x.sum(1, keepdim=True), losses=losses)
        obs.loss(torch.stack(losses).mean(), 4)
    copy = dict(model.named_parameters())[("0.0.bias", "1.1.copy")[rank]]
    dist.all_reduce(copy.grad)
    optimizer.step()
    optimizer.zero_grad()
obs.close()
"""


def recorded(code: str, world_size: int, folder: Path) -> list[RankTrace]:
    """Return each rank's record of a script."""
    script = folder / "script.py"
    script.write_text(BEGIN + code)
    ended = zygote.forked(script, world_size, folder=folder / "ranks")
    assert ended.code == 0, ended.output.read_text()
    ranks, problems = assembly.load(folder / "ranks")
    assert not problems
    return ranks


def sizes(tensors: Tensors) -> dict[str, int]:
    """Return name -> number of known elements."""
    known = {name: one.values() for name, one in tensors.items()}
    return {name: one.size for name, one in known.items() if one is not None}


def test_fully_sharded(tmp_path: Path) -> None:
    """Weights, gradients and moments are whole on each rank.

    That holds for a rank whose piece is empty, too, and if the model is wrapped after `observe`.
    """
    ranks = recorded(FSDP, 2, tmp_path)
    assert ranks[1].pieces["2.bias"].shape == (0,)
    assert ranks[0].layout == Layout(axes={"fsdp": 2})
    events = assembly.ordered(ranks)
    whole = {"0.weight": 6, "0.bias": 3, "2.weight": 3, "2.bias": 1}
    states = [one for one in events if isinstance(one, Start | Update)]
    assert [(one.kind, one.step, one.rank) for one in states] == [
        *(("start", 0, 0), ("start", 0, 1), ("update", 0, 0), ("update", 0, 1)),
        *(("update", 1, 0), ("update", 1, 1)),
    ]
    assert all(sizes(one.weights) == whole for one in states)
    for update in states[2:]:
        assert isinstance(update, Update)
        assert sizes(update.gradient) == whole
        assert sizes(update.optimizer)["2.bias/exp_avg"] == 1
        assert sizes(update.optimizer)["0.bias/step"] == 1
    shards = [one for one in events if isinstance(one, Shard)]
    assert sorted((one.rank, one.step, one.shard, one.ids) for one in shards) == [
        (rank, step, micro, (8 * step + 4 * micro + rank,))
        for rank in range(2)
        for step in range(2)
        for micro in range(2)
    ]
    # What a rank's own pass gave to whole parameters, before it is added up over all ranks.
    last = [one.gradient for one in shards if one.step == 1]
    assert [sizes(gradient) for gradient in last] == [whole] * 4
    applied = states[-1]
    assert isinstance(applied, Update)
    for name, mean in applied.gradient.items():
        terms = [np.array(traces.numbers(gradient[name])) for gradient in last]
        assert np.allclose(sum(terms) / 2, traces.numbers(mean), rtol=1e-5, atol=1e-7)


def test_fully_sharded_after_an_evaluation(tmp_path: Path) -> None:
    """Whole parameters that an evaluation left are observed as the pieces that the optimizer has.

    The one axis of a mesh may have any name.
    """
    ranks = recorded(EVALUATED, 2, tmp_path)
    assert ranks[0].layout == Layout(axes={"fsdp": 2})
    whole = {"0.weight": 6, "0.bias": 3, "1.weight": 3, "1.bias": 1}
    states = [one for one in assembly.ordered(ranks) if isinstance(one, Start | Update)]
    assert [sizes(one.weights) for one in states] == [whole] * 4
    assert isinstance(states[2], Update)
    assert sizes(states[2].gradient) == whole
    assert len(states[2].optimizer) == 3 * len(whole)


def test_pieces_of_different_sizes(tmp_path: Path) -> None:
    """A gradient stays the one that autograd gave, in pieces like its parameter's.

    Autograd copies a gradient that is held, and torch 2.11 copies such pieces into a whole. Of a
    gradient that is whole by other means each rank records its piece.
    """
    events = assembly.ordered(recorded(UNEVEN, 2, tmp_path))
    whole = {"0.weight": 6, "0.bias": 3, "1.weight": 6, "1.bias": 2}
    (computed,) = [one for one in events if isinstance(one, Shard)]
    assert sizes(computed.gradient) == whole
    applied = [one.gradient for one in events if isinstance(one, Update)]
    assert applied == [computed.gradient] * 2


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A process group of four ranks, of which only this one is there."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_copies_on_a_mesh_show_no_layout() -> None:
    """Ranks that keep whole copies may be replicas, or share samples. A cut one shows which."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("workers",))
    model = distribute_module(nn.Linear(2, 4), mesh)
    assert surroundings.read_off(model, 4) is None
    model.bias = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Cut(0)]))
    assert surroundings.read_off(model, 4) == Layout(axes={"tp": 4})


@pytest.mark.usefixtures("four_ranks")
def test_a_mesh_of_this_rank_alone_shows_no_layout() -> None:
    """Ranks that shard over themselves are connected with nobody: that is judged, not refused."""
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("far", "near"))["near"]
    model = nn.Linear(2, 4)
    fully_shard(model, mesh=alone)
    assert surroundings.read_off(model, 4) is None


@pytest.mark.usefixtures("four_ranks")
def test_a_copy_of_a_term_stays_a_term() -> None:
    """A copied gradient has memory of its own, and isn't reduced by that."""
    mesh = init_device_mesh("cpu", (4,))
    term = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    copied = tensors.copied(term)
    assert isinstance(copied, DTensor)
    assert copied.placements == term.placements
    copied.to_local()[0] = 5.0
    assert term.to_local().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.usefixtures("four_ranks")
def test_a_gradient_is_left_as_autograd_gave_it() -> None:
    """A term of a sum stays one: torch 2.11 reduces those that are held when they are left."""
    mesh = init_device_mesh("cpu", (4,))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(5), mesh, [Replicate()]))
    told: list[Sequence[object]] = []
    GradientHooks([parameter], lambda: None, lambda taken: taken, told.append, told.append)
    term = DTensor.from_local(torch.ones(5), mesh, [Partial()])
    given = term.to_local()
    torch.autograd.backward(parameter.clone(), term)
    del term
    assert isinstance(parameter.grad, DTensor)
    assert parameter.grad.placements == (Partial(),)
    (((held,),)) = told
    assert isinstance(held, DTensor)
    assert held.placements == (Partial(),)
    assert held.to_local().data_ptr() != given.data_ptr()


@pytest.mark.usefixtures("four_ranks")
def test_a_fault_strikes_the_piece_of_a_whole_gradient() -> None:
    """An element is struck where this rank's piece has it, and the first one is the piece's."""
    mesh = init_device_mesh("cpu", (4,))
    whole = DTensor.from_local(torch.ones(6, 2), mesh, [Replicate()], run_check=False)
    in_pieces = DTensor.from_local(
        torch.ones(2, 2), mesh, [Cut(0)], run_check=False, shape=torch.Size([6, 2]), stride=(2, 1)
    )
    piece = Piece(offset=(2, 0), shape=(2, 2), whole=(6, 2), ranks=(0, 1, 2))
    subject = cast("Subject", SimpleNamespace(pieces={"w": piece}))

    def struck(element: int | None, gradient: DTensor) -> tuple[int, ...] | None:
        fault = Fault(kind="non_finite_gradient", step=0, value="nan", element=element)
        return planned_faults._element(subject, "w", fault, gradient)

    assert [struck(n, whole) for n in (None, 3, 5, 8, 12)] == [(2, 0), None, (2, 1), None, None]
    assert [struck(n, in_pieces) for n in (None, 3, 5, 8)] == [(0, 0), None, (0, 1), None]


@pytest.mark.usefixtures("four_ranks")
def test_meshes_made_of_one_another() -> None:
    """A mesh made of one whose name tells nothing counts itself, if it has all ranks.

    One whose only axis has a name of the script's own counts as `fsdp` if it was fully sharded.
    """
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (1, 2, 2), ("pp", "dp_replicate", "fsdp"))
    for mesh, axes in (
        (dense["dp_replicate", "fsdp"], {"dp_replicate": 2, "fsdp": 2}),
        (world, {"fsdp": 4}),
    ):
        model = nn.Linear(2, 4)
        fully_shard(model, mesh=mesh)
        assert surroundings.read_off(model, 4) == Layout(axes=axes)
    part = nn.Linear(2, 4)
    fully_shard(part, mesh=dense["fsdp"])
    with pytest.raises(UsageError, match="does not show how all 4 ranks are arranged"):
        surroundings.read_off(part, 4)
    hybrid = nn.Linear(2, 4)
    fully_shard(hybrid, mesh=world._unflatten(0, (2, 2), ("far", "near")))
    assert surroundings.read_off(hybrid, 4) == Layout(axes={"dp_replicate": 2, "dp_shard": 2})
    named = world._unflatten(0, (2, 2), ("there", "here"))
    other = distribute_module(nn.Linear(2, 4), named)
    with pytest.raises(UsageError, match="axis 'there': allowed are dp"):
        surroundings.read_off(other, 4)
    # Both meshes show one arrangement, since an axis of one rank tells nothing.
    found = surroundings.mesh(4)
    assert found is not None
    assert {"dp_replicate", "fsdp"} <= {*(found.mesh_dim_names or ())}


def test_a_pipeline(tmp_path: Path) -> None:
    """The stages of a pipeline are recorded as one model.

    A step is one micro-batch, whose loss the last stage knows. Tied tensors have their first name.
    """
    events = assembly.ordered(recorded(PIPELINE, 2, tmp_path))
    shards = [one for one in events if isinstance(one, Shard)]
    assert [(one.rank, one.step, one.ids, one.weight) for one in shards] == [
        (0, 0, (0, 1, 2, 3), 4.0),
        (0, 1, (4, 5, 6, 7), 4.0),
    ]
    assert None not in [one.loss_sum for one in shards]
    whole = {"0.0.weight": 6, "0.0.bias": 3, "1.1.weight": 3, "1.1.bias": 1}
    updates = [one for one in events if isinstance(one, Update)]
    assert [sizes(one.weights) == whole for one in updates] == [True] * 4
    assert updates[0].weights == updates[1].weights
    for step in range(2):
        computed, applied = shards[step].gradient, updates[2 * step].gradient
        assert sizes(computed) == whole
        for name, record in computed.items():
            # A schedule divides by its number of micro-batches when all are there: 2.
            right = [2 * value for value in traces.numbers(applied[name])]
            assert traces.numbers(record) == pytest.approx(right, rel=1e-5)
    start = events[0]
    assert isinstance(start, Start)
    assert sorted(start.trainable) == sorted(whole)
