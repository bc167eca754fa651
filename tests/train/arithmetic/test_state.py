"""The whole state as bytes: exact, of a known size, and copied once."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.arithmetic import checkpoint, optimizer
from entrenar_py.train.arithmetic.sharding import Position
from entrenar_py.train.arithmetic.tensors import Array, TensorSpec

SPECS = (
    TensorSpec("w", (3, 2), "trainable", decayed=True),
    TensorSpec("none", (0, 4), "trainable", decayed=False),
    TensorSpec("embedding", (2,), "frozen", decayed=False),
    TensorSpec("scalar", (), "trainable", decayed=False),
    TensorSpec("running", (2,), "buffer", decayed=False),
)
STANDS = checkpoint.Progress(position=Position(3, 17), schedule_step=2**40)


def _content(kind: str) -> tuple[dict[str, Array], optimizer.State]:
    """Return tensors and moments with bits that are easily lost."""
    rng = np.random.default_rng(0)
    odd = np.array([-0.0, np.nan, np.inf, 1e-45], np.float32)
    tensors = {spec.name: rng.choice(odd, spec.shape).astype(np.float32) for spec in SPECS}
    moments = {
        name: rng.choice(odd, shape).astype(np.float32)
        for name, shape in optimizer.initial_shapes(kind, 7).items()
    }
    return tensors, moments


def _bits(arrays: dict[str, Array]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (str(one.dtype), one.shape, one.tobytes()) for name, one in arrays.items()}


@pytest.mark.parametrize("kind", optimizer.STATE)
def test_everything_comes_back(kind: str) -> None:
    """Progress, tensors and moments come back bit by bit, from `num_bytes` bytes."""
    tensors, moments = _content(kind)
    data = checkpoint.dump_state(SPECS, kind, STANDS, tensors, moments)
    assert len(data) == checkpoint.state_bytes(SPECS, kind)
    progress, back, moments_back = checkpoint.load_state(SPECS, kind, data)
    assert progress == STANDS
    assert _bits(back) == _bits(tensors)
    assert _bits(moments_back) == _bits(moments)


def test_the_bytes_are_these() -> None:
    """The bytes are three uint64, the tensors in order, and the moments, little-endian."""
    specs = (TensorSpec("w", (2,), "trainable", decayed=False),)
    stands = checkpoint.Progress(position=Position(1, 2), schedule_step=3)
    values = {"w": np.array([1.0, -2.0], np.float32)}
    moments = {"momentum": np.array([0.5, 0.0], np.float32)}
    assert (
        checkpoint.dump_state(specs, "momentum", stands, values, moments).hex()
        == (
            "0100000000000000" + "0200000000000000" + "0300000000000000"  # epoch, offset, schedule
            "0000803f" + "000000c0"  # w
            "0000003f" + "00000000"  # momentum
        )
    )


def test_what_comes_back_is_a_copy() -> None:
    """Changing the loaded arrays changes neither the bytes nor the dumped arrays."""
    tensors, moments = _content("adamw")
    data = checkpoint.dump_state(SPECS, "adamw", STANDS, tensors, moments)
    before = bytes(data)
    _, back, moments_back = checkpoint.load_state(SPECS, "adamw", data)
    back["w"][...] = 7
    moments_back["exp_avg"][...] = 7
    assert data == before
    tensors["w"][...] = 8
    assert data == before


@given(st.sampled_from(sorted(optimizer.STATE)), st.integers(-30, 30).filter(bool))
def test_another_size_is_refused(kind: str, by: int) -> None:
    """The message names the size received and the size expected."""
    due = checkpoint.state_bytes(SPECS, kind)
    with pytest.raises(ValueError, match=f"a state of {due + by} bytes: expected {due}"):
        checkpoint.load_state(SPECS, kind, bytes(due + by))


def test_it_is_copied_once() -> None:
    """Dump and load each allocate memory for one copy only."""
    specs = tuple(TensorSpec(f"w{i}", (2**18,), "trainable", decayed=False) for i in range(8))
    tensors = {spec.name: np.zeros(spec.shape, np.float32) for spec in specs}
    size = checkpoint.state_bytes(specs, "sgd")
    tracemalloc.start()
    data = checkpoint.dump_state(specs, "sgd", STANDS, tensors, {})
    dumping = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    loaded = checkpoint.load_state(specs, "sgd", data)
    loading = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert loaded[0] == STANDS
    assert size <= dumping < 1.1 * size
    assert 2 * size <= loading < 2.1 * size  # `data` is there, too
