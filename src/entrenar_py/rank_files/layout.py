"""Along which axes the ranks of a run are arranged, and which part of a tensor a rank holds.

Nothing of torch: what a rank declares when it runs, and what is read of its file when it is over.
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
# Ranks along these hold parameters of other names; along all others each has each parameter, if
# only a piece of it.
STAGES = ("pp", "ep")
# Along these a rank computes on a part of each sample: its gradient is a part of a sum.
PARTIAL = ("sp", "cp")
# Together the ranks along these hold one copy of the parameters.
SHARING = ("tp", "dp_shard", "fsdp")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`axes`: name -> size, row-major as `torch.distributed.init_device_mesh` has them. `tied`:
    names of one tensor, of which ranks hold copies.
    """

    axes: Mapping[str, int]
    tied: tuple[tuple[str, ...], ...] = ()

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> where along it `rank` is."""
        found: dict[str, int] = {}
        for axis, size in reversed([*self.axes.items()]):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.axes}

    def data(self, rank: int) -> tuple[int, ...]:
        """Where `rank` is along the axes of data: ranks at one place draw the same samples."""
        return tuple(at for axis, at in self.coordinates(rank).items() if axis in DATA)

    def replica(self, rank: int) -> tuple[int, ...]:
        """Where `rank` is along all axes but those of stages: together those hold all names."""
        return tuple(at for axis, at in self.coordinates(rank).items() if axis not in STAGES)

    @property
    def num_parts(self) -> int:
        """Over how many ranks parameters are to be spread; of stages each has its own."""
        return math.prod(size for axis, size in self.axes.items() if axis in SHARING)

    def has(self, names: Iterable[str]) -> bool:
        """Whether more than one rank is along one of these axes."""
        return any(self.axes.get(name, 1) > 1 for name in names)

    def first_name(self, name: str) -> str:
        """The name that a tensor is compared under: the first one of a tie; also of what an
        optimizer keeps of it, `parameter/key`.
        """
        parameter, slash, key = name.partition("/")
        firsts = (tie[0] for tie in self.tied if parameter in tie)
        return f"{next(firsts, parameter)}{slash}{key}"


def plain(world_size: int) -> Layout:
    """The layout of ranks of which nothing is known: each draws samples of its own."""
    return Layout(axes={"dp": world_size})


def require(axes: Mapping[Any, Any], world_size: int, where: str) -> dict[str, int]:
    """`axes` if they can be those of `world_size` ranks; UsageError, with what is allowed."""
    found: dict[str, int] = {}
    for axis, size in axes.items():
        if axis not in (*DATA, *MODEL):
            raise UsageError(
                f"{where}: {did_you_mean(str(axis), (*DATA, *MODEL))}; along {', '.join(DATA)} "
                "each rank draws samples of its own, along the others all draw the same"
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"{where}: {axis}={size!r}: use a number of ranks, 1 or more")
        found[axis] = size
    num_ranks = math.prod(found.values())
    if num_ranks != world_size:
        raise UsageError(
            f"{where}: {' x '.join(f'{axis}={size}' for axis, size in found.items()) or 'no axis'} "
            f"is {num_ranks} ranks, world_size={world_size}: use sizes whose product is that"
        )
    return found


def require_ties(tied: Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """`tied` if each tie has two names or more, and no name stands in two; else UsageError."""
    found = tuple(tuple([tie] if isinstance(tie, str) else map(str, tie)) for tie in tied)
    names = [name for tie in found for name in tie]
    for tie in found:
        if len(set(tie)) < 2:
            raise UsageError(
                f"tied={tie}: use tuples of two names or more of one tensor, as "
                'tied=(("embedding.weight", "head.weight"),)'
            )
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"tied: {name} stands twice: name each tensor in one tie, once")
    return found


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part of a tensor that a rank holds: of a `whole` of this shape the block of `shape` that
    begins at `offset`; `ranks` together hold one copy of all of it.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    ranks: tuple[int, ...]

    def to_list(self) -> list[list[int]]:
        """As JSON can hold it."""
        return [list(part) for part in (self.offset, self.shape, self.whole, self.ranks)]

    @property
    def place(self) -> tuple[slice, ...]:
        """Where it lies in the whole."""
        return tuple(
            slice(begin, begin + size) for begin, size in zip(self.offset, self.shape, strict=True)
        )


def piece_from(parts: Any) -> Piece:
    """The piece that `to_list` gave; ValueError or TypeError for anything else."""
    offset, shape, whole, ranks = (tuple(map(int, part)) for part in parts)
    fits = len(offset) == len(shape) == len(whole) and all(
        begin >= 0 and size >= 0 and begin + size <= full
        for begin, size, full in zip(offset, shape, whole, strict=True)
    )
    if not fits or not ranks:
        raise ValueError("no piece lies there")
    return Piece(offset=offset, shape=shape, whole=whole, ranks=ranks)
