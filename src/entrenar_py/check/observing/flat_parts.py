"""Parameters that lie one after another in a flat tensor. Each rank has an equal part of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from entrenar_py.check.rank_files.layout import Piece


@dataclass(frozen=True, eq=False)
class Part:
    """A parameter in the flat tensor `flat`, where it begins at element `begin`.

    `owner` is the tensor that optimizers step. `shape` is that of the whole parameter. This rank
    has its `piece`, from element `first` of the rank's part of `flat` on; None for all of it.
    """

    flat: Any
    owner: Tensor
    shape: tuple[int, ...]
    begin: int
    first: int
    piece: Piece | None

    @property
    def numel(self) -> int:
        """The number of elements that this rank has."""
        return math.prod(self.shape if self.piece is None else self.piece.shape)

    def weights(self) -> Tensor:
        """Return this rank's elements, also while a pass computes with whole parameters."""
        held: Tensor = getattr(self.flat, "_local_shard", self.flat)
        return self._cut(held.detach())

    def gradient(self) -> Tensor | None:
        """Return this rank's elements of the gradient; None if there is none that was reduced."""
        gradient: Tensor | None = self.owner.grad
        if self.owner is self.flat and gradient is None:
            gradient = getattr(self.flat, "_saved_grad_shard", None)  # while a pass adds to it
        return self.of(gradient) if gradient is not None and self.fits(gradient) else None

    def fits(self, tensor: Tensor) -> bool:
        """Return whether `tensor` has a number for each element that the optimizer steps."""
        return tensor.numel() == self._num_owned and (tensor.ndim > 0 or self._num_owned == 0)

    def of(self, tensor: Tensor) -> Tensor:
        """Return this rank's elements of a gradient or of optimizer state that `fits`."""
        return self._cut(tensor) if self.owner is self.flat else tensor

    def of_whole(self, flat: Tensor) -> Tensor:
        """Return the whole parameter's elements in a whole FlatParameter, or in its gradient."""
        return flat[self.begin : self.begin + math.prod(self.shape)].view(self.shape)

    @property
    def _num_owned(self) -> int:
        is_flat = self.owner is self.flat
        return math.prod(self.flat._sharded_size) if is_flat else self.numel

    def _cut(self, flat: Tensor) -> Tensor:
        own = flat.reshape(-1)[self.first : self.first + self.numel]
        return own.view(self.shape) if self.piece is None else own


def piece_of(
    begin: int, size: int, num_held: int, rank: int, ranks: Sequence[int]
) -> tuple[Piece, int]:
    """Return the piece of a parameter that a rank has, and where that begins in the rank's part.

    The parameter has `size` elements, from element `begin` of the flat tensor on. Each of `ranks`
    has `num_held` elements of that; `rank` is the place of this one among them.
    """
    own = rank * num_held
    at, end = (min(max(place - begin, 0), size) for place in (own, own + num_held))
    last = max(begin, begin + size - 1)
    piece = Piece(
        offset=(at,),
        shape=(end - at,),
        whole=(size,),
        ranks=tuple(ranks[begin // num_held : last // num_held + 1]),
    )
    return piece, max(begin - own, 0)
