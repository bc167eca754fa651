"""What a script draws, by which generator and where, and that observing this changes nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, dataloader

from entrenar_py.check.observing import generators, iterations, random_numbers
from entrenar_py.check.observing.generators import Generators
from entrenar_py.check.observing.random_numbers import LoaderDraws, RandomNumbers
from entrenar_py.shared import trace


class Noisy(Dataset[Tensor]):
    """A data set that draws from numpy, and from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((1,), np.random.rand() + self.rng.random())


class Recorded:
    """A data set's draws, as they are written."""

    def __init__(self, data: Noisy) -> None:
        self.data, self.events = data, list[Any]()
        found = Generators(nn.Identity(), objects={"data": data})
        # Nothing is looked at in a process that has compiled, as another test may have done here.
        self.draws = RandomNumbers(
            found, 0, lambda: (3, 1), self.events.extend, compiles=lambda: False
        )
        self.hooks = LoaderDraws(self.draws, trained=data)

    @property
    def drawn(self) -> list[tuple[str, str]]:
        return [(event.where, event.generator) for event in self.events]


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    made = Recorded(Noisy())
    yield made
    made.hooks.remove()


def test_every_global_generator_is_seen() -> None:
    """A draw moves the generator that it is from, and no other."""
    mine = np.random.default_rng(1)
    found = Generators(nn.Identity(), objects={})
    for draw, name in (
        (lambda: torch.rand(1), "torch"),
        (np.random.rand, "numpy"),
        (random.random, "python"),
        (mine.random, "mine"),
    ):
        before = found.states()
        draw()
        assert generators.moved(before, found.states()) == [name]


def test_generators_are_named_by_their_variables() -> None:
    """Those of objects are found, too; those of samplers are left out, and a proxy isn't asked."""

    class Proxy:
        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            raise RuntimeError("outside of a request")

    proxy, sampler = Proxy(), torch.Generator()
    data, noise = Noisy(), torch.Generator()
    states = Generators(nn.Identity(), objects={}, left_out=[sampler]).states()
    assert {"data.rng", "noise"} <= states.keys()
    assert "sampler" not in states
    assert (type(proxy), len(data), noise.device.type) == (Proxy, 4, "cpu")


def test_marks_say_where_something_was_drawn(recorded: Recorded) -> None:
    """Nothing is written where nothing was drawn, or where it doesn't matter."""
    recorded.draws.mark("between")
    torch.rand(1)
    recorded.draws.mark("batch")
    torch.rand(1)
    recorded.draws.mark(None)
    recorded.draws.mark("forward")
    (event,) = recorded.events
    assert (event.step, event.micro_batch, event.where, event.generator) == (3, 1, "batch", "torch")
    assert event.before != event.after


def test_a_seed_is_no_draw(recorded: Recorded) -> None:
    """A script may seed itself after its line: numbers come only with what draws them."""
    torch.manual_seed(17)
    recorded.draws.mark("between")
    assert recorded.events == []
    torch.manual_seed(18)
    torch.rand(1)
    recorded.draws.mark("between")
    assert [event.where for event in recorded.events] == ["between"]


def test_what_the_first_batch_drew_before_anything_was_observed() -> None:
    """Without a line the first forward pass begins the record: its batch's noise was drawn."""
    before, events = generators.global_states(), list[Any]()
    torch.rand(3)
    found = Generators(nn.Identity(), objects={})
    numbers = RandomNumbers(found, 0, lambda: (0, 0), events.extend)
    numbers.since(before)
    numbers.mark("batch")
    (event,) = events
    assert (event.where, event.generator, event.before) == ("batch", "torch", before["torch"])


def test_what_a_loader_draws_for_its_order_is_left_out(recorded: Recorded) -> None:
    """The data set's draws are told apart from the seeds of an epoch and a sampler's order."""
    loader = DataLoader(recorded.data, batch_size=2, shuffle=True)
    for _ in loader:
        pass
    assert recorded.drawn == 2 * [("loader", "numpy"), ("loader", "data.rng")]
    recorded.events.clear()
    list(DataLoader(Noisy(), batch_size=2, shuffle=True))  # of another data set
    assert recorded.events == []


def test_workers_write_what_they_draw_first(recorded: Recorded, tmp_path: Any) -> None:
    """Each worker of a loader writes the draws of its first batch, with the batch's samples."""
    file = tmp_path / "drawn"

    def write(events: Sequence[trace.Drawn]) -> None:
        with file.open("a") as lines:
            lines.writelines(f"{e.generator} {e.worker} {e.ids} {e.before}\n" for e in events)

    recorded.draws._write = write  # type: ignore[assignment]
    list(DataLoader(recorded.data, batch_size=1, num_workers=2))
    lines = sorted(line.rsplit(" ", 1) for line in file.read_text().splitlines())
    assert [place for place, _ in lines] == [
        *("data.rng 0 (0,)", "data.rng 1 (1,)", "numpy 0 (0,)", "numpy 1 (1,)")
    ]
    assert lines[0][1] == lines[1][1], "each worker has a copy of the data set's generator"
    assert lines[2][1] != lines[3][1], "torch seeds numpy in each worker"


def test_torch_has_its_methods_back() -> None:
    """After the end nothing of torch is wrapped, in whatever order observers end."""
    loader = dataloader._BaseDataLoaderIter
    kinds: list[tuple[type, str]] = [(kind, "fetch") for kind in random_numbers._FETCHERS]
    kinds += [(loader, name) for name in iterations._ORDERING]
    assert all(name in kind.__dict__ for kind, name in kinds), "as this torch has them"
    before = [kind.__dict__[name] for kind, name in kinds]
    first, second = Recorded(Noisy()), Recorded(Noisy())
    first.hooks.remove()
    second.hooks.remove()
    assert [kind.__dict__[name] for kind, name in kinds] == before


def test_a_loader_gives_the_same_under_hooks() -> None:
    """Batches and the states of all generators are the same with the hooks and without."""
    given = []
    for hooked in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)
        data = Noisy()
        made = Recorded(data) if hooked else None
        batches = [b.tolist() for b in DataLoader(data, batch_size=2, shuffle=True)]
        states = torch.get_rng_state().tolist(), np.random.rand(), data.rng.random()
        given.append((batches, states))
        if made:
            made.hooks.remove()
    assert given[0] == given[1]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_layers_that_are_computed_again(recorded: Recorded, kept: bool, reentrant: bool) -> None:
    """Numbers that a checkpoint draws anew are recorded, and not those that it draws again."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    given = torch.ones(1, 4, requires_grad=True)
    output = checkpoint(layer, given, use_reentrant=reentrant, preserve_rng_state=kept)
    recorded.draws.mark("forward")
    recorded.draws.begin_backward()
    output.sum().backward()
    recorded.draws.end_backward()
    again = [] if kept else [("recomputed", "torch")]
    assert recorded.drawn == [("forward", "torch"), *again]
