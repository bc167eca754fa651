"""Parameters in flat tensors of FSDP, and those that fully_shard makes whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from entrenar_py.check.observing import declarations, flat_parameters, step_in_work, surroundings
from entrenar_py.check.observing.flat_parameters import Part, WithinPass
from entrenar_py.check.observing.subject import Subject
from entrenar_py.check.rank_files import assembly
from entrenar_py.check.rank_files.layout import Layout
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.trace import Shard, Start, Update
from tests import traces
from tests.check.observing.test_dtensors import recorded, sizes

# The last layer is sharded by itself. Its weight of three elements is on both ranks; the bias of
# one is on the second rank alone. `whole` is the same training without ranks.
TRAINED = """
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
def built():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1))
def wrapped(module):
    return FullyShardedDataParallel(
        module, device_id=torch.device("cpu"), use_orig_params=KEPT,
        sharding_strategy=ShardingStrategy.STRATEGY,
    )
model = built()
model[2] = wrapped(model[2])
model = wrapped(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
obs = entrenar_py.observe(model, optimizer)
for step in range(2):
    for micro in range(2):
        obs.samples([8 * step + 4 * micro + 2 * rank + k for k in range(2)])
        x = torch.tensor([[1.0, 2.0], [3.0, 5.0]]) + step + micro - rank
        with torch.autograd.set_grad_enabled(True):
            if micro == 0:
                with model.no_sync():
                    model(x).sum().backward()
            else:
                model(x).sum().backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
obs.close()
"""


@pytest.mark.parametrize(("kept", "strategy"), [("True", "SHARD_GRAD_OP"), ("False", "FULL_SHARD")])
def test_whole_tensors_are_made_of_pieces(kept: str, strategy: str, tmp_path: Path) -> None:
    """Weights, gradients and moments are whole on each rank, under the names of the module.

    That holds for a rank that has nothing of a parameter, too.
    """
    ranks = recorded(TRAINED.replace("KEPT", kept).replace("STRATEGY", strategy), 2, tmp_path)
    assert ranks[0].layout == Layout(axes={"fsdp": 2})
    assert ranks[0].pieces["2.bias"].shape == (0,)
    events = assembly.ordered(ranks)
    whole = {"0.weight": 6, "0.bias": 3, "2.weight": 3, "2.bias": 1}
    states = [one for one in events if isinstance(one, Start | Update)]
    assert [(one.kind, one.step, one.rank) for one in states] == [
        *(("start", 0, 0), ("start", 0, 1), ("update", 0, 0), ("update", 0, 1)),
        *(("update", 1, 0), ("update", 1, 1)),
    ]
    assert all(sizes(one.weights) == whole for one in states)
    assert states[0].weights == states[1].weights
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1))
    begun = {name: p.flatten().tolist() for name, p in model.named_parameters()}
    assert {name: traces.numbers(one) for name, one in states[0].weights.items()} == begun
    assert isinstance(states[0], Start)
    assert dict(states[0].shapes) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    for update in states[2:]:
        assert isinstance(update, Update)
        assert sizes(update.gradient) == whole
        assert sizes(update.optimizer)["2.bias/exp_avg"] == 1
        assert sizes(update.optimizer)["0.weight/exp_avg"] == 6
        assert sizes(update.optimizer)["2.bias/step"] == 1
    assert states[2].optimizer == states[3].optimizer
    shards = [one for one in events if isinstance(one, Shard)]
    assert [len(one.ids) for one in shards] == [2] * 8
    assert all(one.finite for one in shards)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A process group of four ranks, of which only this one is there."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def _wrapped(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("kept", [True, False])
def test_the_piece_of_each_parameter(kept: bool) -> None:
    """Rank 1 of four has the second quarter of all elements, and what lies there of a parameter."""
    layer = nn.Linear(3, 3)
    nn.init.zeros_(layer.bias)
    weight = layer.weight.detach().flatten().clone()
    model = _wrapped(nn.Sequential(layer), use_orig_params=kept)
    parts = flat_parameters.parts_of(model)
    each = 4 if kept else 3  # of 12 elements, or of 16: parameters begin at addresses of 16 bytes
    weights, bias = (parts[f"0.{name}"].piece for name in ("weight", "bias"))
    assert weights is not None
    assert bias is not None
    assert (weights.offset, weights.shape, weights.ranks) == ((each,), (each,), (0, 1, 2))
    assert (bias.shape, bias.ranks) == ((0,), (3,))
    assert torch.equal(parts["0.weight"].weights(), weight[each : 2 * each])
    assert parts["0.bias"].weights().numel() == 0


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("kept", [True, False])
def test_a_shared_parameter_has_both_names(kept: bool) -> None:
    """A tensor that two modules share is one part, whose names are told; others are beside it."""
    first = nn.Linear(2, 2, bias=False)
    tied = nn.Linear(2, 2, bias=False)
    tied.weight = first.weight
    model = _wrapped(nn.Sequential(first, tied, nn.Linear(2, 2)), use_orig_params=kept)
    assert declarations.shared(model) == (("0.weight", "1.weight"),)
    assert declarations.names_of(model)["1.weight"] == "0.weight"


@pytest.mark.usefixtures("four_ranks")
def test_ignored_modules_keep_their_parameters() -> None:
    """Parameters that are in no flat one are recorded as they are."""
    alone = nn.Linear(2, 1)
    model = _wrapped(nn.Sequential(nn.Linear(2, 2), alone), ignored_modules=[alone])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    subject = Subject(model, [optimizer], declared=None, rank=1, world_size=4)
    assert [*subject.parameters] == ["1.weight", "1.bias", "0.weight", "0.bias"]
    assert [*subject.pieces] == ["0.weight", "0.bias"]
    assert subject.parameters["1.weight"] is alone.weight


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
@pytest.mark.parametrize(
    ("strategy", "axes"),
    [("FULL_SHARD", {"fsdp": 4}), ("NO_SHARD", {"dp": 4}), ("SHARD_GRAD_OP", {"fsdp": 4})],
)
def test_how_ranks_are_arranged(strategy: str, axes: dict[str, int]) -> None:
    """Ranks hold pieces, or whole copies."""
    model = _wrapped(nn.Linear(2, 2), sharding_strategy=ShardingStrategy[strategy])
    shown = flat_parameters.layout_of(model, 4)
    assert shown is not None
    assert shown.axes == axes
    with pytest.raises(UsageError, match="does not show how all 8 ranks"):
        flat_parameters.layout_of(model, 8)


@pytest.mark.usefixtures("four_ranks")
def test_gradients_that_are_computed_in_16_bits() -> None:
    """They are rounded before ranks add them, whatever the format is in which that is done."""
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _wrapped(nn.Linear(2, 2), mixed_precision=policy)
    assert step_in_work.compression(model) == "bfloat16"
    assert step_in_work.compression(_wrapped(nn.Linear(2, 2))) == ""


@pytest.mark.usefixtures("four_ranks")
def test_a_hook_that_compresses_after_some_steps() -> None:
    """The gradients of the first ones are added as they are. The script's own hook may call it."""
    state = powerSGD.PowerSGDState(None, start_powerSGD_iter=2)
    model = DistributedDataParallel(nn.Linear(2, 2), init_sync=False)
    model.register_comm_hook(state, lambda state, bucket: powerSGD.powerSGD_hook(state, bucket))
    formats = []
    for _ in range(3):
        formats.append(step_in_work.compression(model))
        state.iter += 1
    assert formats == ["", "", "PowerSGD"]


def test_a_hook_sees_a_parameters_own_part() -> None:
    """A hook is given the part of a flat gradient, and may change it, and nothing else."""
    flat = torch.zeros(6, requires_grad=True)
    part = Part(flat=flat, owner=flat, shape=(2, 2), begin=2, first=2, piece=None)
    seen = []

    def double(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient.clone())
        return 2 * gradient

    WithinPass(part).register_hook(double)
    WithinPass(part).register_hook(lambda _: None)
    (flat * torch.arange(6.0)).sum().backward()  # type: ignore[no-untyped-call]
    assert [one.tolist() for one in seen] == [[[2.0, 3.0], [4.0, 5.0]]]
    assert flat.grad is not None
    assert flat.grad.tolist() == [0.0, 1.0, 4.0, 6.0, 8.0, 10.0]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank, over gloo."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_each_is_found_once_and_gets_the_ranks_own_gradient() -> None:
    """Each trained parameter is found by its name in the model, in whichever module is sharded."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[1].bias.requires_grad_(False)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    found: dict[str, list[Tensor]] = {}

    def hook(name: str, whole: Tensor) -> None:
        assert name not in found
        assert not isinstance(whole, DTensor)
        found[name] = []
        whole.register_hook(found[name].append)  # type: ignore[no-untyped-call]

    handles = flat_parameters.when_whole(model, hook)
    for _ in range(2):
        model(torch.ones(3, 2)).sum().backward()
    assert list(found) == ["0.weight", "0.bias", "1.weight"]
    assert [len(seen) for seen in found.values()] == [2, 2, 2]
    summed = model[0].bias.grad
    assert isinstance(summed, DTensor)
    assert torch.equal(summed.to_local(), found["0.bias"][0] + found["0.bias"][1])
    assert len(handles) == 2


@pytest.mark.usefixtures("group")
def test_a_script_without_a_line_evaluates_first() -> None:
    """The model is the one called, though the optimizer's pieces are not in it at that time."""
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters())
    with torch.no_grad():
        model(torch.ones(3, 2))
    assert not isinstance(model.weight, DTensor)
    assert surroundings.model_of(model, [optimizer]) is model
    assert isinstance(model.weight, DTensor)
