"""A model's tensors while a graph is captured, for a device that computes in float32 alone."""

from __future__ import annotations

import torch
from torch import Tensor

from entrenar_py.train.arithmetic.tensors import Batch, Tensors


def is_captured(batch: Batch) -> bool:
    """Return whether a graph is being captured: its tensors have a class of their own."""
    return type(batch[0]) is not Tensor


def named(tensors: Tensors, batch: Batch) -> dict[str, Tensor]:
    """Return tensors by their names in an objective; in float32 while a graph is captured."""
    convert = _decoded if is_captured(batch) else _as_it_is
    return {f"module.{name}": convert(tensor) for name, tensor in tensors.items()}


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _decoded(tensor: Tensor) -> Tensor:
    """Return a tensor in 16 bits as float32, and any other as it is."""
    is_short = tensor.is_floating_point() and tensor.dtype != torch.float32
    return tensor.float() if is_short else tensor
