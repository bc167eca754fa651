"""Causal attention by cuDNN. Its deterministic backward pass is faster than that of torch's kernel.

torch calls cuDNN only where gradients need not be deterministic. The package nvidia-cudnn-frontend
calls it with deterministic gradients, too.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from entrenar_py.shared import package_data
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping, printing

PACKAGE = "nvidia-cudnn-frontend"
_NAME, _SDPA = "entrenar_cudnn", "sdpa"  # of this attention in transformers, and of torch's
_DEVICES = ("cuda",)
_WIDTH_MAX, _WIDTH_MULTIPLE = 128, 8
_DTYPES = (torch.float16, torch.bfloat16)
# Other inputs that change the result: those of transformers' function, and those that it ignores.
_OTHERS, _UNKNOWN = ("cache", "position_bias"), ("s_aux", "softcap")
_PLANS_MAX = 4096  # of cuDNN's, two for each shape of a batch; the package keeps 128 by default
_CHARS_MAX = 300
_num_calls = 0  # of cuDNN's forward pass


def use(module: nn.Module) -> None:
    """Make a transformers model compute causal attention with cuDNN on CUDA devices.

    Attention with a mask, in float32, of wider heads or on another device is computed as before.
    Raises UsageError for a model with attention of another kind than transformers' `sdpa`.
    """
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model = cast("Any", module)
    before = _kind_of(module)
    if before == _SDPA:
        model.set_attn_implementation(_NAME)
    if _kind_of(module) != _NAME:
        raise UsageError(
            f"attention: cudnn: {type(module).__name__} computes attention by transformers' "
            f"{before}, which it can't replace; use attention: torch"
        )


def _kind_of(module: nn.Module) -> str:
    return str(cast("Any", module).config.get_text_config()._attn_implementation)


@cache
def _library() -> Any:
    """Return the package's module that defines torch.ops.cudnn. Raises UsageError without it."""
    try:
        from cudnn.sdpa.fwd import torch_op
    except ImportError as error:
        raise UsageError(
            f"attention: cudnn: this process can't import {PACKAGE} ({error}); "
            f"{package_data.extra_advice('cudnn')} for all processes of the run, or use attention: "
            "torch"
        ) from error
    torch_op._GRAPH_CACHE_MAX = _PLANS_MAX
    return torch_op


def require(module: nn.Module, device: torch.device) -> None:
    """Raise UsageError unless cuDNN can compute the attention of `module` on the CUDA `device`."""
    config = cast("Any", module).config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    _library()
    try:
        zeros = torch.zeros(1, heads, 64, width, dtype=torch.bfloat16, device=device)
        with torch.cuda.device(device):
            out, sums = _of_library(zeros, zeros, zeros, 1.0)
            _gradients_of_library(out, zeros, zeros, zeros, out, sums, 1.0)
            torch.cuda.synchronize()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        reason = escaping.shortened(" ".join(str(error).split()), chars_max=_CHARS_MAX)
        raise UsageError(
            f"attention: cudnn: {torch.cuda.get_device_name(device)} can't compute heads of width "
            f"{width} with it ({reason}); use attention: torch"
        ) from error


def warn_if_unused() -> None:
    """Say on standard error if cuDNN has computed no attention in this process."""
    if not _num_calls:
        printing.warn(
            "attention: cudnn: torch computed the attention of the first rows, since it has masks, "
            f"dropout (attention_dropout in config.json), heads wider than {_WIDTH_MAX}, or other "
            "widths for values than for keys"
        )


def is_served(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether cuDNN computes causal attention of such tensors, [n, heads, t, width] each."""
    width, dtypes = query.shape[3], {query.dtype, key.dtype, value.dtype}
    return (
        len(dtypes) == 1
        and query.dtype in _DTYPES
        and width <= _WIDTH_MAX
        and width % _WIDTH_MULTIPLE == 0
        and key.shape == value.shape
        and key.shape[3] == width
        and key.shape[2] == query.shape[2] > 1
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return what transformers' function for `sdpa` does: [n, t, heads, width]."""
    if found := [name for name in _UNKNOWN if others.get(name) is not None]:
        raise UsageError(
            f"attention: cudnn: {type(module).__name__} needs {', '.join(found)}, which it doesn't "
            "have; use attention: torch"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if torch.is_autocast_enabled(query.device.type):  # as for torch's function
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    is_plain = causal and attention_mask is None and not dropout
    if any(others.get(name) is not None for name in _OTHERS) or not (
        is_plain and query.device.type in _DEVICES and is_served(query, key, value)
    ):
        return cast(
            "tuple[Tensor, None]",
            sdpa_attention_forward(
                *(module, query, key, value, attention_mask, dropout, scaling, is_causal), **others
            ),
        )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    out, _ = _forward(query, key, value, scale)
    return out.transpose(1, 2).contiguous(), None


# --- the operations that torch's compiler sees ----------------------------------------------------


def _of_library(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the result and the logarithms of the sums, [n, heads, t, 1]."""
    _library()
    return cast(
        "tuple[Tensor, Tensor]",
        torch.ops.cudnn.sdpa_fwd(query, key, value, scale, is_causal=True, return_lse=True),
    )


def _counted(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    global _num_calls
    _num_calls += 1
    return _of_library(query, key, value, scale)


def _gradients_of_library(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    _library()
    return cast(
        "tuple[Tensor, Tensor, Tensor]",
        torch.ops.cudnn.sdpa_bwd(
            *(gradient, query, key, value, out, sums, scale), is_causal=True, is_deterministic=True
        ),
    )


_forward = torch.library.custom_op("entrenar::causal_attention", _counted, mutates_args=())
_backward = torch.library.custom_op(
    "entrenar::causal_attention_backward", _gradients_of_library, mutates_args=()
)
# The library has shapes and strides for tensors without values, too.
_forward.register_fake(_of_library)
_backward.register_fake(_gradients_of_library)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.scale = inputs[3]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return None, None, None, None
    return *_backward(gradient, *ctx.saved_tensors, ctx.scale), None


_forward.register_autograd(_gradients, setup_context=_save)
