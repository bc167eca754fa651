"""One suite for the steps of all backends: each is compared with the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar_py.backends import Backend, open_backend
from entrenar_py.backends.steps import Array
from entrenar_py.training import dropout, workload
from entrenar_py.training.engine import Engine

NAMES = ("linear", "mlp", "decoder", "decoder_full", "vectors")
SCALE = 2.0**-5
IDS = [3, 1, 4, 15]


def _engine(backend: Backend, name: str) -> Engine:
    """With no zeros in it: at its start LoRA's B would hide the gradient of A."""
    model = workload.build(name, num_samples=24, width=8, data=np.random.default_rng(0))
    rng = np.random.default_rng(1)
    values = {
        name: (value + rng.normal(0, 0.1, value.shape)).astype(np.float32)
        for name, value in model.initial(rng).items()
    }
    return Engine(model, backend, values, scale=SCALE)


def _shard(
    replica: Engine, *, ids: list[int] | None = None, rate: float = 0.0
) -> tuple[Array, float]:
    drop = dropout.Dropout(rate, np.random.default_rng(2)) if rate else dropout.none
    vector, loss, _ = replica.shard(ids or IDS, accumulation=1, drop=drop)
    return vector, loss


def _assert_near(
    replica: Engine, found: tuple[Array, float], expected: tuple[Array, float]
) -> None:
    """Tensor by tensor: no element is further off than a thousand roundings of the largest."""
    for name, part in replica.layout.trainable.items():
        error = np.abs(found[0][part] - expected[0][part]).max()
        assert error <= 1000 * 2.0**-23 * np.abs(expected[0][part]).max(), name
    assert found[1] == pytest.approx(expected[1], rel=1000 * 2.0**-23)


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_the_cpu_s(backend: Backend, name: str, rate: float) -> None:
    """Loss and every gradient, in the order and shapes of the model, masks and all."""
    ours, theirs = _engine(backend, name), _engine(open_backend("cpu"), name)
    _assert_near(theirs, _shard(ours, rate=rate), _shard(theirs, rate=rate))


@pytest.mark.parametrize("name", ["mlp", "decoder"])
def test_a_step_sees_what_training_changed(backend: Backend, name: str) -> None:
    """Weights and buffers are those of now, whatever the step before was computed with."""
    ours, theirs = _engine(backend, name), _engine(open_backend("cpu"), name)
    for replica in (ours, theirs):
        _shard(replica)
        replica.parameters *= np.float32(0.5)
        for buffer in replica.buffers.values():
            buffer += np.float32(0.25)
    _assert_near(theirs, _shard(ours), _shard(theirs))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_twice_has_the_same_bits(backend: Backend, name: str) -> None:
    """Also after one of another number of samples."""
    replica = _engine(backend, name)
    vector, loss = _shard(replica)
    _shard(replica, ids=[7])
    again, same = _shard(replica)
    assert (vector.tobytes(), loss) == (again.tobytes(), same)


def test_a_step_leaves_its_tensors_alone(backend: Backend) -> None:
    """No weight moves, and what it gives is the caller's own."""
    replica = _engine(backend, "mlp")
    before = {name: array.tobytes() for name, array in replica.arrays.items()}
    step = backend.stepper(replica.workload, replica.tensors, scale=SCALE)
    _, parts = step(IDS, dropout.none)
    kept = [part.copy() for part in parts]
    _, others = step([5, 6], dropout.none)
    for part, other, copy in zip(parts, others, kept, strict=True):
        assert not np.shares_memory(part, other)
        assert np.array_equal(part, copy)
    assert {name: array.tobytes() for name, array in replica.arrays.items()} == before
    assert all(tensor.grad is None for tensor in replica.tensors.values())
    assert all(tensor.device == torch.device("cpu") for tensor in replica.tensors.values())
