"""What of a model each rank holds: names, places in the module tree, and who holds the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from entrenar_py.errors import UsageError


@dataclass(frozen=True)
class Piece:
    """A tensor that a rank holds, or its shard of one. Two ranks hold the same if these are equal.

    `shard` is where it stands in each mesh dimension along which it is not replicated.
    """

    name: str
    shard: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    dtype: str


class Parameters:
    """The parameters of a module, found by their places: a script may put others there."""

    def __init__(self, model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                raise UsageError(
                    f"module {name or 'model'} is a FullyShardedDataParallel: its parameters are "
                    "pieces of no name, so that they can't be watched; shard it with fully_shard"
                )
        self._slots: list[tuple[dict[str, torch.nn.Parameter | None], str]] = []
        self.names: list[str] = []
        owners = dict(model.named_modules())
        for name, _ in model.named_parameters():  # one that is tied stands here once
            owner, _, key = name.rpartition(".")
            self._slots.append((owners[owner]._parameters, key))
            self.names.append(name)

    def now(self) -> list[torch.nn.Parameter]:
        """What stands there now."""
        found = [slot[key] for slot, key in self._slots]
        for name, one in zip(self.names, found, strict=True):
            if one is None:
                raise UsageError(f"parameter {name} is gone: observe() the model as it is trained")
        return [one for one in found if one is not None]

    def pieces(self) -> list[Piece]:
        """What this rank holds of them."""
        return [_piece(name, one) for name, one in zip(self.names, self.now(), strict=True)]


def local(parameter: Tensor) -> Tensor:
    """What of it is in this process. Not `to_local`, which autograd sees and which takes long."""
    held = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    assert isinstance(held, Tensor)
    return held


def holders(ranks: Sequence[Sequence[Piece]]) -> list[list[tuple[int, int]]]:
    """Of each piece that is held more than once: (rank, row) of all who hold it, in their order."""
    found: defaultdict[Piece, list[tuple[int, int]]] = defaultdict(list)
    for rank, pieces in enumerate(ranks):
        for row, piece in enumerate(pieces):
            found[piece].append((rank, row))
    return [held for held in found.values() if len(held) > 1]


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
