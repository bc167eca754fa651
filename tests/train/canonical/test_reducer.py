"""The canonical all-reduce of one model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config as compiler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import entrenar_py
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.canonical import reducer, requirements
from entrenar_py.train.canonical.exchange import add_tree

MATMUL, THREADS = torch.backends.cuda.matmul, torch.get_num_threads()
FIRST, SECOND = torch.zeros(7), torch.zeros(5, dtype=torch.bfloat16)


def leaves(count: int) -> list[reducer.Gradients]:
    """Return the gradients of `count` micro-batches, for two parameters of two dtypes."""
    draws = torch.Generator().manual_seed(count)
    return [
        {one: torch.randn(one.shape, generator=draws).to(one.dtype) for one in (FIRST, SECOND)}
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_the_fold_has_the_bits_of_the_tree(count: int) -> None:
    """The counter's sum of 2^i micro-batches has the tree's bits, and no node is left over."""
    nodes = leaves(count)
    expected = []
    for one in (FIRST, SECOND):
        expected.append(torch.empty_like(one))
        add_tree(torch.stack([node[one] for node in nodes]), scale=1.0, out=expected[-1])
    counter = reducer.Counter()
    for node in nodes[:-1]:
        counter.push(node)
    got: list[Tensor] = [nodes[-1][SECOND], nodes[-1][FIRST]]
    counter.complete([SECOND, FIRST], got)
    assert torch.equal(got[1], expected[0])
    assert torch.equal(got[0], expected[1])
    assert not any(node for _, node in counter._nodes)


def test_a_counter_counts_the_next_step() -> None:
    """Without `clear`, if all nodes of the last step were completed."""
    sums = []
    counter = reducer.Counter()
    for _ in range(2):
        nodes = leaves(4)
        for node in nodes[:-1]:
            counter.push(node)
        last = [nodes[-1][FIRST], nodes[-1][SECOND]]
        assert counter.complete([FIRST, SECOND], last) == []
        sums.append(last)
    assert all(torch.equal(*pair) for pair in zip(*sums, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 100])
def test_as_many_nodes_wait_as_bits_are_set(count: int) -> None:
    """After k micro-batches, as many nodes are pending as bits are set in k."""
    counter = reducer.Counter()
    for node in leaves(count):
        counter.push(node)
    assert len(counter._nodes) == count.bit_count()


def test_taking_leaves_nothing_behind() -> None:
    """`take` resets `.grad`, and leaves out parameters without a gradient."""
    one, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    one.sum().backward()  # type: ignore[no-untyped-call]
    assert list(reducer.take([one, other])) == [one]
    assert one.grad is None


def wrapped(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    """Wrap a small model in DistributedDataParallel."""
    return DistributedDataParallel(nn.Linear(3, 2) if module is None else module, **options)


def test_the_mean_of_all_micro_batches(alone: None) -> None:
    """`.grad` after the loop is the gradient of the mean loss, without any earlier gradient."""
    ddp = wrapped()
    reducer = entrenar_py.canonical_all_reduce(ddp, micro_batches=4)
    inputs = torch.randn(4, 5, 3)
    expected = torch.autograd.grad(ddp.module(inputs).square().mean(), ddp.module.weight)[0]
    for _ in range(2):
        for batch in reducer.fold(inputs):
            ddp(batch).square().mean().backward()
        torch.testing.assert_close(ddp.module.weight.grad, expected)


def test_shards_are_named_while_they_are_in_hand(alone: None) -> None:
    """`reducer.shard` is the index in the global batch, and an error outside of the loop."""
    ddp = wrapped()
    reducer = entrenar_py.canonical_all_reduce(ddp, micro_batches=2)
    seen = []
    for batch in reducer.fold(iter(torch.randn(5, 1, 3))):
        seen.append(reducer.shard)
        ddp(batch).sum().backward()
    assert seen == list(reducer.shards) == [0, 1]
    with pytest.raises(UsageError, match="outside of the loop over fold"):
        _ = reducer.shard


@pytest.mark.parametrize(
    ("micro_batches", "world_size", "words"),
    [
        (6, 2, "micro_batches=6: only a power of two"),
        (0, 1, "micro_batches=0"),
        ("8", 2, "micro_batches='8': only a power of two"),
        (8.0, 2, "micro_batches=8.0: only a power of two"),
        (2, 4, "micro_batches=2 with world_size=4: every rank needs a micro-batch"),
    ],
)
def test_numbers_without_a_tree(micro_batches: Any, world_size: int, words: str) -> None:
    """Numbers that are no powers of two, or fewer micro-batches than ranks, are refused."""
    with pytest.raises(UsageError, match=words):
        requirements.require_numbers(micro_batches=micro_batches, world_size=world_size)


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (nn.Linear(3, 2).double(), {}, "weight has dtype torch.float64"),
        (nn.BatchNorm1d(3), {}, "is a BatchNorm1d"),
        (nn.Embedding(3, 2, sparse=True), {}, "makes sparse gradients"),
        (nn.Linear(3, 2), {"find_unused_parameters": True}, "find_unused_parameters=True"),
        (nn.Linear(3, 2), {"static_graph": True}, "static_graph=True"),
    ],
)
def test_models_without_a_promise(
    alone: None, module: nn.Module, options: dict[str, Any], words: str
) -> None:
    """Unsupported models are refused before training."""
    with pytest.raises(UsageError, match=words):
        entrenar_py.canonical_all_reduce(wrapped(module, **options), micro_batches=2)


def test_a_model_that_is_not_wrapped() -> None:
    """A model that is not wrapped is refused with the call that wraps it."""
    with pytest.raises(UsageError, match="model is a Linear: wrap it first"):
        entrenar_py.canonical_all_reduce(nn.Linear(3, 2), micro_batches=2)  # type: ignore[arg-type]


def test_a_model_that_has_a_hook(alone: None) -> None:
    """A model with a communication hook, here of an earlier call, is refused."""
    model = wrapped()
    entrenar_py.canonical_all_reduce(model, micro_batches=2)
    with pytest.raises(UsageError, match="the model has a communication hook"):
        entrenar_py.canonical_all_reduce(model, micro_batches=2)


def test_memory_of_peers_is_for_gpus(alone: None) -> None:
    """`symmetric_memory=True` is refused for a model on a CPU."""
    with pytest.raises(UsageError, match="symmetric_memory=True with a model on cpu"):
        entrenar_py.canonical_all_reduce(wrapped(), micro_batches=2, symmetric_memory=True)


def test_frozen_batch_norm_is_let_in(alone: None) -> None:
    """Batch norm in eval mode is allowed: it doesn't mix samples."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    entrenar_py.canonical_all_reduce(wrapped(model), micro_batches=2)


def test_too_few_batches(alone: None) -> None:
    """Too few batches raise an error with the first micro-batch that is missing."""
    ddp = wrapped()
    reducer = entrenar_py.canonical_all_reduce(ddp, micro_batches=4)

    def train() -> None:
        for batch in reducer.fold(torch.randn(3, 1, 3)):
            ddp(batch).sum().backward()

    with pytest.raises(UsageError, match="before micro-batch 3, of this rank's 0 to 3"):
        train()


class Endless:
    """A loader that doesn't know its length."""

    def __len__(self) -> int:
        raise RuntimeError("unknown")

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.ones(9, 1, 3)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (list(torch.ones(4, 1, 3)), r"the micro-batches of all ranks, 4, .* \[batches\[shard\]"),
        (DataLoader(torch.ones(8, 3), batch_size=2), "a DataLoader of 4 micro-batches, .* iter"),  # type: ignore[arg-type]
        (torch.ones(2, 1, 3), None),
        (iter(torch.ones(4, 1, 3)), None),
        (torch.ones(8, 1, 3)[3:], None),
        (Endless(), None),
    ],
)
def test_batches_of_other_ranks_or_steps(alone: None, batches: Any, words: str | None) -> None:
    """All of a step, or a loader, would give every rank and step the same micro-batches."""
    reducer = entrenar_py.canonical_all_reduce(wrapped(), micro_batches=4)
    reducer.shards = range(2)  # as with two ranks
    if words is None:
        next(reducer.fold(batches))
    else:
        with pytest.raises(UsageError, match=rf"fold\(\) got {words}"):
            next(reducer.fold(batches))


@pytest.mark.parametrize("left_out", [1, 3])
def test_a_micro_batch_without_backward_pass(alone: None, left_out: int) -> None:
    """A missing backward pass is an error, also in the last micro-batch, where the hook runs."""
    ddp = wrapped()
    reducer = entrenar_py.canonical_all_reduce(ddp, micro_batches=4)

    def train() -> None:
        for batch in reducer.fold(torch.randn(4, 1, 3)):
            if reducer.shard != left_out:
                ddp(batch).sum().backward()

    with pytest.raises(UsageError, match=f"micro-batch {left_out}.* no gradient for bias"):
        train()


def test_a_backward_pass_outside_of_the_loop(alone: None) -> None:
    """A training loop that doesn't use `fold` is an error."""
    ddp = wrapped()
    entrenar_py.canonical_all_reduce(ddp, micro_batches=1)
    with pytest.raises(UsageError, match="outside of the loop over fold"):
        ddp(torch.randn(1, 3)).sum().backward()


def test_a_second_backward_pass(alone: None) -> None:
    """A second backward pass is an error: its sums would depend on the world size."""
    ddp = wrapped()
    reducer = entrenar_py.canonical_all_reduce(ddp, micro_batches=1)
    batches = reducer.fold(torch.randn(1, 5, 3))
    batch = next(batches)
    ddp(batch).sum().backward()
    loss = ddp(batch).sum()
    with pytest.raises(UsageError, match="a second backward pass in micro-batch 0"):
        loss.backward()


def test_a_batch_left_early_leaves_nothing_behind(alone: None) -> None:
    """A loop that ends with a break leaves no gradients, and doesn't change the next batch's."""
    ddp = wrapped()
    reducer = entrenar_py.canonical_all_reduce(ddp, micro_batches=2)
    found = []
    for leave in (False, True, False):
        for batch in reducer.fold(torch.ones(2, 1, 3)):
            ddp(batch).sum().backward()
            if leave:
                break
        found.append(ddp.module.weight.grad)
    assert found[1] is None
    assert torch.equal(found[0], found[2])


def test_a_loop_that_does_not_ask_for_more(alone: None) -> None:
    """The mean stays where the loop ends after the last micro-batch by another iterator."""
    ddp = wrapped()
    reducer = entrenar_py.canonical_all_reduce(ddp, micro_batches=2)
    for _, batch in zip(range(2), reducer.fold(torch.ones(2, 1, 3)), strict=False):
        ddp(batch).sum().backward()
    assert torch.equal(ddp.module.weight.grad, torch.ones(2, 3))


def test_settings_are_checked_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """One error lists all settings that are not deterministic."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with pytest.raises(UsageError) as caught:
        entrenar_py.require_deterministic()
    lines = str(caught.value).splitlines()[1:]
    assert [line.partition(" = ")[0].partition("=")[0] for line in lines] == [
        "torch.are_deterministic_algorithms_enabled()",
        "torch.backends.cudnn.benchmark",
        "CUBLAS_WORKSPACE_CONFIG",
    ]


def test_a_warning_is_not_enough() -> None:
    """warn_only=True is refused, since it allows nondeterministic kernels."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(UsageError, match="warn_only=True"):
            entrenar_py.require_deterministic()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("change", "restore", "words"),
    [
        (
            lambda: torch.set_num_threads(THREADS + 1),
            lambda: torch.set_num_threads(THREADS),
            rf"get_num_threads\(\) = {THREADS + 1}, and was {THREADS}",
        ),
        (
            lambda: setattr(MATMUL, "allow_fp16_reduced_precision_reduction", False),
            lambda: setattr(MATMUL, "allow_fp16_reduced_precision_reduction", True),
            "matmul.allow_fp16_reduced_precision_reduction = False, and was True",
        ),
        (
            lambda: setattr(compiler, "deterministic", False),
            lambda: setattr(compiler, "deterministic", True),
            "torch._inductor.config.deterministic = False, and was True",
        ),
    ],
)
def test_a_setting_moved_during_training(
    alone: None, change: Callable[[], None], restore: Callable[[], None], words: str
) -> None:
    """A setting that changed since the reducer was made is an error at the next batch."""
    reducer = entrenar_py.canonical_all_reduce(wrapped(), micro_batches=1)
    change()
    try:
        with pytest.raises(UsageError, match=words):
            next(iter(reducer.fold([torch.ones(1, 3)])))
    finally:
        restore()


def test_the_compiler_begins_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has not loaded it has the settings of one that has, and doesn't load it."""
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    name = "torch._inductor.config.deterministic"
    for value, expected in (("1", True), ("0", False)):
        monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", value)
        assert requirements.switches()[name] is expected
    assert "torch._inductor.config" not in sys.modules


@pytest.mark.parametrize("is_elastic", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model[0].bias.requires_grad_(True), "parameter 0.bias requires a gradient"),
        (lambda model: model[0].weight.requires_grad_(False), "parameter 0.weight is frozen now"),
        (lambda model: model.train(), "module 1 is a BatchNorm1d in training mode, and was not"),
    ],
)
def test_a_model_changed_during_training(
    alone: None, change: Callable[[Any], None], words: str, *, is_elastic: bool
) -> None:
    """What is trainable, and a batch norm's mode, are checked in every step. A dropout may train.

    DistributedDataParallel doesn't reduce what was frozen, so ranks would silently drift apart.
    """
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout()).eval()
    model[0].bias.requires_grad_(False)
    if is_elastic:
        optimizer = torch.optim.SGD(model.parameters())
        fold: Any = entrenar_py.elastic(model, optimizer, micro_batches=1)
        next(fold.steps(1))
    else:
        fold = entrenar_py.canonical_all_reduce(wrapped(model), micro_batches=1)
    model[2].train()
    next(fold.fold([torch.ones(2, 3)]))
    change(model)
    with pytest.raises(UsageError, match=words):
        next(fold.fold([torch.ones(2, 3)]))


def test_the_timeout_of_a_group(alone: None) -> None:
    """Shared memory's barriers wait as long as the group's collectives, whoever made it."""
    group = dist.new_group(timeout=timedelta(seconds=7))
    assert requirements.timeout_of(group, torch.device("cpu")) == timedelta(seconds=7)
    model = DistributedDataParallel(nn.Linear(3, 2), process_group=group)
    assert requirements.timeout_of(model.process_group, torch.device("cpu")).seconds == 7


def test_ranks_that_differ(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    """The error for different settings has the rank, the setting and both values."""

    def answers(everyone: list[Any], facts: Any, *, group: Any) -> None:
        everyone[:] = [facts, {**facts, "micro_batches": 4}]

    group = wrapped().process_group
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "all_gather_object", answers)
    with pytest.raises(UsageError, match="micro_batches = 4 on rank 1 and 8 on rank 0"):
        requirements.require_same({"micro_batches": 8, **requirements.switches()}, group)


def test_importing_the_package_imports_no_torch() -> None:
    """`import entrenar_py` doesn't import torch."""
    code = "import entrenar_py, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
