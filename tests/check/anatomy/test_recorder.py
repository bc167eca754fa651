"""Calls of right scripts are recorded, and every replaced function exists in this torch."""

from __future__ import annotations

import importlib
import inspect
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from entrenar_py.check.anatomy import record, steps, suspects
from entrenar_py.check.anatomy.record import Clipped, Collective, Forward, PassBegun, Stepped
from entrenar_py.check.observing.auto.anatomy import parameters, patches, surveys
from falsification.twins import Twin
from tests.check.anatomy import runs


@pytest.mark.parametrize("script", ["accumulation.py", "fsdp.py", "tensor_parallel.py"])
def test_right_scripts_have_no_suspects(script: str, tmp_path: Path) -> None:
    """A script with the line `observe` is recorded as well, and only by this recorder."""
    records, ended = runs.recorded(Twin(name=script, script=script), tmp_path, steps=4)
    assert ended.code == 0, ended.tail
    assert not suspects.of(records)
    assert [len(steps.cut(known)) for known in records.values()] == [4, 4]
    assert {path.name.partition(".")[2] for path in tmp_path.glob("*.jsonl")} == {record.SUFFIX[1:]}


def test_what_a_wrapper_does_in_c_is_counted(tmp_path: Path) -> None:
    """The collectives of DistributedDataParallel are those of its gradients, by its name."""
    records, _ = runs.recorded(Twin(name="", script="anatomy/loop.py"), tmp_path, steps=2)
    for known in records.values():
        (first, *_) = [one for one in known.of(Collective) if one.contents == "gradients"]
        assert (first.by, first.size, first.touched) == ("DistributedDataParallel", 2, "0-3")
        assert known.of(Forward)[0].kind == "DistributedDataParallel(Sequential)"
        assert [one.moved for one in known.of(Stepped)] == [4, 4]


def test_calls_that_libraries_make_are_told_where_they_are(tmp_path: Path) -> None:
    """A wrapper in a module, keywords, functional collectives, a clipping in two, an open file."""
    task = (
        "class Task(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.wrapped = ddp\n\n    def forward(self, rows):\n"
        "        return self.wrapped(rows)\n\ntask = Task()\noptimizer = torch.optim.SGD"
    )
    loss = "collectives.all_reduce(loss.detach(), 'sum', dist.group.WORLD)"
    clipped = (
        "        gradients = [p.grad for p in model.parameters()]\n"
        "        norm = nn.utils.get_total_norm(gradients)\n"
        "        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)\n"
    )
    changes = (
        (
            "import torch\n",
            "import torch\nimport torch.distributed._functional_collectives as collectives\n",
        ),
        ("optimizer = torch.optim.SGD", task),
        ("nn.Linear(4, 6), nn.Tanh()", "nn.Linear(4, 6), nn.BatchNorm1d(6)"),
        ("ddp(inputs)", "task(rows=inputs)"),
        ('torch.load("loop.pt")', 'torch.load(open("loop.pt", "rb"))'),
        ("        nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n", clipped),
        ("        optimizer.zero_grad()\n", f"        optimizer.zero_grad()\n        {loss}\n"),
    )
    twin = Twin(name="", script="anatomy/loop.py", changes=changes)
    records, ended = runs.recorded(twin, tmp_path, steps=4)
    assert ended.code == 0, ended.tail
    assert not suspects.of(records)
    lines = twin.changed().splitlines()
    for known in records.values():
        told = {(lines[one.line - 1].strip(), one.by, one.contents) for one in known.of(Collective)}
        assert (loss, "script", "other") in told
        assert ("loss.backward()", "DistributedDataParallel", "gradients") in told
        assert not any(by == "other code" for _, by, _ in told)
        assert len({one.calls for one in known.of(Collective) if one.contents == "buffers"}) == 1
        assert {one.inputs for one in known.of(Forward)} == {"float32 [2, 4]"}
        assert {lines[one.line - 1].split("(")[0].strip() for one in known.of(Clipped)} == {
            "nn.utils.clip_grads_with_norm_"
        }
    assert len({one.digest for known in records.values() for one in known.of(Forward)}) == 16


def test_loaders_of_libraries_are_read() -> None:
    """A batch may be a mapping that torch doesn't know, and a batch sampler wrap another one."""
    batch = UserDict({"ids": torch.ones(2, 3), "more": [UserDict({"mask": torch.ones(2)})]})
    assert [tuple(leaf.shape) for leaf in surveys.leaves(batch)] == [(2, 3), (2,)]
    inner = BatchSampler(RandomSampler(range(4)), 2, drop_last=False)
    shard = SimpleNamespace(batch_sampler=inner)
    loader = SimpleNamespace(sampler=SequentialSampler(range(4)), batch_sampler=shard)
    assert isinstance(surveys.sampler(loader), RandomSampler)


def test_replaced_functions_exist() -> None:
    """Each row names a function of the installed torch, and collectives have these arguments."""
    for patch in patches.TABLE:
        owner = importlib.import_module(patch.module)
        function = getattr(getattr(owner, patch.owner) if patch.owner else owner, patch.name)
        is_functional = patch.module.endswith("_functional_collectives")
        wanted = ("self", "group") if is_functional else patches.COLLECTIVES.get(patch.name, ())
        assert {*wanted} <= {*inspect.signature(function).parameters}, patch.name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("shuffle=True)", "shuffle=True, num_workers=1)"),
        ("model = nn.Sequential(body, head)", "model = nn.Sequential(body, nn.LazyLinear(1))"),
        (
            "        with torch.autocast",
            "        with torch.no_grad():\n            targets = 0 * model(inputs) + targets\n"
            "        with torch.autocast",
        ),
    ],
    ids=["workers", "lazy", "targets"],
)
def test_rarer_right_loops_are_recorded(old: str, new: str, tmp_path: Path) -> None:
    """A pass with workers begins once; lazy modules, and targets by the model, are no fault."""
    begun = ("optimizer = torch.optim.SGD", "model(x)\noptimizer = torch.optim.SGD")
    twin = Twin(name="", script="anatomy/alone.py", changes=((old, new), begun), world_size=1)
    records, ended = runs.recorded(twin, tmp_path, steps=4)
    assert ended.code == 0, ended.tail
    assert not suspects.of(records)
    assert len(steps.cut(records[0])) == 4
    assert [one.number for one in records[0].of(PassBegun)] == [0, 1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_a_shape_or_memory_are_told() -> None:
    """A nested tensor has no single shape, and a meta tensor has no values to compare."""
    layouts = (torch.jagged, torch.strided)
    nested = [torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=x) for x in layouts]
    assert parameters.shapes(nested) == "float32 nested, float32 nested"
    assert all(parameters.digest([one]) for one in nested)
    assert not parameters.digest([torch.ones(2, device="meta")])
