"""The mode in which a model is only looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    """Put `module` into evaluation mode, without gradients, and back at the end."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)
