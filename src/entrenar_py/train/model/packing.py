"""Packing: several samples in one row of tokens, which don't see each other.

Samples are put into rows in their order, by lengths alone. So a shard has the same rows wherever it
is computed. Positions begin anew with each sample: transformers makes masks by them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model.modes import in_evaluation

_SAMPLES = ((1, 2, 3, 4, 5), (6, 7, 8))  # of every vocabulary
_OTHER = (8, 3, 1, 7, 2)  # in place of the first one
_SEEN = 1e-4  # largest share of logits that rounding changes
_ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of other kernels, for other masks


def rows_of(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the samples of each row, as indices into `lengths`: first fit, in their order.

    A row has at most `capacity` tokens, or one sample that is longer.
    """
    rows, room = list[list[int]](), list[int]()
    for index, length in enumerate(lengths):
        row = next((row for row, left in enumerate(room) if length <= left), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(index)
        room[row] -= length
    return rows


@contextlib.contextmanager
def one_sample_a_row() -> Iterator[None]:
    """Let transformers take each row for one sample, which needs no mask, without looking.

    It would read positions on the host in every forward pass. While operations are recorded, when
    it can't read anything, it would make a mask, with which attention has other kernels. A release
    that looks by other functions does look.
    """
    from transformers import masking_utils

    looked = {name: getattr(masking_utils, name) for name in _LOOKS if hasattr(masking_utils, name)}
    for name in looked:
        setattr(masking_utils, name, _LOOKS[name])
    try:
        yield
    finally:
        for name, function in looked.items():
            setattr(masking_utils, name, function)


def _nowhere(*_: Tensor) -> None:
    """Return where packed samples end: there are none."""


def _never(*_: Tensor | None) -> bool:
    """Return whether a graph is traced, whose operations must not depend on a mask's values."""
    return False


_LOOKS = {"find_packed_sequence_indices": _nowhere, "is_tracing": _never}


def require_apart(module: nn.Module, products: torch.dtype, name: object) -> None:
    """Raise UsageError if samples of a row see each other, or compute something else than alone.

    Runs the model on a few tokens. `products` is the format of its products.
    """
    place = next(module.parameters()).device
    first, second = _SAMPLES
    with in_evaluation(module):
        packed = _logits(module, [first, second], place)
        other = _logits(module, [_OTHER, second], place)
        alone = torch.cat([_logits(module, [sample], place) for sample in _SAMPLES])
    cut = len(first)
    seen = _distance(packed[cut:], other[cut:])
    if not seen <= _SEEN:
        raise UsageError(
            f"data.packing with model={name}: {type(module).__name__} lets the rows of a sequence "
            f"see each other (logits differ by {seen:.2g} of their norm); leave packing out"
        )
    changed = _distance(alone, packed)
    if not changed <= _ROUNDED[products]:
        raise UsageError(
            f"data.packing with model={name}: {type(module).__name__} computes something else for "
            f"packed rows (logits differ by {changed:.2g} of their norm); leave packing out"
        )


def _logits(module: nn.Module, samples: Sequence[Sequence[int]], place: torch.device) -> Tensor:
    tokens = torch.tensor([[token for sample in samples for token in sample]], device=place)
    positions = torch.cat([torch.arange(len(sample), device=place) for sample in samples])
    model = cast("Any", module)
    found: Tensor = model(input_ids=tokens, position_ids=positions[None], use_cache=False).logits
    return found[0].float()


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm())
