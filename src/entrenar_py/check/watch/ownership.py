"""The parameters that each rank holds, by name and piece, and the holders of equal pieces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from entrenar_py.shared.errors import UsageError


@dataclass(frozen=True)
class Piece:
    """A tensor or a shard that a rank holds; ranks with equal pieces must hold equal values.

    `shard` has (dimension, coordinate) for each mesh dimension that doesn't replicate the tensor.
    """

    name: str
    shard: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    dtype: str


class Parameters:
    """The parameters of a module, with their `names`, found by their places in the module tree.

    A script may put others there. Raises UsageError for a FullyShardedDataParallel.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                raise UsageError(
                    f"module {name or 'model'} is a FullyShardedDataParallel: its flat parameters "
                    "have no names, and can't be watched; shard it with fully_shard"
                )
        self._slots: list[tuple[dict[str, torch.nn.Parameter | None], str]] = []
        self.names: list[str] = []
        owners = dict(model.named_modules())
        for name, _ in model.named_parameters():  # one that is tied stands here once
            owner, _, key = name.rpartition(".")
            self._slots.append((owners[owner]._parameters, key))
            self.names.append(name)

    def now(self) -> list[torch.nn.Parameter]:
        """Return the parameters in those places now; raises UsageError if one was removed."""
        current = [slot[key] for slot, key in self._slots]
        for name, parameter in zip(self.names, current, strict=True):
            if parameter is None:
                raise UsageError(f"parameter {name} was removed: observe() the model that trains")
        return [parameter for parameter in current if parameter is not None]

    def pieces(self) -> list[Piece]:
        """Return this rank's piece of each parameter."""
        return [_piece(name, p) for name, p in zip(self.names, self.now(), strict=True)]


def local(parameter: Tensor) -> Tensor:
    """Return this process's part of `parameter`.

    `to_local` does the same, but takes longer and is recorded by autograd.
    """
    held = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    assert isinstance(held, Tensor)
    return held


def holders(ranks: Sequence[Sequence[Piece]]) -> list[list[tuple[int, int]]]:
    """Return, for each piece that several ranks hold, the (rank, row) of its holders in order."""
    by_piece: defaultdict[Piece, list[tuple[int, int]]] = defaultdict(list)
    for rank, pieces in enumerate(ranks):
        for row, piece in enumerate(pieces):
            by_piece[piece].append((rank, row))
    return [held for held in by_piece.values() if len(held) > 1]


def _piece(name: str, parameter: Tensor) -> Piece:
    shard: tuple[tuple[int, int], ...] = ()
    if isinstance(parameter, DTensor):
        place = parameter.device_mesh.get_coordinate() or ()
        shard = tuple(
            (axis, at)
            for axis, (at, kind) in enumerate(zip(place, parameter.placements, strict=False))
            if not isinstance(kind, Replicate)
        )
    held = local(parameter)
    return Piece(name, shard, tuple(held.shape), str(held.dtype).removeprefix("torch."))
