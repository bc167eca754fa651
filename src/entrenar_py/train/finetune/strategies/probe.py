"""Tries a model on a few tokens before and after it is cut: the same logits must come out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.finetune.strategies.strategy import local
from entrenar_py.train.model.modes import in_evaluation
from entrenar_py.train.model.workload import Finetuning

_NUM_TOKENS = 4  # a rank, in each of two rows
_VOCABULARY = 9  # tokens that every model has
# Shares of the norm of all logits. Rounding is allowed what it makes of the model by itself, some
# times over: partial sums of a cut product are rounded one by one, and a GPU has other kernels than
# the CPU. Logits that have nothing in common differ by 1.4, so no model may round that much.
_LEAST, _TIMES, _MOST = 1e-3, 4, 0.5
_FILL = 0.01


@contextmanager
def filled(module: nn.Module) -> Iterator[None]:
    """Fill trainable tensors of zeros while a model is tried: a new adapter's B hides its A."""
    empty = [name for name, p in module.named_parameters() if p.requires_grad and not p.any()]
    try:
        _fill(module, empty, _FILL)
        yield
    finally:
        _fill(module, empty, 0.0)


def _fill(module: nn.Module, names: list[str], value: float) -> None:
    """Fill by name: a model that is cut meanwhile has other parameters, and perhaps not all."""
    parameters = dict(module.named_parameters())
    for name in names:
        if name in parameters:
            local(parameters[name].detach()).fill_(value)


def tokens() -> Tensor:
    """Return two rows of tokens, int64 [2, t], where t is a multiple of the number of ranks."""
    return (1 + torch.arange(2 * _NUM_TOKENS * dist.get_world_size()) % _VOCABULARY).view(2, -1)


@dataclass(frozen=True)
class Reference:
    """A whole model's answer to a few tokens, which it must still give once it is cut.

    `logits` are float32, on the CPU. `rounding` is by how much they differ, as a share of their
    norm, once the result of every product is off by as much as its format rounds.
    """

    logits: Tensor
    rounding: float


def reference(workload: Finetuning, device: torch.device) -> Reference:
    """Return what the model of `workload`, whole and on `device`, makes of a few tokens."""
    exact = logits(workload, device)
    draw = torch.Generator(device).manual_seed(0)
    with _rounded(workload.module, draw):
        other = logits(workload, device)
    return Reference(exact, _difference(exact, other))


@contextmanager
def _rounded(module: nn.Module, draw: torch.Generator) -> Iterator[None]:
    def off(output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output  # such as the experts that a router chose
        noise = torch.rand(output.shape, generator=draw, device=output.device) * 2 - 1
        return output + (output * noise * torch.finfo(output.dtype).eps).to(output.dtype)

    hooks = [
        layer.register_forward_hook(lambda _, __, output: tree_map(off, output))
        for layer in module.modules()
        if any(tensor.dim() > 1 for tensor in layer.parameters(recurse=False))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def logits(workload: Finetuning, device: torch.device) -> Tensor:
    """Return what a model makes of a few tokens, in evaluation mode: float32, on the CPU."""
    module: Any = workload.module
    with in_evaluation(module), workload.formats(device):
        found: Tensor = module(input_ids=tokens().to(device), use_cache=False).logits
    return found.float().cpu()


def require_same(before: Reference, after: Tensor, strategy: str, kind: str) -> None:
    """Raise UsageError unless the logits `after` a cut are those `before`, up to rounding.

    `kind` is the model's class.
    """
    difference = _difference(before.logits, after)
    allowed = min(max(_LEAST, _TIMES * before.rounding), _MOST)
    if not difference <= allowed:
        raise UsageError(
            f"strategy={strategy}: {kind} computes something else once it is cut (logits differ by "
            f"{difference:.2g} of their norm, and rounding makes at most {allowed:.2g}); use ddp, "
            "ddp_canonical or fsdp"
        )


def _difference(before: Tensor, after: Tensor) -> float:
    return float((before - after).norm() / before.norm())
