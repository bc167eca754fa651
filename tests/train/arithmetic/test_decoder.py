"""The decoder's layers agree with torch's own, and it is a language model tuned through LoRA."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from entrenar_py.train.arithmetic import datasets, decoder

IDS = [0, 7, 11, 2]


def identity(x: Tensor) -> Tensor:
    return x


def loss(model: decoder.ByteDecoder, tensors: dict[str, Tensor], ids: list[int] = IDS) -> Tensor:
    return model.loss_of(tensors, model.batch(ids), linear=F.linear, drop=identity)


@pytest.fixture(name="model", scope="module")
def model_fixture() -> decoder.ByteDecoder:
    return decoder.ByteDecoder(16)


@pytest.fixture(name="tensors")
def tensors_fixture(model: decoder.ByteDecoder) -> dict[str, Tensor]:
    """Return float64 tensors with every element random, adapters and norms included."""
    rng = np.random.default_rng(4)
    return {spec.name: torch.from_numpy(rng.normal(0, 0.3, spec.shape)) for spec in model.specs}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def turn(x: Tensor) -> Tensor:
    """Rotate each half-split pair of `[heads, t, e]` as a complex number."""
    half = x.shape[-1] // 2
    frequencies = decoder.ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 99))
def test_rms_norm_is_torchs(num_rows: int, dim: int, seed: int) -> None:
    """`rms_norm` agrees with torch's in float64."""
    x, gain = normal(seed, num_rows, dim), normal(seed + 1, dim)
    expected = F.rms_norm(x, (dim,), gain, eps=decoder.NORM_EPSILON)
    torch.testing.assert_close(decoder.rms_norm(x, gain), expected)


@given(st.integers(1, 3), st.sampled_from([(4, 2), (4, 1), (6, 3), (2, 2)]), st.integers(1, 13))
def test_grouped_query_attention_is_torchs(
    num_sequences: int, heads: tuple[int, int], num_positions: int
) -> None:
    """Causal attention with shared kv heads agrees with torch's in float64."""
    num_heads, num_kv_heads = heads
    q = normal(1, num_sequences, num_heads, num_positions, 8)
    k = normal(2, num_sequences, num_kv_heads, num_positions, 8)
    v = normal(3, num_sequences, num_kv_heads, num_positions, 8)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(decoder.grouped_query_attention(q, k, v), expected)


def test_rotate_is_a_complex_rotation() -> None:
    """Pairs (i, i + e/2), read as complex numbers, turn by position times base^(-2i/e)."""
    x = normal(5, 4, 31, decoder.HEAD_DIM)
    cosine, sine = (table.double() for table in decoder.rotary_table(31))
    # The table is rounded to float32 (2^-25 each), x stays below 5.
    torch.testing.assert_close(decoder.rotate(x, cosine, sine), turn(x), rtol=0, atol=1e-6)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 10))
def test_rotated_products_see_relative_positions_only(first: int, second: int, by: int) -> None:
    """Shifting query and key by the same distance leaves their product as it was."""
    cosine, sine = (table.double() for table in decoder.rotary_table(31))
    q, k = normal(6, decoder.HEAD_DIM), normal(7, decoder.HEAD_DIM)

    def product(i: int, j: int) -> float:
        return float(decoder.rotate(q, cosine[i], sine[i]) @ decoder.rotate(k, cosine[j], sine[j]))

    assert product(first, second) == pytest.approx(product(first + by, second + by), abs=1e-5)


def test_an_adapter_is_a_change_of_its_layer(
    model: decoder.ByteDecoder, tensors: dict[str, Tensor]
) -> None:
    """Folding W + s B A into the base weights and zeroing B leaves the loss as it was."""
    merged = dict(tensors)
    for block in range(decoder.NUM_BLOCKS):
        for projection in ("q", "v"):
            layer = f"blocks.{block}.attention.{projection}"
            change = tensors[f"{layer}.lora_b"] @ tensors[f"{layer}.lora_a"]
            merged[f"{layer}.weight"] = tensors[f"{layer}.weight"] + decoder.LORA_SCALE * change
            merged[f"{layer}.lora_b"] = torch.zeros_like(tensors[f"{layer}.lora_b"])
    torch.testing.assert_close(loss(model, merged), loss(model, tensors))


def test_at_the_start_the_adapters_change_nothing(model: decoder.ByteDecoder) -> None:
    """B starts at zero, so dropping all of A's input changes nothing. The loss is near ln 256."""
    initial = model.initial(np.random.default_rng(0))
    tensors = {key: torch.from_numpy(value) for key, value in initial.items()}
    dropped = model.loss_of(tensors, model.batch(IDS), linear=F.linear, drop=torch.zeros_like)
    assert dropped.item() == loss(model, tensors).item()
    assert initial["blocks.1.attention.q.lora_a"].any()
    # Logits of unit variance add about a half to the entropy of a uniform guess.
    assert dropped.item() / model.weight(IDS) == pytest.approx(math.log(256) + 0.5, abs=0.5)


def test_only_the_adapters_train(model: decoder.ByteDecoder) -> None:
    """Trainable tensors are LoRA's A and B of q and v in both blocks; all else is frozen."""
    trainable = {spec.name for spec in model.specs if spec.role == "trainable"}
    assert trainable == {
        f"blocks.{block}.attention.{projection}.lora_{factor}"
        for block in (0, 1)
        for projection in "qv"
        for factor in "ab"
    }
    assert {spec.role for spec in model.specs if spec.name not in trainable} == {"frozen"}


def reference_loss(tensors: dict[str, Tensor], line: bytes) -> Tensor:
    """Return the model's loss on one unpadded line, from torch's own layers."""
    tokens = torch.tensor(list(line))
    x = tensors["embedding.weight"][tokens[:-1]]  # [t, d]
    for block in ("blocks.0", "blocks.1"):
        weights = {
            key.removeprefix(f"{block}."): value
            for key, value in tensors.items()
            if key.startswith(block)
        }
        for projection in ("attention.q", "attention.v"):
            change = weights[f"{projection}.lora_b"] @ weights[f"{projection}.lora_a"]
            weights[f"{projection}.weight"] = weights[f"{projection}.weight"] + 2 * change
        y = F.rms_norm(x, (32,), weights["attention_norm.weight"], eps=1e-5)
        q, k, v = (
            (y @ weights[f"attention.{name}.weight"].T).view(len(y), -1, 8).transpose(0, 1)
            for name in "qkv"
        )  # [heads, t, e]
        mixed = F.scaled_dot_product_attention(
            turn(q)[None], turn(k)[None], v[None], is_causal=True, enable_gqa=True
        )[0]
        x = x + mixed.transpose(0, 1).flatten(1) @ weights["attention.o.weight"].T
        y = F.rms_norm(x, (32,), weights["mlp_norm.weight"], eps=1e-5)
        gated = F.silu(y @ weights["mlp.gate.weight"].T) * (y @ weights["mlp.up.weight"].T)
        x = x + gated @ weights["mlp.down.weight"].T
    logits = F.rms_norm(x, (32,), tensors["norm.weight"], eps=1e-5) @ tensors["embedding.weight"].T
    return F.cross_entropy(logits, tokens[1:], reduction="sum")


def test_the_whole_model_is_torchs(model: decoder.ByteDecoder, tensors: dict[str, Tensor]) -> None:
    """Batched and padded, the loss is that of torch's own layers on each line alone."""
    lines = datasets.lines(model.num_samples)
    apart = sum(reference_loss(tensors, lines[i]).item() for i in IDS)
    # 10^-6: the rotary table is rounded to float32, all else is float64.
    assert loss(model, tensors).item() == pytest.approx(apart, rel=1e-6)


def test_samples_weigh_their_targets(model: decoder.ByteDecoder) -> None:
    """A line of b bytes has b - 1 targets; weights differ, and none exceeds `weight_max`."""
    weights = [model.weight([i]) for i in range(model.num_samples)]
    assert weights == [len(line) - 1 for line in datasets.lines(model.num_samples)]
    assert len(set(weights)) > 1
    assert max(weights) == model.weight_max == decoder.POSITIONS


def test_what_a_byte_costs_does_not_depend_on_later_bytes() -> None:
    """Attention is causal: changing keys and values at position p leaves outputs before p."""
    q, k, v = (normal(seed, 1, 2, 9, 8) for seed in (1, 2, 3))
    before = decoder.grouped_query_attention(q, k, v)
    k[:, :, 5:] = 40
    v[:, :, 5:] = -40
    after = decoder.grouped_query_attention(q, k, v)
    assert torch.equal(before[:, :, :5], after[:, :, :5])
    assert not torch.equal(before[:, :, 5:], after[:, :, 5:])
