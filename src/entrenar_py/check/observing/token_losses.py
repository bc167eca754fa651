"""The cross-entropies that a script takes over its tokens: their targets, and what each counts.

torch has no hook of a function, so two functions are replaced where a contract asks for it. A
replacement returns what the original returns. What a token's loss counts is the derivative of what
the backward pass began at, which a hook of the loss is given.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.check.observing import torch_calls
from entrenar_py.check.observing.token_rows import Rows
from entrenar_py.check.observing.torch_calls import Function, Patch
from entrenar_py.shared import hook_calls, trace

SHIFTS = 3  # a target is compared with the token at its place, the next one, and the one after


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A cross-entropy of `targets`, bool `counted`, by `reduction`; `slopes` are its gradients.

    `is_weighted`: the classes have weights of their own. `is_trained`: it may have gradients.
    """

    targets: Tensor
    counted: Tensor
    reduction: str
    is_weighted: bool
    is_trained: bool
    dtype: torch.dtype
    slopes: list[Tensor] = field(default_factory=list)

    def shares(self) -> tuple[float, float] | None:
        """Return what a counted token counts at least and at most; None without a backward pass."""
        count = int(self.counted.sum())
        if not self.slopes or not count:
            return None
        if self.is_weighted:
            return math.nan, math.nan
        slope = torch.stack([one.double() for one in self.slopes]).sum(0)
        if self.reduction == "none":
            known = slope.flatten()[self.counted.flatten()]
            return float(known.min()), float(known.max())
        share = float(slope) / (count if self.reduction == "mean" else 1)
        return share, share


Heard = Callable[[Loss], None]


class _Ears:
    """All that listen in this process, as one listener."""

    def __init__(self) -> None:
        self.all: list[Heard] = []
        self.was_applied = False

    def scored(self, loss: Any, given: dict[str, Any]) -> None:
        """Tell all of a cross-entropy, but not of one that is computed again, or only shown.

        A checkpoint computes it again within the backward pass.
        """
        again = torch._C._current_graph_task_id() != -1
        is_shown = torch.is_grad_enabled() and not getattr(loss, "requires_grad", False)
        if hook_calls.is_traced() or again or is_shown:
            return
        if (heard := _loss(loss, given)) is not None:
            if heard.is_trained:
                loss.register_hook(heard.slopes.append)
            for ear in [*self.all]:
                ear(heard)


_EARS = _Ears()


def listen(heard: Heard) -> Callable[[], None]:
    """Have `heard` called with each loss; return the function that ends that."""
    if not _EARS.was_applied:
        _EARS.was_applied = True
        torch_calls.apply(TABLE, _EARS)
    _EARS.all.append(heard)
    return lambda: _EARS.all.remove(heard) if heard in _EARS.all else None


def _scored(original: Function, ears: _Ears) -> Function:
    signature = inspect.signature(original)

    @wraps(original)
    def scored(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        if ears.all:
            ears.scored(loss, signature.bind(*args, **kwargs).arguments)
        return loss

    return scored


TABLE = tuple(
    Patch(
        module="torch.nn.functional",
        name=name,
        reason="no hook tells which targets a loss counts, and what each of them counts",
        wrap=_scored,
    )
    for name in ("cross_entropy", "nll_loss")
)


def _loss(loss: Tensor, given: dict[str, Any]) -> Loss | None:
    """Return the loss of a call with the arguments `given`, None if its targets are no classes."""
    targets = given["target"]
    if targets.is_floating_point() or type(targets) is not Tensor:
        return None
    reduction = given.get("reduction", "mean")
    if given.get("reduce") is False:
        reduction = "none"
    elif given.get("size_average") is False:
        reduction = "sum"
    targets = targets.detach().clone()
    return Loss(
        targets=targets,
        counted=targets != given.get("ignore_index", -100),
        reduction=reduction,
        is_weighted=given.get("weight") is not None,
        is_trained=loss.requires_grad,
        dtype=loss.dtype,
    )


# --- what the targets are -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a loss is `counted`, bool like the ids, whose positions are along `dimension`."""

    dimension: int
    counted: Tensor


def event(loss: Loss, rows: Rows, **place: int) -> tuple[trace.Scored, Place] | None:
    """Return the record of a loss over the tokens of `rows`, and its positions.

    Return None for a loss without a backward pass, and one over other things than these tokens.
    """
    shares = loss.shares()
    grids = [*_grids(loss, rows.ids)]
    if shares is None or not grids:
        return None
    compared = [(*_matches(*grid), grid) for grid in grids]
    known, matches, grid = max(compared, key=lambda one: max(one[1], default=0))
    padded = crossing = tokens_crossing = 0
    if grid[3] == 1:
        padded = _padded(*grid[:2], rows)
        crossing, tokens_crossing = _crossing(*grid[:2], rows)
    scored = trace.Scored(
        **place,
        counted=int(loss.counted.sum()),
        least=shares[0],
        most=shares[1],
        dtype=str(loss.dtype).removeprefix("torch."),
        known=known,
        matches=matches,
        padded=padded,
        crossing=crossing,
        tokens_crossing=tokens_crossing,
    )
    _, counted, ids, dimension = grid
    missing = ids.shape[1] - counted.shape[1]
    counted = F.pad(counted, (0, missing))
    return scored, Place(dimension=dimension, counted=counted if dimension else counted.t())


_Grid = tuple[Tensor, Tensor, Tensor, int]


def _grids(loss: Loss, ids: Tensor) -> Iterator[_Grid]:
    """Yield targets and which are counted as [rows, positions], and the ids, for each layout.

    The last position may be left out, or the last two. Positions may be the second dimension or the
    first.
    """
    for dimension in (1, 0):
        length, rows = ids.shape[dimension], ids.shape[1 - dimension]
        for width in range(length, length - SHIFTS, -1):
            if width < 1 or loss.targets.numel() != width * rows:
                continue
            shape = (rows, width) if dimension else (width, rows)
            parts = (loss.targets.reshape(shape), loss.counted.reshape(shape), ids)
            targets, counted, tokens = parts if dimension else (one.t() for one in parts)
            yield targets, counted, tokens, dimension


def _matches(
    targets: Tensor, counted: Tensor, ids: Tensor, dimension: int
) -> tuple[int, tuple[int, ...]]:
    """Return how many counted targets are known at each shift, and how many equal its token."""
    width = min(targets.shape[1], ids.shape[1] - SHIFTS + 1)
    if width < 1:
        return 0, ()
    known = counted[:, :width]
    found = (
        int((known & (targets[:, :width] == ids[:, shift : shift + width])).sum())
        for shift in range(SHIFTS)
    )
    return int(known.sum()), tuple(found)


def _padded(targets: Tensor, counted: Tensor, rows: Rows) -> int:
    """Return how many padding tokens are counted as targets of padding tokens.

    The first padding token may be meant, as the end of the text.
    """
    width = min(targets.shape[1], rows.ids.shape[1] - 1)
    both = rows.padding[:, :width] & rows.padding[:, 1 : width + 1]
    return int((counted[:, :width] & both).sum())


def _crossing(targets: Tensor, counted: Tensor, rows: Rows) -> tuple[int, int]:
    """Return how many targets are another document's first token, and how many tokens these are."""
    if rows.documents is None:
        return 0, 0
    width = min(targets.shape[1], rows.ids.shape[1] - 1)
    after = slice(1, width + 1)
    other = rows.documents[:, :width] != rows.documents[:, after]
    here = targets[:, :width] == rows.ids[:, after]
    crossing = counted[:, :width] & other & here & ~rows.padding[:, after]
    return int(crossing.sum()), int(torch.unique(targets[:, :width][crossing]).numel())
