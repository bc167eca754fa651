"""Causal attention by cuDNN. Its deterministic backward pass is faster than that of torch's kernel.

torch calls cuDNN only where gradients need not be deterministic. The package nvidia-cudnn-frontend
calls it with deterministic gradients, too.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

_CAPABILITY = 9  # major: only Hopper was measured
_HEAD_MAX, _HEAD_MULTIPLE = 128, 8
_DTYPES = (torch.float16, torch.bfloat16)
# Other inputs of a model's attention that change its result.
_OTHERS = ("cache", "position_bias", "s_aux", "softcap")


def use(device: torch.device) -> bool:
    """Make models in this process compute causal attention with cuDNN; return whether they do.

    They don't without nvidia-cudnn-frontend, or on another `device` than a GPU of Hopper's
    generation. Attention with a mask or with dropout, in float32, or with wider heads is computed
    as before.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != _CAPABILITY:
        return False
    return _is_installed()


@cache
def _is_installed() -> bool:
    try:
        import cudnn.sdpa.fwd.torch_op  # noqa: F401  # defines torch.ops.cudnn
    except ImportError:
        return False
    from transformers import AttentionInterface

    AttentionInterface.register("sdpa", _attention)
    return True


def is_served(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether cuDNN computes causal attention of such tensors, [n, heads, t, width] each."""
    width, dtypes = query.shape[3], {query.dtype, key.dtype, value.dtype}
    return (
        len(dtypes) == 1
        and query.dtype in _DTYPES
        and width <= _HEAD_MAX
        and width % _HEAD_MULTIPLE == 0
        and key.shape == value.shape
        and key.shape[3] == width
        and key.shape[2] == query.shape[2] > 1
    )


def _attention(
    module: torch.nn.Module,
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
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if torch.is_autocast_enabled(query.device.type):  # as for torch's function
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    is_plain = causal and attention_mask is None and not dropout
    if any(others.get(name) is not None for name in _OTHERS) or not (
        is_plain and is_served(query, key, value)
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
    return cast(
        "tuple[Tensor, Tensor]",
        torch.ops.cudnn.sdpa_fwd(query, key, value, scale, is_causal=True, return_lse=True),
    )


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
    return cast(
        "tuple[Tensor, Tensor, Tensor]",
        torch.ops.cudnn.sdpa_bwd(
            *(gradient, query, key, value, out, sums, scale), is_causal=True, is_deterministic=True
        ),
    )


_forward = torch.library.custom_op("entrenar::causal_attention", _of_library, mutates_args=())
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
