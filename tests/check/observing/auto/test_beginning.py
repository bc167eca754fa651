"""A script that seeds nothing draws the same numbers in each run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from entrenar_py.check.observing import FAULTS
from entrenar_py.check.observing.auto import beginning
from entrenar_py.shared.faults import COMMON, Fault


@pytest.fixture(autouse=True)
def own_generators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set back what the functions of this file seed, and replace."""
    monkeypatch.setattr(beginning, "_TORCH_S", set())
    monkeypatch.delenv(FAULTS, raising=False)
    monkeypatch.setattr(torch, "seed", torch.seed)
    monkeypatch.setattr(torch.random, "seed", torch.random.seed)
    for module, name in ((np.random, "seed"), (np.random, "default_rng"), (random, "seed")):
        monkeypatch.setattr(module, name, getattr(module, name))
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def drawn(monkeypatch: pytest.MonkeyPatch, rank: int, *faults: Fault) -> list[float]:
    """Return what an unseeded process of a rank draws, and draws once it asks for other seeds."""
    with monkeypatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv(FAULTS, json.dumps([fault.to_dict() for fault in faults]))
        for module, name in (
            *((torch, "seed"), (torch.random, "seed")),
            *((np.random, "seed"), (np.random, "default_rng"), (random, "seed")),
        ):
            patch.setattr(module, name, getattr(module, name))
        beginning.seed_process(0)
        numbers = [float(torch.rand(())), random.random(), float(np.random.random())]
        for seed in (torch.seed, random.seed, np.random.seed):
            seed()
        own = np.random.default_rng().random()
        return [*numbers, float(torch.rand(())), random.random(), float(np.random.random()), own]


def test_runs_draw_alike_and_ranks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank draws the same in each run, also after it asks for a seed; other ranks draw others."""
    first, again, other = (drawn(monkeypatch, rank) for rank in (0, 0, 1))
    assert first == again
    assert len({*first, *other}) == len(first) + len(other)


def test_ranks_draw_alike_under_common_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run with common random numbers ranks build the same data."""
    common = Fault(kind=COMMON, step=0)
    assert drawn(monkeypatch, 0, common) == drawn(monkeypatch, 1, common)


def test_a_script_s_own_seeds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script seeds itself is left as it is, and it is known whether it has seeded torch."""
    expected = torch.Generator().manual_seed(3), random.Random(3), np.random.RandomState(3)
    monkeypatch.setenv("RANK", "1")
    beginning.seed_process(0)
    assert beginning.is_unseeded()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    assert not beginning.is_unseeded()
    assert torch.rand(()) == torch.rand((), generator=expected[0])
    assert random.random() == expected[1].random()
    assert np.random.random() == expected[2].random_sample()
