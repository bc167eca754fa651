"""The canonical reduce-scatter of one model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import entrenar_py
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.canonical import requirements
from entrenar_py.train.canonical.sharded_reducer import ShardedReducer


def sharded(
    module: nn.Module | None = None, *, mesh: tuple[int, ...] = (1,), **options: Any
) -> Any:
    """Shard a small model on the CPU."""
    names = ("replicas", "shards")[-len(mesh) :]
    options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    return fully_shard(nn.Linear(3, 2) if module is None else module, **options)


def backward(model: Any, reducer: ShardedReducer, inputs: Tensor) -> None:
    """Run the loop over `inputs`, a micro-batch each."""
    for batch in reducer.fold(inputs):
        model(batch).square().mean().backward()


def test_the_mean_of_all_micro_batches(alone: None) -> None:
    """`.grad` after the loop is the gradient of the mean loss, without any earlier gradient."""
    model = sharded()
    weights = dict(model.named_parameters())
    reducer = entrenar_py.canonical_reduce_scatter(model, micro_batches=4)
    inputs, weight, bias = torch.randn(4, 5, 3), *(one.full_tensor() for one in weights.values())
    loss = nn.functional.linear(inputs, weight, bias).square().mean()
    (expected,) = torch.autograd.grad(loss, weight)
    for _ in range(2):
        backward(model, reducer, inputs)
        torch.testing.assert_close(weights["weight"].grad.full_tensor(), expected)


def test_the_norm_of_all_gradients(alone: None) -> None:
    """Clipping returns the norm of all gradients together, and scales them to `max_norm`."""
    model = sharded()
    reducer = entrenar_py.canonical_reduce_scatter(model, micro_batches=2)
    with pytest.raises(UsageError, match="call it after the loop over fold"):
        reducer.clip_grad_norm_(1.0)
    backward(model, reducer, torch.randn(2, 5, 3))
    flat = torch.cat([one.grad.full_tensor().flatten() for one in model.parameters()])
    for max_norm, scale in ((1e9, 1.0), (0.01, 0.01 / float(flat.norm()))):
        torch.testing.assert_close(reducer.clip_grad_norm_(max_norm), flat.norm())
        clipped = torch.cat([one.grad.full_tensor().flatten() for one in model.parameters()])
        torch.testing.assert_close(clipped, flat * scale, rtol=1e-3, atol=0.0)


def test_a_model_that_has_computed_is_sharded_again(alone: None) -> None:
    """A reducer can be created after a forward pass, which leaves the root's parameters whole."""
    model = sharded()
    model(torch.randn(1, 3))
    reducer = entrenar_py.canonical_reduce_scatter(model, micro_batches=1)
    backward(model, reducer, torch.randn(1, 5, 3))


def frozen_norm() -> nn.Module:
    """Return a model with a batch norm that is not frozen."""
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def ignoring() -> Any:
    """Return a model with a parameter that is not sharded."""
    model = nn.Linear(3, 2)
    return sharded(model, ignored_params={model.bias})


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Linear(3, 2), "model is a Linear: shard it first"),
        (lambda: nn.Sequential(sharded()), "model is a Sequential: .* also the outermost module"),
        (lambda: sharded(mesh=(1, 1)), "parameter weight has .* a mesh of 2 dimensions"),
        (ignoring, "parameter bias is not sharded"),
        (lambda: sharded(nn.Linear(3, 2).double()), "weight has dtype torch.float64"),
        (lambda: sharded(frozen_norm()), "module 1 is a .*BatchNorm1d"),
        (lambda: sharded(nn.Embedding(3, 2, sparse=True)), "makes sparse gradients"),
        (
            lambda: sharded(nn.Linear(3, 2).requires_grad_(False)),
            "no parameter of the model requires a gradient",
        ),
    ],
)
def test_models_without_a_promise(alone: None, model: Callable[[], nn.Module], words: str) -> None:
    """Unsupported models are refused before training."""
    with pytest.raises(UsageError, match=words):
        entrenar_py.canonical_reduce_scatter(model(), micro_batches=2)


def test_numbers_and_settings_are_checked(alone: None) -> None:
    """Numbers without a tree and nondeterministic kernels are refused."""
    with pytest.raises(UsageError, match="micro_batches=6: only a power of two"):
        entrenar_py.canonical_reduce_scatter(sharded(), micro_batches=6)
    torch.use_deterministic_algorithms(False)
    with pytest.raises(UsageError, match="are_deterministic_algorithms_enabled"):
        entrenar_py.canonical_reduce_scatter(sharded(), micro_batches=2)


def test_a_rank_with_fewer_micro_batches_repeats_its_last_one(alone: None) -> None:
    """All ranks take as many batches, so loops that count them end together."""
    reducer = entrenar_py.canonical_reduce_scatter(sharded(), micro_batches=2)
    reducer.shards = (0, 1, 1)  # as if another rank had more
    reducer._keep = lambda: None  # type: ignore[method-assign]
    batches = iter(torch.randn(4, 5, 3))
    seen = [(reducer.shard, reducer.is_repeat) for _ in reducer.fold(batches)]
    assert seen == [(0, False), (1, False), (1, True)]
    assert len(list(batches)) == 1
    assert not reducer.is_repeat


def test_an_odd_number_of_ranks_exchanges_each_gradient() -> None:
    """Otherwise the tree's nodes would have to be shared evenly."""
    with pytest.raises(UsageError, match=r"world_size=3: .* ranks, or use sync_each=True"):
        requirements.require_even(3, otherwise="use sync_each=True")


def test_a_sum_in_float16(alone: None) -> None:
    """A sum in float16 is refused at the first one: it could overflow."""
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    reducer = entrenar_py.canonical_reduce_scatter(model, micro_batches=1)
    with pytest.raises(UsageError, match=r"module model is reduced in torch\.float16"):
        backward(model, reducer, torch.randn(1, 5, 3))


@pytest.mark.parametrize("sync_each", [True, False])
@pytest.mark.parametrize("left_out", [0, 1, 2, 3])
def test_a_micro_batch_without_backward_pass(alone: None, left_out: int, sync_each: bool) -> None:
    """A missing backward pass is an error, also in the last micro-batch."""
    model = sharded()
    reducer = entrenar_py.canonical_reduce_scatter(model, micro_batches=4, sync_each=sync_each)

    def train() -> None:
        for batch in reducer.fold(torch.randn(4, 1, 3)):
            if reducer.shard != left_out:
                model(batch).sum().backward()

    with pytest.raises(UsageError, match=f"micro-batch {left_out}.* no gradient for bias"):
        train()


class Sometimes(nn.Module):
    """A model with a layer that takes part in the forward pass of some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        return self.sometimes(out) if float(x[0, 0]) > 0 else out


@pytest.mark.parametrize(
    ("signs", "words", "sync_each"),
    [
        ((-1, 1), r"micro-batch 0.* for sometimes.bias \(2 of 4 parameters\)", True),
        ((-1, 1), r"micro-batch 0.* for sometimes.bias \(2 of 4 parameters\)", False),
        ((1, -1), r"reduced with 8 elements in micro-batch 1, and with 14 before", True),
        ((1, -1), r"micro-batch 1.* for sometimes.bias \(2 of 4 parameters\)", False),
    ],
)
def test_a_parameter_without_gradient(
    alone: None, signs: tuple[int, int], words: str, sync_each: bool
) -> None:
    """A micro-batch that leaves out a parameter is an error, the first or a later one."""
    model = sharded(Sometimes())
    reducer = entrenar_py.canonical_reduce_scatter(model, micro_batches=2, sync_each=sync_each)
    with pytest.raises(UsageError, match=words):
        backward(model, reducer, torch.stack([torch.full((1, 3), float(sign)) for sign in signs]))


def test_a_backward_pass_outside_of_the_loop(alone: None) -> None:
    """A training loop that doesn't use `fold` is an error."""
    model = sharded()
    entrenar_py.canonical_reduce_scatter(model, micro_batches=1)
    with pytest.raises(UsageError, match="outside of the loop over fold"):
        model(torch.randn(1, 3)).sum().backward()


def test_a_second_backward_pass(alone: None) -> None:
    """A second backward pass is an error: its sums would depend on the world size."""
    model = sharded()
    reducer = entrenar_py.canonical_reduce_scatter(model, micro_batches=2)
    batches = reducer.fold(torch.randn(2, 5, 3))
    batch = next(batches)
    model(batch).sum().backward()
    loss = model(batch).sum()
    with pytest.raises(UsageError, match="module model is reduced twice in micro-batch 0"):
        loss.backward()


def test_a_reducer_that_was_replaced(alone: None) -> None:
    """A reducer is of no use after another one of the same model: the model has its hooks."""
    model = sharded()
    first, second = (entrenar_py.canonical_reduce_scatter(model, micro_batches=1) for _ in range(2))
    backward(model, second, torch.randn(1, 5, 3))
    with pytest.raises(UsageError, match="outside of the loop over fold"):
        backward(model, first, torch.randn(1, 5, 3))


def test_each_module_is_reduced_by_the_reducer(alone: None) -> None:
    """Another reduction of one module is an error, and not another gradient."""
    model = sharded(nn.Sequential(sharded(nn.Linear(3, 3)), nn.Linear(3, 2)))
    reducer = entrenar_py.canonical_reduce_scatter(model, micro_batches=2)
    model[0].set_gradient_divide_factor(2.0)
    with pytest.raises(UsageError, match="the reductions of module 0 were changed"):
        backward(model, reducer, torch.randn(2, 5, 3))
    reducer = entrenar_py.canonical_reduce_scatter(model, micro_batches=2)
    backward(model, reducer, torch.randn(2, 5, 3))
    model[0].set_all_reduce_hook(lambda node: None)
    with pytest.raises(UsageError, match=r"no gradient for 0\.bias \(2 of 4 parameters\)"):
        backward(model, reducer, torch.randn(2, 5, 3))


class Twice(nn.Module):
    """A model whose weight gets its gradient in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layer, self.layer(x), use_reentrant=True)
        return out


def test_a_gradient_in_two_parts(alone: None) -> None:
    """It is an error where FSDP would add the parts to another micro-batch's, one by one."""
    model = sharded(Twice())
    reducer = entrenar_py.canonical_reduce_scatter(model, micro_batches=2, sync_each=False)
    with pytest.raises(UsageError, match="is added in several parts in micro-batch 1"):
        backward(model, reducer, torch.randn(2, 5, 3))


def test_siblings_are_reduced_at_once(alone: None) -> None:
    """With one exchange a step, FSDP adds each second micro-batch to the one before."""
    model = sharded()
    reducer = entrenar_py.canonical_reduce_scatter(model, micro_batches=8, sync_each=False)
    reduced = []

    def reduce(node: Tensor) -> None:
        reduced.append(reducer.shard)
        reducer._reduce("", node)

    model.set_all_reduce_hook(reduce)
    with pytest.raises(UsageError, match="the reductions of module model were changed"):
        backward(model, reducer, torch.randn(8, 5, 3))
    assert reduced == [1, 3, 5, 7]


@pytest.mark.parametrize("sync_each", [True, False])
def test_a_batch_left_early_leaves_nothing_behind(alone: None, sync_each: bool) -> None:
    """A loop that ends with a break leaves no gradients, and doesn't change the next batch's."""
    model = sharded()
    reducer = entrenar_py.canonical_reduce_scatter(model, micro_batches=2, sync_each=sync_each)
    found = []
    for leave in (False, True, False):
        for batch in reducer.fold(torch.ones(2, 1, 3)):
            model(batch).sum().backward()
            if leave:
                break
        found.append(next(model.parameters()).grad)
    assert found[1] is None
    assert torch.equal(found[0].full_tensor(), found[2].full_tensor())


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        (partial(torch.optim.AdamW, lr=0.01), torch.float32),
        (partial(torch.optim.AdamW, lr=0.01), torch.bfloat16),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.float32),
    ],
)
def test_an_optimizer_gives_shards_the_bits_of_the_whole(
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    """On the CPU it computes the last elements of a tensor in the same way as all others."""
    draws = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(301, generator=draws).to(dtype) for _ in range(2))

    def stepped(size: int) -> Tensor:
        parts = [nn.Parameter(one.clone()) for one in torch.split(weight, size)]
        steps = optimizer(parts)
        for scale in (1.0, 0.3, 5.0):
            for part, own in zip(parts, torch.split(gradient, size), strict=True):
                part.grad = own * scale
            steps.step()
        return torch.cat([one.detach() for one in parts])

    assert all(torch.equal(stepped(size), stepped(301)) for size in (1, 7, 76, 151))
