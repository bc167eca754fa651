"""The buffers of a model, and which of them depend on a rank's own samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import entrenar_py
from entrenar_py.check.observing.subject import Buffers
from entrenar_py.check.rank_files import assembly
from entrenar_py.check.rank_files.rank_file import RankTrace
from entrenar_py.shared.trace import Start, Tensors, Update, record_tensor
from tests.check.observing import recording


class Model(nn.Module):
    """A model with buffers of every kind."""

    average: Tensor
    replaced: Tensor
    unversioned: Tensor
    reassigned: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)
        self.norm = nn.BatchNorm1d(2)
        for name in ("average", "replaced", "unversioned", "reassigned"):
            self.register_buffer(name, torch.zeros(2))
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("nothing", torch.full((2,), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        """Change BatchNorm's buffers, and two others in ways that leave no other trace."""
        y: Tensor = self.norm(self.layer(x))
        self.unversioned.data.add_(1)
        self.reassigned = self.reassigned + x.mean()
        return y


@pytest.fixture
def record(folder: Path) -> RankTrace:
    """Record two steps; after each, two buffers change, one of them by a new tensor."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    obs = entrenar_py.observe(model, optimizer)
    for step in range(2):
        obs.samples([2 * step, 2 * step + 1])
        model(torch.randn(2, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.average.add_(1)
        model.replaced = model.replaced + 2
    obs.close()
    return recording.recorded(folder)


def buffers(ranks: Iterable[RankTrace]) -> list[Tensors]:
    events = assembly.ordered([*ranks])
    return [event.buffers for event in events if isinstance(event, Start | Update)]


def test_what_no_forward_pass_changes_is_recorded(record: RankTrace) -> None:
    """Buffers that no forward pass changes are recorded by name, even if they are replaced."""
    found = buffers([record])
    assert [list(one) for one in found] == [["average", "replaced", "nothing", "mask"]] * 3
    values = [[one[name].values() for one in found] for name in ("average", "replaced")]
    assert [[v[0] for v in of if v is not None] for of in values] == [[0, 0, 1], [0, 0, 2]]
    follow = {"running_mean", "running_var", "num_batches_tracked"}
    local = frozenset({*(f"norm.{name}" for name in follow), "unversioned", "reassigned"})
    assert record.local == local
    events = assembly.ordered([record])
    assert {*map(frozenset, (e.local for e in events if isinstance(e, Start | Update)))} == {local}


def test_what_is_local_on_one_rank_is_so_on_all(record: RankTrace) -> None:
    """A rank without samples did not change the buffer, and is not reported for the difference."""
    other = replace(record, header={**record.header, "rank": 1}, local=frozenset({"average"}))
    found = buffers([record, replace(other, events=record.events)])
    assert {tuple(one) for one in found} == {("replaced", "nothing", "mask")}


def test_synchronised_statistics_are_everyone_s() -> None:
    """SyncBatchNorm's buffers are recorded although a forward pass changes them."""
    model = nn.SyncBatchNorm(2)
    known = Buffers(model)
    known.before_forward()
    model.get_buffer("running_mean").add_(1)
    assert known.after_forward() == []
    assert known.after_forward() is None
    assert list(known.held()) == ["running_mean", "running_var", "num_batches_tracked"]


def test_what_the_script_declares_synchronised() -> None:
    """A buffer that all ranks change alike is no rank's own; a cache is never saved."""
    model = nn.BatchNorm1d(2)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    known = Buffers(model)
    known.synchronised = lambda names: [name for name in names if name == "running_mean"]
    known.before_forward()
    for name in ("running_mean", "running_var", "cache"):
        model.get_buffer(name).add_(1)
    assert known.after_forward() == ["running_var", "cache"]
    assert list(known.held()) == ["running_mean", "running_var", "num_batches_tracked"]


def test_whole_numbers_of_a_rank(record: RankTrace) -> None:
    """Whole numbers that differ between ranks before the first step are each rank's own."""
    start = record.events[0]
    assert isinstance(start, Start)
    turned = record_tensor(np.array([True, False]), values=True)
    other = replace(
        record,
        header={**record.header, "rank": 1},
        events=(replace(start, buffers={**start.buffers, "mask": turned}), *record.events[1:]),
    )
    assert {tuple(one) for one in buffers([record, other])} == {("average", "replaced", "nothing")}


def test_a_model_that_is_never_called_has_none(record: RankTrace) -> None:
    """If only a model's parts are called, no buffer is recorded, as changes are not seen.

    One rank that calls the whole model is enough.
    """
    silent = replace(record, local=None)
    assert not any(buffers([silent]))
    other = replace(silent, header={**record.header, "rank": 1})
    shared = ("average", "replaced", "nothing", "mask")
    assert {tuple(one) for one in buffers([record, other])} == {shared}
