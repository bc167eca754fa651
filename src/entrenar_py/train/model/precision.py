"""The formats of a run: frozen weights and products have one, what is trained is float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import nn

from entrenar_py.train.model.settings import Settings

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def of_products(settings: Settings) -> torch.dtype:
    """Return the format in which products are computed."""
    return _DTYPES[settings.precision]


def of_checkpoint(settings: Settings) -> torch.dtype:
    """Return the format in which the checkpoint's weights are loaded."""
    return torch.float32 if settings.method == "full" else of_products(settings)


def prepare(module: nn.Module, settings: Settings) -> None:
    """Make what is trained float32, and leave it to `applied` to convert operands of products."""
    for tensor in module.parameters():
        if tensor.requires_grad:
            tensor.data = tensor.data.float()
    for layer in module.modules():
        if hasattr(layer, "cast_input_dtype_enabled"):  # peft's, which would copy activations
            cast("Any", layer).cast_input_dtype_enabled = settings.precision == "float32"


def applied(dtype: torch.dtype, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a model's products have the format `dtype`.

    Tensors of the meta device know no such context: whoever computes with them asks `current`.
    """
    if device.type == "meta":
        return _noted(dtype)
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def current(device: torch.device) -> torch.dtype:
    """Return the format that products on `device` have in this context."""
    if device.type == "meta":
        return _of_meta.get()
    is_on = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_on else torch.float32


def as_given(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which products have the format of their operands."""
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
