"""Whole parameters of a sharded model, in one process, where a piece is the whole tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from entrenar_py.check.observing import flat_parameters, surroundings


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
