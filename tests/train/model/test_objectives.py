"""The losses of a model, and rows with several samples."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import engine
from entrenar_py.train.model import model, objectives, preparation
from entrenar_py.train.model.objectives import IGNORED
from entrenar_py.train.model.settings import Data, Lora, Settings
from entrenar_py.train.model.workload import Finetuning
from tests.train.model import checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.mark.parametrize("at_a_time", [1, 7, 64])
@pytest.mark.parametrize("trains_head", [True, False])
def test_is_torchs(monkeypatch: pytest.MonkeyPatch, at_a_time: int, trains_head: bool) -> None:
    monkeypatch.setattr(objectives, "LOGITS_MAX", at_a_time * 50)
    torch.manual_seed(0)
    hidden = torch.randn(23, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=trains_head)
    targets = torch.randint(50, (23,))
    targets[[3, 22]] = IGNORED
    leaves = [hidden, weight] if trains_head else [hidden]
    ours = objectives.cross_entropy(hidden, weight, targets)
    theirs = F.cross_entropy(
        (hidden @ weight.t()).double(), targets, ignore_index=IGNORED, reduction="sum"
    )
    torch.testing.assert_close(ours, theirs.float())
    for one, other in zip(
        torch.autograd.grad(ours * 0.25, leaves),
        torch.autograd.grad(theirs * 0.25, leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_products_have_the_format_of_autocast() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 16, requires_grad=True), torch.randn(50, 16)
    targets = torch.randint(50, (8,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = objectives.cross_entropy(hidden, weight, targets)
    (gradient,) = torch.autograd.grad(loss, [hidden])
    logits = (hidden.bfloat16() @ weight.bfloat16().t()).float()
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets, reduction="sum"))
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, gradient.bfloat16().float())


def test_a_weight_is_not_rounded_in_16_bits() -> None:
    """A pair's weight is beta times a share, and no power of two."""
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(9, 16, generator=draw).requires_grad_()
    weight, targets = torch.randn(40, 16, generator=draw), torch.arange(9)
    gradients = list[torch.Tensor]()
    for factor in (1.0, 0.3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = objectives.cross_entropy(hidden, weight, targets, weighted=True)
        gradients += torch.autograd.grad(loss * factor, [hidden])
    whole, weighted = gradients
    assert torch.equal(weighted, (whole * 0.3).bfloat16().float())
    assert not torch.equal(weighted, (whole.bfloat16() * torch.tensor(0.3).bfloat16()).float())


def config(name: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, name)(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        **more,
    )


@pytest.mark.parametrize(
    ("name", "is_last"),
    [("Qwen3Config", True), ("LlamaConfig", True), ("Gemma2Config", False)],
    ids=["qwen3", "llama", "gemma2 caps its logits"],
)
def test_the_head_is_used_only_where_nothing_comes_after_it(name: str, is_last: bool) -> None:
    transformers = pytest.importorskip("transformers")
    module = transformers.AutoModelForCausalLM.from_config(config(name))
    assert (objectives.head_of(module) is not None) is is_last
    assert module.training
    assert "forward" not in vars(module.get_output_embeddings())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_models_gradients_are_those_of_all_its_logits(
    small: Path, precision: str, method: str
) -> None:
    settings = Settings(
        model=small / "model",
        task="text",
        output=small / "out",
        method=method,
        precision=precision,
        data=Data(train=small / "test.jsonl"),
    )
    workload = preparation.prepare(settings).workload()
    frozen = {tensor.dtype for tensor in workload.module.parameters() if not tensor.requires_grad}
    assert frozen == ({getattr(torch, precision)} if method == "lora" else set())
    tensors = {
        name: tensor.detach().requires_grad_()
        for name, tensor in workload.module.named_parameters()
        if tensor.requires_grad
    }
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    given: Any = {"drop": engine.no_dropout, "scale": 0.5}
    loss, gradients = workload.gradients(tensors, [0, 1, 2, 3], **given)
    objective: Any = workload.objective
    objective._head = [None]
    full_loss, full_gradients = workload.gradients(tensors, [0, 1, 2, 3], **given)
    within = 1e-5 if precision == "float32" else 2e-2
    assert loss == pytest.approx(full_loss, rel=within)
    for one, other in zip(gradients, full_gradients, strict=True):
        apart = torch.from_numpy(one - other).norm()
        assert apart <= within * torch.from_numpy(other).norm() + 1e-12


class ReadsNothing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what waits for a device: reads of data, and sums by index that are deterministic."""

    WAITS = ("_local_scalar_dense", "nonzero", "index_put", "index_add", "scatter_add")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert not any(name in func.__name__ for name in self.WAITS), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["Qwen3Config", "LlamaConfig", "MistralConfig", "Phi3Config"])
def test_a_step_reads_nothing_on_the_host(
    monkeypatch: pytest.MonkeyPatch, small: Path, tmp_path: Path, name: str
) -> None:
    """Else it could not be recorded on a GPU, and would wait for it. No mask is made meanwhile."""
    transformers = pytest.importorskip("transformers")
    attended, attend = [], F.scaled_dot_product_attention

    def attention(*args: Any, **named: Any) -> Tensor:
        attended.append(args[3] if args[3:] else named.get("attn_mask"))
        return attend(*args, **named)

    shutil.copytree(small / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    tokens = len(transformers.AutoTokenizer.from_pretrained(small / "model"))
    made = config(name, pad_token_id=0)
    made.vocab_size = tokens
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path / "model")
    data = Data(train=small / "test.jsonl")
    given: Any = {"task": "text", "output": tmp_path, "lora": Lora(targets=("o_proj",))}
    settings = Settings(model=tmp_path / "model", data=data, **given)
    workload = preparation.prepare(settings).workload()
    tensors = {
        name: one.detach().requires_grad_()
        for name, one in workload.module.named_parameters()
        if one.requires_grad
    }
    batch = workload.batch([0, 1, 2, 3])
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    # As while a GPU's operations are recorded.
    monkeypatch.setattr(transformers.utils.import_utils, "is_cuda_stream_capturing", lambda: True)
    with ReadsNothing():  # type: ignore[no-untyped-call]
        loss = workload.loss_of(tensors, batch, linear=F.linear, drop=engine.no_dropout)
        torch.autograd.grad(loss, list(tensors.values()))
    assert attended
    assert all(mask is None for mask in attended)


# peft asks for what a later transformers will lack.
IDS = list(range(8))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_every_sample_is_in_one_row_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = objectives.rows_of(lengths, 32)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[index] for index in row) <= 32 or len(row) == 1
        assert row == sorted(row)


def test_a_sample_goes_into_the_first_row_with_room() -> None:
    assert objectives.rows_of([20, 20, 10, 5, 30], 32) == [[0, 2], [1, 3], [4]]


def workloads(small: Path, folder: Path, config: Any) -> tuple[Finetuning, Finetuning]:
    """Return the same model and rows, not packed and packed."""
    settings = checkpoints.settings(small, folder, config)
    packed = replace(settings, data=replace(settings.data, packing=True))
    return preparation.prepare(settings).workload(), preparation.prepare(packed).workload()


def gradient(workload: Finetuning) -> tuple[float, list[Any]]:
    tensors = {
        name: torch.from_numpy(array).requires_grad_()
        for name, array in workload.initial(np.random.default_rng(0)).items()
    }
    return workload.gradients(tensors, IDS, drop=engine.no_dropout, scale=1.0)


@pytest.mark.parametrize(
    "kind",
    [
        checkpoints.qwen3,
        checkpoints.llama,
        checkpoints.mistral,
        checkpoints.gemma2,
        checkpoints.gpt2,
    ],
)
def test_losses_are_those_of_rows_that_are_not_packed(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[], Any]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain, packed = workloads(small, tmp_path / "model", kind())
    assert len(packed.batch(IDS)[0]) < len(plain.batch(IDS)[0]) == len(IDS)
    loss, gradients = gradient(plain)
    same, found = gradient(packed)
    assert same == pytest.approx(loss, rel=1e-6)
    assert packed.weight(IDS) == plain.weight(IDS)
    for ours, theirs in zip(found, gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max(), rtol=1e-3)


def test_every_token_and_target_is_in_the_batch_once(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain, packed = workloads(small, tmp_path / "model", checkpoints.llama())
    (tokens, mask, targets), (packed_tokens, positions, wanted) = plain.rows(IDS), packed.rows(IDS)
    due, found = (one[one != IGNORED].sort().values for one in (targets, wanted))
    assert torch.equal(due, found)
    assert (positions == 0).sum() >= len(IDS)
    assert packed_tokens.numel() <= tokens.numel()
    assert mask.max() == 1


def test_models_whose_rows_see_each_other_are_refused(small: Path, tmp_path: Path) -> None:
    class Blind(torch.nn.Module):
        """Sees everything before, whatever the positions."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(16, 4)

        def forward(self, input_ids: Any, position_ids: Any, use_cache: bool) -> Any:
            hidden = self.embedding(input_ids).cumsum(1) + position_ids[..., None]
            return type("Output", (), {"logits": hidden})()

    with pytest.raises(UsageError, match="Blind lets the rows of a sequence see each other"):
        objectives.require_apart(Blind(), torch.float32, "x")


def test_positions_that_are_not_read_are_refused(small: Path, tmp_path: Path) -> None:
    """OPT makes its own positions of the mask."""
    settings = checkpoints.settings(small, tmp_path, checkpoints.opt())
    packed = replace(settings, data=replace(settings.data, packing=True))
    with pytest.raises(UsageError, match=r"data.packing with model=.*OPTForCausalLM lets the rows"):
        model.load(packed, pad_token=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", [checkpoints.qwen3, checkpoints.llama, checkpoints.gpt2])
def test_every_way_to_attend_honours_it(attention: str, kind: Callable[[], Any]) -> None:
    transformers: Any = pytest.importorskip("transformers")
    module = transformers.AutoModelForCausalLM.from_config(kind(), attn_implementation=attention)
    objectives.require_apart(module, torch.float32, "x")
