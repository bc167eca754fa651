"""A script that is observed does what it does otherwise, however it is written.

Loaders, ways to go through them, steps and optimizers are combined at random. `make soak` tries
more of them.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import tempfile
from collections.abc import Iterator, Set
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

import entrenar_py
from entrenar_py.check.observing import FOLDER, Observation
from tests.check.observing.odd_loaders import LOADERS, Points
from tests.check.observing.odd_loops import EXTRAS, OPTIMIZERS, STEPS, WALKS, Net

STEPS_MAX = 5


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Compute in one thread: several that wait for each other cost ten times as much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digest(tensors: Any) -> str:
    bits = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(bits).hexdigest()[:16]


def states() -> tuple[object, ...]:
    return (
        digest([torch.get_rng_state()]),
        hashlib.sha256(np.random.get_state(legacy=False)["state"]["key"].tobytes()).hexdigest(),
        np.random.get_state(legacy=False)["state"]["pos"],
        hash(random.getstate()),
    )


def inputs_of(batch: Any) -> Tensor:
    """Return rows for the model, of whatever a loader has yielded."""
    while isinstance(batch, tuple):
        batch = batch[0]
    if isinstance(batch, Tensor) and batch.is_floating_point():
        return batch.reshape(-1, 4)
    return Points().x[torch.as_tensor(batch).long().reshape(-1)]


def hooks_of(model: nn.Module, optimizers: list[Any]) -> list[int]:
    """Return how many hooks everything has."""
    counts = [len(model._forward_pre_hooks), len(model._forward_hooks)]
    for optimizer in optimizers:
        counts.append(len(optimizer._optimizer_step_pre_hooks))
        counts.append(len(optimizer._optimizer_step_post_hooks))
    return [*counts, *(len(p._backward_hooks or ()) for p in model.parameters())]


def script(
    loader: str, walk: str, step: str, optimizer: str, extras: Set[str], *, observed: bool
) -> list[Any]:
    """Return everything that a script can notice while it trains."""
    told: list[Any] = []
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    model = Net()
    optimizers = OPTIMIZERS[optimizer](model)
    batches = LOADERS[loader]()
    if "hooked" in extras:
        EXTRAS["hooked"](model, optimizers, batches, lambda *said: told.append(said))
    before = hooks_of(model, optimizers)
    obs = Observation()
    if observed:
        obs = entrenar_py.observe(model, optimizers, sampler=batches)
    try:
        iterator = WALKS[walk](batches)
        for batch in itertools.islice(iterator, STEPS_MAX):
            rows = inputs_of(batch)
            told.append((digest([rows]), states()))
            STEPS[step](lambda rows=rows: model(rows).square().mean(), optimizers, model)  # type: ignore[misc]
            told.append((digest(model.parameters()), digest(model.buffers()), states()))
            for extra in sorted(extras - {"hooked"}):
                EXTRAS[extra](model, optimizers, batches, lambda *said: told.append(said))
    except Exception as error:  # noqa: BLE001  (part of what is compared)
        told.append((type(error), str(error)))
    finally:
        obs.close()
    told.append([type(state) for one in optimizers for state in one.state.values()])
    told.append(
        [hooks == count for hooks, count in zip(hooks_of(model, optimizers), before, strict=True)]
    )
    return told


def compare(*chosen: Any) -> None:
    """Check that a script does the same with and without the line."""
    methods = {**vars(_BaseDataLoaderIter)}  # an observer of another test may still be there
    plain = script(*chosen, observed=False)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {FOLDER: folder}):
        watched = script(*chosen, observed=True)
    assert [*map(repr, watched)] == [*map(repr, plain)]  # where NaN is NaN
    assert {**vars(_BaseDataLoaderIter)} == methods


@settings(max_examples=settings().max_examples * 2 // 5)  # a fifth of a second each
@given(
    st.sampled_from([*LOADERS]),
    st.sampled_from([*WALKS]),
    st.sampled_from([*STEPS]),
    st.sampled_from([*OPTIMIZERS]),
    st.sets(st.sampled_from([*EXTRAS]), max_size=2),
)
def test_any_script(loader: str, walk: str, step: str, optimizer: str, extras: set[str]) -> None:
    """Batches, generators, weights, types, hooks and errors are the same, whatever is combined."""
    compare(loader, walk, step, optimizer, extras)


@pytest.mark.parametrize("loader", LOADERS)
def test_every_loader(loader: str) -> None:
    """Each loader yields the same, in a plain loop."""
    compare(loader, "for", "plain", "SGD", {"looked at"})


def test_workers_that_stay(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader with persistent workers yields the same, and its workers end."""
    drawn = []
    for observed in (False, True):
        torch.manual_seed(1)
        loader = DataLoader(Points(), 2, shuffle=True, num_workers=1, persistent_workers=True)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if observed:
            monkeypatch.setenv(FOLDER, str(tmp_path))
        obs = entrenar_py.observe(model, optimizer, sampler=loader)
        drawn.append([(digest([batch]), states()) for _ in range(2) for batch in loader])
        obs.close()
        worker = loader._iterator._workers[0]  # type: ignore[union-attr]
        del loader
        worker.join(10)
        assert worker.exitcode == 0
    assert drawn[0] == drawn[1]
