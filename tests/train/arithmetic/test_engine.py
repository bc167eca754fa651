"""Dropout's masks, and one shard's gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)

from entrenar_py.compute import open_backend
from entrenar_py.train.arithmetic import engine, workload
from entrenar_py.train.arithmetic.engine import Dropout, Engine
from entrenar_py.train.arithmetic.tensors import Array, Workload


def _dropout(rate: float = 0.5, seed: int = 0) -> Dropout:
    return Dropout(rate, np.random.default_rng(seed))


def test_elements_are_zeroed_or_scaled() -> None:
    """Elements are 0 or x / (1 - rate), about `rate` of them 0, and the mean stays."""
    rate, size = 0.25, 40_000
    out = _dropout(rate)(torch.ones(200, 200))
    kept = out != 0
    assert set(out[kept].tolist()) == {float(np.float32(1) / np.float32(1 - rate))}
    zeroed = 1 - kept.double().mean().item()
    assert abs(zeroed - rate) < 5 * (rate * (1 - rate) / size) ** 0.5  # five standard deviations


def test_the_gradient_goes_through_the_same_mask() -> None:
    """Elements that were zeroed get no gradient."""
    x = torch.ones(50, requires_grad=True)
    out = _dropout()(x)
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())


def test_the_same_stream_gives_the_same_masks() -> None:
    """The same stream gives the same masks and digest, another stream gives others."""
    one, same, other = _dropout(), _dropout(), _dropout(seed=1)
    x = torch.ones(3, 40)
    assert torch.equal(one(x), same(x))
    assert not torch.equal(one(x), other(x))
    same(x)
    assert one.digest() == same.digest() != other.digest()


def test_the_digest_names_the_stream() -> None:
    """The digest does not depend on the amount drawn: shards of two sizes share it."""
    few, many = _dropout(), _dropout()
    few(torch.ones(2, 8))
    many(torch.ones(3, 8))
    first = many.digest()
    many(torch.ones(8))
    assert few.digest() == first == many.digest()


def test_the_digest_does_not_depend_on_values() -> None:
    """Only masks are digested, so a shard computed again from other weights has the same digest."""
    one, other = _dropout(), _dropout()
    one(torch.zeros(9))
    other(torch.full((9,), 3.0))
    assert one.digest() == other.digest()


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3, 5)])
def test_shapes_are_kept(shape: tuple[int, ...]) -> None:
    """The result has the shape of the input, for any shape."""
    assert _dropout()(torch.ones(shape)).shape == shape


def test_nothing_drawn_has_no_digest() -> None:
    """The digest of a model without dropout is None."""
    assert _dropout().digest() is None


def test_none_is_the_identity() -> None:
    """`none` returns the tensor itself."""
    x = torch.ones(2)
    assert engine.no_dropout(x) is x


def test_a_batch_draws_what_its_shards_draw() -> None:
    """One call for the whole batch gives the masks of its shards, concatenated."""
    sizes = (3, 0, 2)
    streams = [np.random.default_rng(shard) for shard in range(3)]
    whole = engine.Dropout(0.5, engine.ShardStreams(list(zip(streams, sizes, strict=True))))
    parts = [engine.Dropout(0.5, np.random.default_rng(shard)) for shard in range(3)]
    for rows in (1, 4):  # samples of one row, and of four
        x = torch.ones(5 * rows, 6)
        expected = [
            part(torch.ones(size * rows, 6)) for part, size in zip(parts, sizes, strict=True)
        ]
        assert torch.equal(whole(x), torch.cat(expected))
    assert whole.digest() == parts[0].digest()


NAMES = ("linear", "mlp", "decoder", "vectors")


def _workload(name: str) -> Workload:
    return workload.build(name, num_samples=24, width=8, data=np.random.default_rng(0))


def _engine(name: str, scale: float = 1.0) -> Engine:
    model = _workload(name)
    return Engine(model, open_backend("cpu"), model.initial(np.random.default_rng(1)), scale=scale)


def _shard(replica: Engine, ids: list[int], accumulation: int = 1) -> tuple[Array, float, float]:
    return replica.shard(ids, accumulation=accumulation, drop=engine.no_dropout)


@pytest.mark.parametrize(
    ("weight_max", "exponent"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1024, 10), (1025, 11)]
)
def test_the_scale_is_the_next_power_of_two(weight_max: int, exponent: int) -> None:
    """2^-p with the smallest 2^p that is at least the weight."""
    assert engine.scale_of(weight_max) == 2.0**-exponent


@pytest.mark.parametrize("name", NAMES)
def test_a_shard_is_autograd_s_sum(name: str) -> None:
    """A shard's vector holds autograd's gradients of the summed loss, then the buffers' sums."""
    replica, ids = _engine(name), [3, 1, 4, 15]
    vector, loss, weight = _shard(replica, ids)
    model = replica.workload
    tensors = {n: torch.tensor(a) for n, a in replica.arrays.items()}
    leaves = [tensors[n].requires_grad_() for n in replica.layout.trainable]
    expected = model.loss_of(tensors, model.batch(ids), linear=F.linear, drop=engine.no_dropout)
    parts = [g.reshape(-1).numpy() for g in torch.autograd.grad(expected, leaves)]
    parts += [total.reshape(-1) for total in model.statistics(ids).values()]
    assert vector.tobytes() == np.concatenate(parts).tobytes()
    assert (loss, weight) == (expected.item(), model.weight(ids))


@pytest.mark.parametrize("name", NAMES)
def test_the_scale_changes_no_bit(name: str) -> None:
    """A power of two scales the vector exactly, and leaves loss and weight alone."""
    plain, plain_loss, plain_weight = _shard(_engine(name), [0, 5, 7])
    scaled, loss, weight = _shard(_engine(name, scale=2.0**-12), [0, 5, 7])
    assert (scaled * np.float32(2.0**12)).tobytes() == plain.tobytes()
    assert (loss, weight) == (plain_loss, plain_weight)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("accumulation", [2, 3, 4, 9])
def test_micro_batches_add_up(name: str, accumulation: int) -> None:
    """Accumulation equals one large batch within float32 rounding, also with empty parts."""
    replica, ids = _engine(name), [0, 2, 4, 6, 8]
    whole, loss, weight = _shard(replica, ids)
    vector, parts_loss, parts_weight = _shard(replica, ids, accumulation)
    largest = np.sum([np.abs(_shard(replica, [sample])[0]) for sample in ids], axis=0)
    # Two sums of the same terms; each dot product behind a term is shorter than 1,000 products.
    assert (np.abs(vector - whole) <= 1000 * 2.0**-24 * largest.max()).all()
    assert parts_loss == pytest.approx(loss, rel=1e-5)
    assert parts_weight == weight


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_empty_shard_is_zero(name: str, accumulation: int) -> None:
    """An empty shard gives zeros of full length, and loss and weight 0."""
    replica = _engine(name)
    vector, loss, weight = _shard(replica, [], accumulation)
    assert vector.tobytes() == np.zeros_like(_shard(replica, [1])[0]).tobytes()
    assert (loss, weight) == (0.0, 0.0)


def test_a_replica_owns_its_memory() -> None:
    """A replica copies its initial tensors, and its three views of them agree."""
    model = _workload("mlp")
    initial = model.initial(np.random.default_rng(1))
    replica = Engine(model, open_backend("cpu"), initial, scale=1.0)
    kept = {name: array.copy() for name, array in initial.items()}
    replica.parameters += 1
    for name, part in replica.layout.trainable.items():
        assert np.array_equal(initial[name], kept[name])
        assert np.array_equal(replica.arrays[name].reshape(-1), replica.parameters[part])
        assert np.array_equal(replica.tensors[name].detach().numpy(), replica.arrays[name])
    for name, array in replica.arrays.items():
        assert not np.shares_memory(array, initial[name])


def test_gradients_in_one_piece_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that returns parts of one vector, in their order, has them taken as that."""
    replica = _engine("decoder")
    expected, _, _ = _shard(replica, [1, 2])
    shapes = [spec.shape for spec in replica.workload.specs if spec.role == "trainable"]
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    whole = np.append(expected, np.float32(7))
    pieces = np.split(whole, ends)[:-1]
    parts = [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    given = iter([parts, [parts[0].copy(), *parts[1:]], [part.copy() for part in parts]])
    monkeypatch.setattr(replica, "stepper", lambda ids, drop: (1.0, [*next(given)]))
    vector, _, _ = _shard(replica, [1, 2])
    assert vector.tobytes() == expected.tobytes()
    assert np.shares_memory(vector, whole)
    for _ in range(2):
        vector, _, _ = _shard(replica, [1, 2])
        assert vector.tobytes() == whole[:-1].tobytes()
        assert not np.shares_memory(vector, whole)


def test_a_shard_changes_nothing() -> None:
    """No weight, buffer or `.grad` changes, so a shard can be computed again."""
    replica = _engine("decoder")
    before = {name: array.tobytes() for name, array in replica.arrays.items()}
    first, again = _shard(replica, [1, 2]), _shard(replica, [1, 2])
    assert first[0].tobytes() == again[0].tobytes()
    assert {name: array.tobytes() for name, array in replica.arrays.items()} == before
    assert all(tensor.grad is None for tensor in replica.tensors.values())


def test_buffers_move_towards_the_mean() -> None:
    """The update is running += 0.1 (mean - running), as in torch's batch norm."""
    replica = _engine("mlp")
    vector, _, weight = _shard(replica, [0, 1, 2])
    average = vector / np.float32(weight)
    expected = torch.nn.BatchNorm1d(64, momentum=engine.BUFFER_MOMENTUM)
    inputs = torch.from_numpy(average[replica.layout.buffers["running_mean"]])
    for _ in range(3):
        replica.average_buffers(average)
        expected(inputs.expand(2, 64))
    assert expected.running_mean is not None
    assert np.allclose(replica.arrays["running_mean"], expected.running_mean.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "place"),
    [([1, 2], None), ([], None), ([1, np.nan], 1), ([np.inf, np.nan], 0), ([1, -np.inf, 2], 1)],
)
def test_non_finite_finds_the_first(values: list[float], place: int | None) -> None:
    """It finds NaN and both infinities, and returns None if all are finite."""
    assert engine.non_finite(np.array(values, np.float32)) == place
