"""The contents of samples as the model gets them, each in a few numbers.

They tell whether a sample has the same contents in two runs. Digests would not do: a model may be
given features whose last bits depend on the batch in which they were computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
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
    leaves = [leaf for leaf in tree_leaves(given) if type(leaf) is Tensor and leaf.dim()]
    batched = [leaf.detach() for leaf in leaves if leaf.shape[0] == leaves[0].shape[0]]
    shown = [_shown(tensor) for tensor in batched[:TENSORS_MAX] if _can_be_read(tensor)]
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
    return not (
        tensor.is_complex() or tensor.is_meta or tensor.is_sparse or isinstance(tensor, DTensor)
    )


def _shown(tensor: Tensor) -> list[tuple[float, float, float]]:
    rows = tensor.reshape(len(tensor), -1)
    size = rows.shape[1]
    rows = rows[:, :: -(-size // ELEMENTS_MAX) or 1].double().cpu()
    sums = rows @ _signs(rows.shape[1])
    both = zip(rows.norm(dim=1).tolist(), sums.tolist(), strict=True)
    return [(float(size), _short(norm), _short(total)) for norm, total in both]


def _short(number: float) -> float:
    return float(f"{number:.9g}")


@cache
def _signs(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
