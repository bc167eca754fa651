"""The axes along which a run's ranks are arranged, and the part of a tensor that a rank holds.

A rank declares both while it runs; its file gives them back, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from entrenar_py.errors import UsageError, did_you_mean

# Each rank along these draws samples of its own; along the others all draw the same.
DATA = ("dp", "dp_replicate", "dp_shard", "fsdp")
MODEL = ("tp", "sp", "pp", "cp", "ep")
# Ranks along these hold parameters of other names. Along all other axes each rank has each
# parameter, if only a piece of it.
STAGES = ("pp", "ep")
# Along these a rank computes on a part of each sample: its gradient is a part of a sum.
PARTIAL = ("sp", "cp")
# Together the ranks along these hold one copy of the parameters.
SHARING = ("tp", "dp_shard", "fsdp")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The arrangement of a run's ranks.

    `axes` are sizes by name, row-major as in `torch.distributed.init_device_mesh`. `tied` are names
    of one tensor of which several ranks hold copies.
    """

    axes: Mapping[str, int]
    tied: tuple[tuple[str, ...], ...] = ()

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of `rank` along each axis."""
        places: dict[str, int] = {}
        for axis, size in reversed([*self.axes.items()]):
            rank, places[axis] = divmod(rank, size)
        return {axis: places[axis] for axis in self.axes}

    def data(self, rank: int) -> tuple[int, ...]:
        """Return the place of `rank` along the axes of data.

        Ranks at the same place draw the same samples.
        """
        return tuple(place for axis, place in self.coordinates(rank).items() if axis in DATA)

    def replica(self, rank: int) -> tuple[int, ...]:
        """Return the place of `rank` along all axes but those of stages.

        Ranks at the same place hold the parameters of all names between them.
        """
        return tuple(place for axis, place in self.coordinates(rank).items() if axis not in STAGES)

    @property
    def num_parts(self) -> int:
        """Number of ranks over which a parameter is to be spread; stages hold others."""
        return math.prod(size for axis, size in self.axes.items() if axis in SHARING)

    def has(self, names: Iterable[str]) -> bool:
        """Return whether more than one rank is along any of the axes `names`."""
        return any(self.axes.get(name, 1) > 1 for name in names)

    def first_name(self, name: str) -> str:
        """Return the name that a tensor is compared under: the first one of its tie, if any.

        `name` may also be that of optimizer state, `parameter/key`.
        """
        parameter, slash, key = name.partition("/")
        firsts = (tie[0] for tie in self.tied if parameter in tie)
        return f"{next(firsts, parameter)}{slash}{key}"


def plain(world_size: int) -> Layout:
    """Return the layout of ranks that declare none: each draws samples of its own."""
    return Layout(axes={"dp": world_size})


def require(axes: Mapping[Any, Any], world_size: int, where: str) -> dict[str, int]:
    """Return `axes` as sizes by name.

    Raises UsageError, led by `where`, if they can't be those of `world_size` ranks.
    """
    sizes: dict[str, int] = {}
    for axis, size in axes.items():
        if axis not in (*DATA, *MODEL):
            raise UsageError(
                f"{where}: {did_you_mean(str(axis), (*DATA, *MODEL))}; along {', '.join(DATA)} "
                "each rank draws samples of its own, along the others all draw the same"
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"{where}: {axis}={size!r}: use a number of ranks, 1 or more")
        sizes[axis] = size
    num_ranks = math.prod(sizes.values())
    if num_ranks != world_size:
        product = " x ".join(f"{axis}={size}" for axis, size in sizes.items()) or "no axis"
        raise UsageError(
            f"{where}: {product} is {num_ranks} ranks, world_size={world_size}: use sizes whose "
            "product is the world size"
        )
    return sizes


def require_ties(tied: Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """Return `tied` as tuples of names.

    Raises UsageError for a tie of fewer than two names, and for a name that stands in two ties.
    """
    ties = tuple(tuple([tie] if isinstance(tie, str) else map(str, tie)) for tie in tied)
    names = [name for tie in ties for name in tie]
    for tie in ties:
        if len(set(tie)) < 2:
            raise UsageError(
                f"tied={tie}: use tuples of two names or more of one tensor, as "
                'tied=(("embedding.weight", "head.weight"),)'
            )
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"tied: {name} stands twice: name each tensor in one tie, once")
    return ties


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The block of a tensor that a rank holds.

    It has `shape` and begins at `offset` of a tensor of shape `whole`; `ranks` together hold one
    copy of that tensor.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    ranks: tuple[int, ...]

    def to_list(self) -> list[list[int]]:
        """Return the piece as JSON can hold it."""
        return [list(part) for part in (self.offset, self.shape, self.whole, self.ranks)]

    @property
    def place(self) -> tuple[slice, ...]:
        """The slices of the whole tensor that it fills."""
        return tuple(
            slice(begin, begin + size) for begin, size in zip(self.offset, self.shape, strict=True)
        )


def piece_from(parts: Any) -> Piece:
    """Return the piece that `to_list` gave; raises ValueError or TypeError for anything else."""
    offset, shape, whole, ranks = (tuple(map(int, part)) for part in parts)
    fits = len(offset) == len(shape) == len(whole) and all(
        begin >= 0 and size >= 0 and begin + size <= full
        for begin, size, full in zip(offset, shape, whole, strict=True)
    )
    if not fits or not ranks:
        raise ValueError("no piece lies there")
    return Piece(offset=offset, shape=shape, whole=whole, ranks=ranks)
