"""A third-party model, unmodified: two blocks of Qwen3 with LoRA, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from entrenar_py.compute.wgpu.device import Device
from entrenar_py.compute.wgpu.program import compile_step

# They warn of their own deprecations.
pytestmark = [pytest.mark.wgpu, pytest.mark.integrations, pytest.mark.filterwarnings("default")]

# Of a gradient's largest element; see test_program.
TOLERANCE = 1e-5


def model(attention: str) -> Any:
    """Return Qwen3 with non-zero LoRA adapters at the queries and values."""
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        attn_implementation=attention,
    )
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8)
    found = peft.get_peft_model(transformers.Qwen3ForCausalLM(config), adapters)
    for name, one in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(one, std=0.1)
    return found


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_step(device: Device, attention: str) -> None:
    """A step gives torch's loss and gradients in one submission, and uploads no frozen weights."""
    qwen = model(attention)
    held = {name: one.detach() for name, one in qwen.named_parameters()}
    trained = [name for name, one in qwen.named_parameters() if one.requires_grad]
    frozen = [name for name in held if name not in trained]

    def step(ids: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in given[: len(trained)]]
        weights = dict(zip([*trained, *frozen], [*leaves, *given[len(trained) :]], strict=True))
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
        loss = torch.func.functional_call(qwen, weights, (), inputs).loss
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    inputs = [torch.randint(97, (2, 7)), *(held[name] for name in trained)]
    resident = [held[name] for name in frozen]
    program = compile_step(device, step, inputs, resident)
    arrays = [one.numpy() for one in inputs]
    found, again = program.run(arrays), program.run(arrays)
    counts = program.counts
    assert (counts.submissions, counts.read_backs, counts.uploads) == (2, 2, 2)
    assert counts.upload_bytes < 2 * sum(4 * one.numel() for one in resident)
    for one, twice, right in zip(found, again, step(*inputs, *resident), strict=True):
        np.testing.assert_array_equal(one, twice)
        size = float(right.abs().max())
        assert size > 0, "gradients that are compared are not zero"
        np.testing.assert_allclose(one, right.numpy(), rtol=0, atol=TOLERANCE * size)
