"""Dropout by a key: what it replaces, and that a block computed again drops the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from entrenar_py.compute import draws, open_backend
from entrenar_py.compute.wgpu.program import compile_step
from entrenar_py.shared.errors import BackendUnavailable, UsageError
from entrenar_py.train.arithmetic import engine
from entrenar_py.train.model import masks, model, preparation
from entrenar_py.train.model.masks import Masks
from entrenar_py.train.model.settings import Lora
from entrenar_py.train.model.workload import Finetuning
from tests.train.model import checkpoints

KEY = torch.tensor([7, -9], dtype=torch.int32)


def test_what_is_dropped_follows_from_key_and_call() -> None:
    """Each call draws its own mask, whatever torch's generator drew before."""
    x = torch.ones(40, 50)
    for _ in range(2):
        torch.rand(3)
        with Masks(KEY):
            first = F.dropout(x, 0.25)
            second = nn.Dropout(0.5)(x)
        assert torch.equal(first, draws.kept(KEY, 0, x.shape, 0.25) / 0.75)
        assert torch.equal(second, draws.kept(KEY, 1, x.shape, 0.5) * 2.0)


def test_nothing_is_dropped_without_reason() -> None:
    """Without a key, in evaluation, or with a share of 0 a tensor is returned as it is."""
    x = torch.ones(5)
    with Masks(None):
        assert F.dropout(x, 0.5) is x
    with Masks(KEY):
        assert F.dropout(x, 0.5, training=False) is x
        assert F.dropout(x, 0.0) is x
        assert torch.equal(F.dropout(x, 1.0), torch.zeros(5))


def test_channels_are_dropped_whole() -> None:
    """A mask of channels has one element for each; in place it changes its operand."""
    x = torch.ones(6, 7, 4, 3)
    with Masks(KEY):
        found = F.dropout2d(x, 0.5)
        same = F.dropout(x, 0.5, inplace=True)
    assert same is x
    assert set(found.sum((2, 3)).flatten().tolist()) == {0.0, 24.0}
    assert set(x.flatten().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("causal", [False, True])
def test_attention_that_drops(causal: bool) -> None:
    """Attention that drops is attention whose weights are masked; a row without weights is zero."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 8, generator=generator)
    key, value = (torch.randn(2, 2, 5, 8, generator=generator) for _ in range(2))
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    allowed[3] = causal and allowed[3]
    given: dict[str, Any] = {"is_causal": True} if causal else {"attn_mask": allowed}
    with Masks(KEY):
        kept = F.scaled_dot_product_attention(query, key, value, **given, enable_gqa=True)
        found = F.scaled_dot_product_attention(
            query, key, value, **given, dropout_p=0.25, enable_gqa=True
        )
    wide_key, wide_value = (one.repeat_interleave(2, 1) for one in (key, value))
    scores = (query @ wide_key.mT / 8**0.5).masked_fill(~allowed, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(kept, weights @ wide_value)
    mask = draws.kept(KEY, 0, weights.shape, 0.25) / 0.75
    torch.testing.assert_close(found, (weights * mask) @ wide_value)


def gradients(block: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """Return the result of two blocks and the gradient of `x`, which a step draws by KEY."""
    x = x.clone().requires_grad_()
    with Masks(KEY):
        result = block(block(x))
    return result.detach(), *torch.autograd.grad(result.sum(), x)


def test_a_block_computed_again_drops_the_same() -> None:
    """Recomputation in the backward pass, after the masks were left, repeats a block's masks."""
    x = torch.linspace(-1, 2, 300)

    def block(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, 0.3).sin(), 0.4)

    def recomputed(x: Tensor) -> Tensor:
        def contexts() -> tuple[AbstractContextManager[None], Masks]:
            return nullcontext(), masks.repetition()

        found: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return found

    for one, other in zip(gradients(block, x), gradients(recomputed, x), strict=True):
        assert torch.equal(one, other)
    with masks.repetition():  # of no masks
        assert torch.equal(block(x), x.sin())


@pytest.mark.wgpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_on_a_device_drops_what_the_cpu_drops(attention: str) -> None:
    """A model with dropout in embeddings, attention and layers has the CPU's gradients on wgpu."""
    transformers = pytest.importorskip("transformers")
    try:
        device = open_backend("wgpu").programs.device  # type: ignore[attr-defined]
    except BackendUnavailable as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=31, n_embd=16, n_layer=1, n_head=2, n_positions=8, attn_implementation=attention
    )
    model = transformers.GPT2LMHeadModel(config).train()
    held = {name: one.detach() for name, one in model.named_parameters()}
    ids = torch.tensor([[3, 14, 15, 9, 2, 6], [5, 30, 5, 8, 9, 7]])

    def fn(key: Tensor, ids: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in weights]
        named = dict(zip(held, leaves, strict=True))
        given = {"input_ids": ids, "labels": ids, "use_cache": False}
        with Masks(key):
            loss = torch.func.functional_call(model, named, (), given).loss
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    program = compile_step(device, fn, [KEY, ids, *held.values()])
    losses = []
    for key in (KEY, KEY + 1):
        inputs = [key, ids, *held.values()]
        expected = fn(*inputs)
        for one, right in zip(program.run([x.numpy() for x in inputs]), expected, strict=True):
            distance = (torch.from_numpy(one) - right).abs().max()
            assert distance <= 3e-6 * max(float(right.abs().max()), 1e-3)
        losses.append(float(expected[0]))
    assert losses[0] != losses[1]


# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
IDS = [0, 1, 2, 3]


def gradient(workload: Finetuning) -> tuple[float, list[Any]]:
    """Return loss and gradient of a few samples."""
    drop = engine.Dropout(0.0, np.random.default_rng(1))
    tensors = {  # not those of the module: a block has to be computed again with the same ones
        name: torch.from_numpy(array + np.float32(0.01)).requires_grad_()
        for name, array in workload.initial(np.random.default_rng(0)).items()
    }
    return workload.gradients(tensors, IDS, drop=drop, scale=1.0)


@pytest.mark.parametrize("kind", [checkpoints.qwen3, checkpoints.llama, checkpoints.opt])
def test_gradients_have_the_same_bits(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[], Any]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = replace(
        checkpoints.settings(small, tmp_path / "model", kind()),
        method="lora",
        lora=Lora(rank=2, dropout=0.3),
    )
    found = {}
    for choice in ("none", "blocks"):
        workload = preparation.prepare(replace(settings, recompute=choice)).workload()
        found[choice] = gradient(workload)
    loss, gradients = found["none"]
    again, same = found["blocks"]
    assert again == loss
    assert all(np.array_equal(one, two) for one, two in zip(gradients, same, strict=True))
    assert any(np.abs(one).max() > 0 for one in gradients)


def test_a_block_is_computed_twice(small: Path, tmp_path: Path) -> None:
    settings = checkpoints.settings(small, tmp_path / "model", checkpoints.llama())
    module: Any = model.load(replace(settings, recompute="blocks"), pad_token=0)
    calls = []
    block = module.model.layers[0]
    block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    tokens = torch.tensor([[1, 2, 3]])
    module(input_ids=tokens).logits.sum().backward()
    assert len(calls) == 2
    module.eval()
    module(input_ids=tokens)
    assert len(calls) == 3


def test_a_model_without_blocks_is_refused() -> None:
    module: Any = torch.nn.Linear(2, 2)
    module.config = type("Config", (), {"get_text_config": lambda self: self})()
    with pytest.raises(UsageError, match="Linear has no list of None blocks"):
        masks.recompute(module)


@pytest.mark.wgpu
def test_blocks_are_computed_again_on_wgpu(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try:
        backend = open_backend("wgpu")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    settings = checkpoints.settings(small, tmp_path / "model", checkpoints.llama())
    settings = replace(settings, method="lora", lora=Lora(rank=2))
    vectors = []
    for choice in ("none", "blocks"):
        workload = preparation.prepare(replace(settings, recompute=choice)).workload()
        start = workload.initial(np.random.default_rng(0))
        replica = engine.Engine(workload, backend, start, scale=1.0)
        vectors.append(replica.shard(IDS, accumulation=1, drop=engine.no_dropout)[0])
    none, blocks = vectors
    assert np.array_equal(none, blocks)
