"""The contents of samples as the model gets them, each in a few numbers.

They tell whether a sample has the same contents in two runs. Digests would not do: a model may be
given features whose last bits depend on the batch in which they were computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves

# For each tensor: its number of elements per sample, their L2 norm, and their sum with fixed signs.
Contents = tuple[tuple[float, ...], ...]
TENSORS_MAX = 8
ELEMENTS_MAX = 4096  # of a sample's tensor: of larger ones every k-th element is looked at


def of(given: Any) -> Contents:
    """Return the contents of the samples in a model's arguments, in order.

    Samples are along the first dimension of the first tensor. Tensors of another size there are
    left out.
    """
    leaves = [leaf for leaf in tree_leaves(given) if type(leaf) is Tensor and _can_be_read(leaf)]
    batched = [leaf for leaf in leaves if leaf.shape[0] == leaves[0].shape[0]]
    shown = [_shown(tensor) for tensor in batched[:TENSORS_MAX]]
    return tuple(
        tuple(number for of_tensor in of_sample for number in of_tensor)
        for of_sample in zip(*shown, strict=True)
    )


def of_samples(passes: Sequence[Contents], num_samples: int) -> Contents:
    """Return the contents of a micro-batch's samples from those of its forward passes.

    Each pass had some of the samples, or each had all of them. Else nothing is known.
    """
    if passes and all(len(one) == num_samples for one in passes):
        return tuple(sum(parts, ()) for parts in zip(*passes, strict=True))
    together = tuple(sample for one in passes for sample in one)
    return together if len(together) == num_samples else ()


def _can_be_read(tensor: Tensor) -> bool:
    """Return whether a tensor has samples with numbers, which can be read now."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    of_functorch = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.dim() > 0 and not (tensor.is_complex() or tensor.is_meta or of_functorch)


def _shown(tensor: Tensor) -> list[tuple[float, float, float]]:
    rows = tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach()[:, None]
    size = rows.shape[1]
    # Computed by numpy: autocast and the script's own modes of dispatch have no part in it.
    seen = rows[:, :: -(-size // ELEMENTS_MAX) or 1].cpu().double().resolve_neg().numpy()
    with np.errstate(all="ignore"):
        norms, sums = np.sqrt(np.square(seen).sum(1)), seen @ _signs(seen.shape[1])
    both = zip(norms.tolist(), sums.tolist(), strict=True)
    return [(float(size), _short(norm), _short(total)) for norm, total in both]


def _short(number: float) -> float:
    return float(f"{number:.9g}")


@cache
def _signs(size: int) -> NDArray[np.float64]:
    return np.random.default_rng(0).choice((-1.0, 1.0), size)
