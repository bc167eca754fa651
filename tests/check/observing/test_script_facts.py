"""What a script shows whose line is `observe(model, optimizer)` and says nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import DataLoader, Subset, TensorDataset

import entrenar_py
from entrenar_py.check.observing import COPY, Observation, call_sites
from entrenar_py.check.rank_files import rank_file
from entrenar_py.check.rank_files.rank_file import RankTrace
from entrenar_py.shared.trace import Called, Selection, Shard, Update

DATA = TensorDataset(torch.arange(12.0)[:, None])


class Script:
    """A training of a model of one weight, 1, with a schedule; its loss is the mean square."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.obs: Observation = entrenar_py.observe(self.model, self.optimizer)
        self.schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
        nn.init.ones_(self.model.weight)

    def steps(self, loader: DataLoader[tuple[torch.Tensor, ...]]) -> Iterator[torch.Tensor]:
        """Yield each batch, before it is trained on."""
        for (batch,) in loader:
            yield batch
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()


def record(folder: Path, script: Script) -> RankTrace:
    script.obs.close()
    (path,) = folder.glob("*.rank.jsonl")
    return rank_file.load(path)


def shards(found: RankTrace) -> list[Shard]:
    """Return the micro-batches of a record."""
    return [event for event in found.events if isinstance(event, Shard)]


def test_a_line_that_says_nothing_shows_what_auto_does(folder: Path) -> None:
    """Losses, samples, epochs, the schedule's place and the script's lines are recorded."""
    script = Script()
    loader = DataLoader(DATA, batch_size=4, shuffle=True)
    batches = [batch.flatten() for _ in range(2) for batch in script.steps(loader)]
    for name in ("first.pt", "second.pt"):
        torch.save(script.model.state_dict(), folder / name)
    found = record(folder, script)
    seen = shards(found)
    assert [shard.ids for shard in seen] == [tuple(batch.int().tolist()) for batch in batches]
    assert [shard.epoch for shard in seen] == [0, 0, 0, 1, 1, 1]
    sums = [float(batch.square().sum()) for batch in batches]
    assert [shard.loss_sum for shard in seen] == pytest.approx(sums)
    told = {"losses": "backward", "samples": "index", "num_samples": 12, "replicas": True}
    assert told.items() <= found.header.items()
    lines = Path(__file__).read_text("utf-8").splitlines()
    called = {event.what: event for event in found.events if isinstance(event, Called)}
    assert {event.file for event in called.values()} == {str(Path(__file__).resolve())}
    copy = (folder / COPY / "home/me/train.py").resolve()
    assert call_sites.in_place(copy) == "/home/me/train.py"
    assert {what: lines[event.line - 1].strip() for what, event in called.items()} == {
        "step": "self.optimizer.step()",
        "samples": "for (batch,) in loader:",
        "save": "torch.save(script.model.state_dict(), folder / name)",
        "backward": "self.model(batch).square().mean().backward()",
    }
    updates = [event for event in found.events if isinstance(event, Update)]
    assert [update.schedule for update in updates] == [*range(6)]


def test_what_a_script_says_counts_in_place_of_what_it_shows(folder: Path) -> None:
    """A script that reports samples or losses is taken at its word, for all of them."""
    script = Script()
    part = Subset(DATA, range(6, 12))
    for number, _ in enumerate(script.steps(DataLoader(part, batch_size=2))):
        script.obs.samples([100 + number], epoch=7)
        if number != 1:
            script.obs.loss(5.0, 2)
    found = record(folder, script)
    assert [shard.ids for shard in shards(found)] == [(100,), (101,), (102,)]
    assert [shard.loss_sum for shard in shards(found)] == [10.0, None, 10.0]
    assert {shard.epoch for shard in shards(found)} == {7}
    assert not {"losses", "samples", "num_samples"} & found.header.keys()
    assert not [event for event in found.events if isinstance(event, Selection)]


def test_a_backward_pass_of_anything_is_left_alone(folder: Path) -> None:
    """What torch takes besides tensors, a generator or an edge of its graph, has no loss."""
    script = Script()
    kinds: tuple[Callable[[Tensor], Any], ...] = (
        get_gradient_edge,
        lambda loss: [get_gradient_edge(loss)],
        lambda loss: iter([loss]),
    )
    for wrap in kinds:
        torch.autograd.backward(wrap(script.model(torch.ones(2, 1)).mean()))
        script.optimizer.step()
        script.optimizer.zero_grad()
    found = record(folder, script)
    assert [shard.loss_sum for shard in shards(found)] == [None, None, None]


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
def test_a_loss_is_known_without_its_scale(
    kind: type[torch.amp.GradScaler], folder: Path, tmp_path: Path
) -> None:
    """What a GradScaler multiplies is divided again, and a step that it skips is seen to be one.

    FSDP's scaler has methods of its own.
    """
    if kind is ShardedGradScaler:
        store = f"file://{tmp_path / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    script = Script()
    scaler = kind("cpu", init_scale=2.0)
    for value in (1.0, float("inf"), 1.0):
        scaler.scale(script.model(torch.full((2, 1), value)).mean()).backward()
        scaler.step(script.optimizer)
        scaler.update()
        script.optimizer.zero_grad()
    found = record(folder, script)
    assert [(shard.step, shard.loss_sum) for shard in shards(found)] == [
        *((0, 2.0), (1, float("inf")), (2, 2.0))
    ]
    if dist.is_initialized():
        dist.destroy_process_group()
