"""Tries a model on a few tokens before and after it is cut: the same logits must come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from entrenar_py.errors import UsageError
from entrenar_py.finetune.strategies.strategy import local
from entrenar_py.tuning.workload import Finetuning

_NUM_TOKENS = 4  # a rank, in each of two rows
_VOCABULARY = 9  # tokens that every model has
_ROUNDED = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # share of the norm of all logits
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


def logits(workload: Finetuning, model: Callable[..., Tensor], device: torch.device) -> Tensor:
    """Return what `model` makes of a few tokens, in evaluation mode, on the CPU."""
    was_training = workload.module.training
    workload.module.eval()
    with torch.no_grad(), workload.formats(device):
        found = model(tokens().to(device))
    workload.module.train(was_training)
    return found.float().cpu()


def require_same(before: Tensor, after: Tensor, workload: Finetuning, strategy: str) -> None:
    """Raise UsageError unless the logits `after` a cut are those `before`, up to rounding."""
    difference = float((before - after).norm() / before.norm())
    if not difference <= _ROUNDED[workload.products]:
        raise UsageError(
            f"strategy={strategy}: {type(workload.module).__name__} computes something else once "
            f"it is cut (logits differ by {difference:.2g} of their norm); use ddp, ddp_canonical "
            "or fsdp"
        )
