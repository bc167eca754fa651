"""The dtypes of a run: one for frozen weights and matrix products; trained tensors are float32.

Frozen weights may be in NF4 with double quantisation, by `bitsandbytes` while a checkpoint is
loaded. Only linear layers inside blocks are quantised, never a head or an embedding. Rows must
consist of whole blocks of BLOCK weights: on CPUs with AVX-512, bitsandbytes 0.50 decodes other rows
wrongly.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from entrenar_py.compute import nf4
from entrenar_py.compute.nf4 import BLOCK
from entrenar_py.shared import package_data
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.model.settings import Settings

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def of_products(settings: Settings) -> torch.dtype:
    """Return the dtype of matrix products."""
    return _DTYPES[settings.precision]


def of_checkpoint(settings: Settings) -> torch.dtype:
    """Return the dtype in which the checkpoint's weights are loaded."""
    return torch.float32 if settings.method == "full" else of_products(settings)


def prepare(module: nn.Module, settings: Settings) -> None:
    """Convert trained tensors to float32. `applied` converts the operands of matrix products."""
    for tensor in module.parameters():
        if tensor.requires_grad:
            tensor.data = tensor.data.float()
    # peft would copy activations to float32, which autocast makes unnecessary.
    casts = settings.precision == "float32"
    for layer in module.modules():
        if hasattr(layer, "cast_input_dtype_enabled"):
            cast("Any", layer).cast_input_dtype_enabled = casts
    if settings.lora.dora and not casts:
        use_exact_norms(module)


def magnitudes(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the layers of `module` that have DoRA, and the parts that compute their norms."""
    from peft.tuners.lora.dora import DoraLinearLayer

    for layer in module.modules():
        for part in getattr(layer, "lora_magnitude_vector", {}).values():
            if isinstance(part, DoraLinearLayer):
                yield layer, part


def use_exact_norms(module: nn.Module) -> None:
    """Let DoRA compute norms in float32, and return its input's dtype, on every device.

    peft computes norms in the dtype of a layer's input, which it casts to float32 for some kinds of
    layers and devices only. On CUDA, its layers in NF4 return float32.
    """
    for layer, part in magnitudes(module):
        part.register_forward_pre_hook(_in_float32)
        if hasattr(layer.get_base_layer().weight, "quant_state"):
            layer.register_forward_hook(_as_input)


def _in_float32(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return inputs[0].float(), *inputs[1:]


def _as_input(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.to(inputs[0].dtype)


@torch.no_grad()
def set_magnitudes(module: nn.Module) -> None:
    """Set new magnitudes of DoRA to the norms of the layers' weights, in float32.

    peft rounds them to the dtype of the weights, so that new adapters would change the model.
    """
    from peft.utils.integrations import dequantize_module_weight

    for layer, part in magnitudes(module):
        weight = dequantize_module_weight(layer.get_base_layer()).float()
        part.weight.data = part.get_weight_norm(weight, torch.zeros_like(weight[0, 0]), 1.0)


def applied(dtype: torch.dtype, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a model's matrix products have the dtype `dtype`.

    Meta tensors have no autocast: there, code that computes reads the dtype from `current`.
    """
    if device.type == "meta":
        return _noted(dtype)
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def current(device: torch.device) -> torch.dtype:
    """Return the dtype that matrix products on `device` have in this context."""
    if device.type == "meta":
        return _of_meta.get()
    is_on = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_on else torch.float32


def as_given(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which matrix products have the dtype of their operands."""
    if device.type == "meta":
        return _noted(torch.float32)
    return torch.autocast(device.type, enabled=False)


_of_meta = ContextVar("_of_meta", default=torch.float32)


@contextlib.contextmanager
def _noted(dtype: torch.dtype) -> Iterator[None]:
    token = _of_meta.set(dtype)
    try:
        yield
    finally:
        _of_meta.reset(token)


@contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    """Put `module` into evaluation mode, without gradients, and restore its mode at the end."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)


_PIECE = 2**18  # weights that a thread quantises at a time, in whole blocks
TABLES = ("nf4_scales", "nf4_second")  # a layer's buffers, next to the codes in its weight
# Importing bitsandbytes, as peft does, warns that there are faster kernels to download.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


class InThreads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which the weights of one tensor are quantised fast, in several threads.

    Blocks are quantised independently, so their bits don't change. On the CPU, bitsandbytes
    searches a code for each weight, which takes four times as long as comparing the weights with
    all codes: two minutes in one thread for a model with 4e9 weights. The first block shows whether
    both have the same bits. If not, bitsandbytes does it all. Scales are quantised in one thread as
    before: their mean is a sum.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.bitsandbytes.quantize_4bit.default:
            return func(*args, **(kwargs or {}))
        weights, *form = args

        def by_library(piece: Tensor) -> tuple[Tensor, Tensor]:
            codes, scales = func(piece, *form, **(kwargs or {}))
            return codes, scales

        flat = weights.reshape(-1)
        is_fast = form == [BLOCK, "nf4", torch.uint8]
        if is_fast:
            first = flat[:BLOCK]
            pairs = zip(nf4.quantised(first), by_library(first), strict=True)
            is_fast = all(torch.equal(one, other) for one, other in pairs)
        pieces = flat.split(_PIECE)
        results: dict[int, tuple[Tensor, Tensor]] = {}

        def quantise(numbers: Sequence[int]) -> None:
            for number in numbers:
                result = nf4.quantised(pieces[number]) if is_fast else None
                if result is None or not result[1].isfinite().all():
                    result = by_library(pieces[number])
                results[number] = result

        reduction.share_out(range(len(pieces)), quantise)
        codes, scales = zip(*(results[number] for number in range(len(pieces))), strict=True)
        return torch.cat(codes), torch.cat(scales)


def quantised_loading(empty: nn.Module, products: torch.dtype) -> dict[str, Any]:
    """Return arguments for `from_pretrained` that quantise a model with the shape of `empty`.

    Matrix products are computed in the dtype `products`. Weights are quantised on the CPU, so that
    they have the same bits for every backend. Raises UsageError without `bitsandbytes`, and for a
    model without linear layers inside blocks.
    """
    _require()
    import transformers

    linear, chosen = _linear(empty), packed(empty)
    if not chosen:
        raise UsageError(
            f"method: qlora: the model has no linear layer within a stack of blocks with rows of a "
            f"multiple of {BLOCK} weights, so nothing would be quantised; use method: lora"
        )
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=products,
        # Regular expressions, from the start of a name on.
        llm_int8_skip_modules=[f"{re.escape(name)}$" for name in sorted(linear.keys() - chosen)],
    )
    return {"quantization_config": config, "device_map": {"": "cpu"}}


def packed(empty: nn.Module) -> set[str]:
    """Return the names of the layers that are quantised in a model with the shape of `empty`."""
    blocks = set(_within_blocks(empty))
    return {name for name, row in _linear(empty).items() if name in blocks and row % BLOCK == 0}


def unpacked_share(empty: nn.Module) -> float:
    """Return the share of the weights within blocks that are not quantised."""
    within = set(_within_blocks(empty))
    quantised = {f"{name}.weight" for name in packed(empty)}
    sizes = {
        name: weight.numel()
        for name, weight in empty.named_parameters()
        if name.rpartition(".")[0] in within
    }
    kept = sum(size for name, size in sizes.items() if name not in quantised)
    return kept / max(1, sum(sizes.values()))


def _linear(empty: nn.Module) -> dict[str, int]:
    return {name: _row(layer) for name, layer in empty.named_modules() if _row(layer)}


def settle_quantised(module: nn.Module) -> None:
    """Make quantised layers compute in evaluation, and in a captured graph, as they do in training.

    On CPUs with AVX512-BF16, bitsandbytes would pack the weights again when a model is evaluated,
    and from then on compute in bfloat16 without gradients. In a graph, `compute.nf4` computes a
    layer's product from the tensors `weight` and TABLES.
    """
    for _, layer in quantised_layers(module):
        layer.support_avx512bf16_for_cpu = False
        state = layer.weight.quant_state
        second = [state.state2.code, state.offset.reshape(1), state.state2.absmax]
        layer.register_buffer(TABLES[0], state.absmax, persistent=False)
        layer.register_buffer(TABLES[1], torch.cat(second), persistent=False)
        layer.__class__ = _settled_kind()


@cache
def _settled_kind() -> Any:
    """Return the class of all settled layers: with one class, blocks compile to one program."""
    import bitsandbytes

    class Settled(bitsandbytes.nn.Linear4bit):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            if type(x) is not Tensor:  # a graph is being captured
                stored = (self.weight, self.nf4_scales, self.nf4_second)
                return nf4.linear(x, self.bias, stored, self.out_features)
            result: Tensor = super().forward(x)
            return result

    return Settled


def quantised_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and the quantised layers of a model."""
    import bitsandbytes

    for name, layer in module.named_modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            yield name, layer


def decoded(layer: Any) -> torch.Tensor:
    """Return the decoded weight of a quantised layer, [outputs, inputs]."""
    from bitsandbytes import functional

    weight: torch.Tensor = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return weight


def decode(module: nn.Module, plain: nn.Module) -> None:
    """Copy the decoded weights of `module` to `plain`, the same model without quantisation."""
    for name, layer in quantised_layers(module):
        other = plain.get_submodule(name)
        assert isinstance(other.weight, torch.Tensor)
        weight = decoded(layer)
        with torch.no_grad():
            other.weight.copy_(weight if isinstance(other, nn.Linear) else weight.T)  # Conv1D


def _require() -> None:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"method: qlora needs {error.name}; {package_data.extra_advice('finetune')}"
        ) from error


def _row(layer: Any) -> int:
    if type(layer) is nn.Linear:
        return layer.in_features
    return int(layer.weight.shape[0]) if type(layer).__name__ == "Conv1D" else 0  # GPT-2's


def _within_blocks(module: nn.Module) -> Iterator[str]:
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList):
            yield from (f"{name}.{inner}" for inner, _ in part.named_modules())
