"""Weights in NF4: which layers have them, and that their bits are those of the definition."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.compute import nf4 as stored
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.model import model, model_folder, precision, stock, workload
from entrenar_py.train.model.settings import Classes, Data, Lora, Settings
from tests import extras
from tests.train.model import nf4

extras.require("bitsandbytes")
transformers = pytest.importorskip("transformers")

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
TOKENS = torch.arange(2, 14).reshape(2, 6)
NEAR_MIDDLE = 2.0**-15  # bitsandbytes finds a scale's level on the CPU by its first 16 bits


def qwen(**changes: Any) -> Any:
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pad_token_id": 0,
    }
    return transformers.Qwen3Config(**(sizes | changes))


def gpt2() -> Any:
    return transformers.GPT2Config(vocab_size=512, n_embd=64, n_layer=1, n_head=2, n_positions=64)


def settings(small: Path, folder: Path, config: Any, *, target: str, task: str) -> Settings:
    """Return settings of a checkpoint in `folder` with `config` and random weights."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small / "model" / name, folder / name)
    return Settings(
        model=folder,
        task=task,
        method="qlora",
        output=folder / "out",
        data=Data(train=small / "test.jsonl"),
        classes=Classes(labels=("safe", "unsafe") if task == "classify" else ()),
        lora=Lora(rank=2, alpha=4, targets=(target,)),
    )


def names(module: torch.nn.Module) -> set[str]:
    """Return the ends of the names of all quantised layers."""
    return {
        name.removesuffix(".base_layer").rpartition(".")[2]
        for name, _ in precision.quantised_layers(module)
    }


ALL_OF_A_BLOCK = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("task", ["text", "classify"])
@pytest.mark.parametrize("tied", [True, False])
def test_all_of_a_block_is_quantised_and_nothing_else(
    small: Path, tmp_path: Path, task: str, tied: bool
) -> None:
    config = qwen(tie_word_embeddings=tied)
    module = model.load(settings(small, tmp_path, config, target="q_proj", task=task), 0)
    assert names(module) == ALL_OF_A_BLOCK
    assert sum(1 for _ in precision.quantised_layers(module)) == 2 * len(ALL_OF_A_BLOCK)


def test_rows_of_broken_blocks_stay_as_they_are(small: Path, tmp_path: Path) -> None:
    config = qwen(intermediate_size=96)
    module = model.load(settings(small, tmp_path, config, target="q_proj", task="text"), 0)
    assert names(module) == ALL_OF_A_BLOCK - {"down_proj"}


def test_experts_that_stay_as_they_are_are_told(small: Path, tmp_path: Path) -> None:
    """Nothing is told of norms, which are never quantised."""
    sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512}
    sizes |= {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    mixture = transformers.MixtralConfig(**sizes, num_local_experts=4)
    for number, (config, told) in enumerate([(qwen(), []), (mixture, ["75%"])]):
        model_folder.notes()
        chosen = settings(small, tmp_path / str(number), config, target="q_proj", task="text")
        model.load(chosen, 0)
        notes = [note for note in model_folder.notes() if "method: qlora" in note]
        assert [note.split()[2] for note in notes] == told


@given(
    rows=st.integers(1, 40),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e4]),
)
def test_the_bits_are_those_of_the_definition(
    rows: int, blocks: int, seed: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((rows, blocks * nf4.BLOCK)) * scale).astype(np.float32)
    weight[rng.random(rows) < 0.1] = 0
    import bitsandbytes

    layer = bitsandbytes.nn.LinearNF4(weight.shape[1], rows, bias=False)
    layer.load_state_dict({"weight": torch.from_numpy(weight)})
    layer = layer.to("cpu")
    state = layer.weight.quant_state
    mean = np.float32(state.offset)
    due = nf4.quantise(weight, mean)
    assert np.array_equal(layer.weight.numpy().reshape(-1), due.codes)
    assert np.array_equal(state.state2.absmax.numpy(), due.second_scales)
    levels, held = state.state2.code.numpy(), state.absmax.numpy()
    assert np.abs(levels - nf4.second_levels()).max() <= 2.0**-24
    scales = np.abs(weight.reshape(-1, nf4.BLOCK)).max(1)
    assert abs(mean - scales.mean(dtype=np.float64)) <= 2.0**-20 * mean
    for got, want, value in zip(held, due.scales, scales - mean, strict=True):
        second = due.second_scales[0]
        assert second == 0 or got == want or is_near_middle(value / second, levels, got, want)
    stored = replace(due, scales=held)
    assert np.array_equal(precision.decoded(layer).numpy(), nf4.decode(stored, levels))


def is_near_middle(ratio: np.float32, levels: Any, one: int, other: int) -> bool:
    """Return whether two codes are neighbours, and `ratio` is halfway between their levels."""
    middle = (float(levels[one]) + float(levels[other])) / 2
    return abs(int(one) - int(other)) == 1 and abs(float(ratio) - middle) <= NEAR_MIDDLE


def test_evaluation_changes_neither_bits_nor_gradients(small: Path, tmp_path: Path) -> None:
    chosen = settings(small, tmp_path, qwen(), target="q_proj", task="text")
    module: Any = model.load(chosen, 0)
    before = loss_and_gradient(module)
    module.eval()
    with torch.no_grad():
        module(input_ids=TOKENS)
    module.train()
    after = loss_and_gradient(module)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


# torch's compiler makes an object of the class of bitsandbytes' product, and asks each block's
# input for its gradient.
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
def test_blocks_compile_to_the_same_programs(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks are one program, though the first one's input would need no gradient."""
    from torch._dynamo.testing import CompileCounter

    compile_block = torch.nn.Module.compile
    made = []
    for blocks in (2, 4):
        folder = tmp_path / str(blocks)
        config = qwen(num_hidden_layers=blocks)
        module = model.load(settings(small, folder, config, target="q_proj", task="text"), 0)
        torch._dynamo.reset()
        counter = CompileCounter()
        monkeypatch.setattr(
            torch.nn.Module, "compile", partialmethod(compile_block, backend=counter)
        )
        workload.compile_blocks(module)
        module(input_ids=TOKENS, use_cache=False)
        made.append(counter.frame_count)
    assert made == [1, 1]


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_new_adapters_of_dora_change_nothing_in_16_bits(
    method: str, dropout: float, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms are in float32, also where peft doesn't cast a layer's input, as it doesn't on CUDA."""
    from peft.tuners.lora.dora import DoraLinearLayer

    given = settings(small, tmp_path, qwen(), target="q_proj", task="preference")
    lora = replace(given.lora, dora=True, dropout=dropout)
    module = model.load(replace(given, method=method, precision="bfloat16", lora=lora), 0)
    norm, dtypes = DoraLinearLayer.get_weight_norm, set[torch.dtype]()
    is_enabled = torch.is_autocast_enabled

    def recorded(self: Any, weight: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        dtypes.add(weight.dtype)
        result: torch.Tensor = norm(self, weight, *more, **named)
        return result

    monkeypatch.setattr(DoraLinearLayer, "get_weight_norm", recorded)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *kind: not kind or is_enabled(*kind))
    with precision.applied(torch.bfloat16, torch.device("cpu")), torch.no_grad():
        policy = module(input_ids=TOKENS).logits
        with stock.without_adapters(module):
            reference = module(input_ids=TOKENS).logits
    assert torch.equal(policy, reference)
    assert dtypes == {torch.float32}


def loss_and_gradient(module: Any) -> list[torch.Tensor]:
    loss = module(input_ids=TOKENS, labels=TOKENS).loss
    trained = [one for one in module.parameters() if one.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, trained)]


@pytest.mark.parametrize(("config", "target"), [(qwen(), "q_proj"), (gpt2(), "c_attn")])
def test_the_decoded_model_computes_the_same(
    small: Path, tmp_path: Path, config: Any, target: str
) -> None:
    chosen = settings(small, tmp_path, config, target=target, task="text")
    module: Any = model.load(chosen, 0)
    module.save_pretrained(tmp_path / "out")
    one: Any = model.trained(chosen, tmp_path / "out", 0)
    other: Any = model.decoded(chosen, tmp_path / "out", 0)
    plain: Any = model.trained(replace(chosen, method="lora"), tmp_path / "out", 0)
    assert list(precision.quantised_layers(one))
    assert not list(precision.quantised_layers(other))
    with torch.no_grad():
        a, b, c = (each(input_ids=TOKENS).logits for each in (one, other, plain))
    assert (a - b).abs().max() <= 1e-5 * a.abs().max()
    assert (a - c).abs().max() > 1e-3 * a.abs().max()  # NF4 is no exact copy


def test_a_model_that_is_quantised_already(small: Path, tmp_path: Path) -> None:
    chosen = settings(small, tmp_path, qwen(), target="q_proj", task="text")
    base: Any = model.load(chosen, 0)
    base.base_model.model.save_pretrained(tmp_path / "again")
    with pytest.raises(UsageError, match="its weights are quantised already"):
        model.load(replace(chosen, model=tmp_path / "again"), 0)


def test_a_model_with_nothing_to_quantise(small: Path, tmp_path: Path) -> None:
    config = qwen(hidden_size=32, intermediate_size=32, num_attention_heads=2)
    chosen = settings(small, tmp_path, config, target="q_proj", task="text")
    with pytest.raises(UsageError, match=r"no linear layer .* multiple of 64 weights"):
        model.load(chosen, 0)


def test_threads_change_no_bit(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's blocks are quantised in pieces, and its scales as ever."""
    given = settings(small, tmp_path, qwen(), target="q_proj", task="instruct")
    monkeypatch.setattr(precision, "InThreads", contextlib.nullcontext)
    expected = [layer.weight for _, layer in precision.quantised_layers(model.load(given, 0))]
    monkeypatch.undo()
    shared: list[int] = []

    def share_out(items: Any, work: Any) -> None:
        shared.append(len(items))
        for item in reversed(items):
            work([item])

    monkeypatch.setattr(precision, "_PIECE", 2**10)
    monkeypatch.setattr(reduction, "share_out", share_out)
    found = [layer.weight for _, layer in precision.quantised_layers(model.load(given, 0))]
    assert set(shared) == {2, 4, 8}, "rows of 64 or 128, and 32, 64 or 128 of them"
    assert len(shared) == len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.data, other.data)
        assert torch.equal(one.quant_state.absmax, other.quant_state.absmax)
        assert torch.equal(one.quant_state.offset, other.quant_state.offset)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_codes_are_those_of_the_library(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If they would differ, the library computes them."""
    quantise = torch.ops.bitsandbytes.quantize_4bit.default
    draws = torch.Generator().manual_seed(0)
    right, used = stored.quantised, list[int]()

    def quantised(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        used.append(len(weights))
        codes, scales = right(weights)
        return codes ^ is_wrong, scales

    monkeypatch.setattr(stored, "quantised", quantised)
    monkeypatch.setattr(precision, "_PIECE", 2**10)
    for dtype, scale in ((torch.float32, 1.0), (torch.bfloat16, 1e4), (torch.float16, 1e-4)):
        weights = (torch.randn(32, 256, generator=draws) * scale).to(dtype)
        weights[3] = 0
        weights[5, :64] = weights[5, 0]
        expected = quantise(weights, 64, "nf4", torch.uint8)
        with precision.InThreads():  # type: ignore[no-untyped-call]
            found = quantise(weights, 64, "nf4", torch.uint8)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert set(used) == ({64} if is_wrong else {64, 2**10})
