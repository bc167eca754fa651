"""The axes along which a run's ranks are arranged, and the part of a tensor that a rank has.

A rank declares both while it runs. This module reads them from the rank's file, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from entrenar_py.shared.errors import UsageError, did_you_mean

# Each rank along the DATA axes draws its own samples. Along the MODEL axes all ranks draw the same
# samples.
DATA = ("dp", "dp_replicate", "dp_shard", "fsdp")
MODEL = ("tp", "sp", "pp", "cp", "ep")
# Other names that scripts give to these axes.
ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("data", "ddp"), "dp"),
    **dict.fromkeys(("replicate", "replica", "dp_rep", "dp_replica"), "dp_replicate"),
    **dict.fromkeys(("shard", "dp_sharded"), "dp_shard"),
    "tensor": "tp",
    **dict.fromkeys(("sequence", "sequence_parallel"), "sp"),
    **dict.fromkeys(("pipe", "pipeline", "pipeline_parallel", "stage"), "pp"),
    **dict.fromkeys(("context", "context_parallel"), "cp"),
    **dict.fromkeys(("expert", "expert_parallel"), "ep"),
}
# Ranks along these axes have different parameters. Along all other axes each rank has every
# parameter, or a piece of it.
STAGES = ("pp", "ep")
# Along these axes a rank computes on a part of each sample, so its gradient is a term of a sum.
PARTIAL = ("sp", "cp")
# The ranks along these axes together have one copy of the parameters.
SHARING = ("tp", "dp_shard", "fsdp")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The arrangement of a run's ranks.

    `axes` maps names to sizes, row-major as in `torch.distributed.init_device_mesh`. Each item of
    `tied` has the names under which ranks hold one tensor. `owned` names the tensors that only some
    ranks have, and that these update for the samples of all ranks, so that no micro-batch has its
    own gradient for them.
    """

    axes: Mapping[str, int]
    tied: tuple[tuple[str, ...], ...] = ()
    owned: frozenset[str] = frozenset()

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` along each axis."""
        places: dict[str, int] = {}
        for axis, size in reversed([*self.axes.items()]):
            rank, places[axis] = divmod(rank, size)
        return {axis: places[axis] for axis in self.axes}

    def data(self, rank: int) -> tuple[int, ...]:
        """Return the position of `rank` along the DATA axes.

        Ranks at the same position draw the same samples.
        """
        return tuple(place for axis, place in self.coordinates(rank).items() if axis in DATA)

    def parity(self, rank: int) -> int:
        """Return 0 or 1, alternating along the axes on which ranks have different tokens.

        Ranks with the same tokens have the same parity.
        """
        own = (*DATA, *PARTIAL)
        return sum(place for axis, place in self.coordinates(rank).items() if axis in own) % 2

    def replica(self, rank: int) -> tuple[int, ...]:
        """Return the position of `rank` along all axes except STAGES.

        Ranks at the same position together have all parameters.
        """
        return tuple(place for axis, place in self.coordinates(rank).items() if axis not in STAGES)

    @property
    def num_parts(self) -> int:
        """The number of ranks over which each parameter should be spread."""
        return math.prod(size for axis, size in self.axes.items() if axis in SHARING)

    def has(self, names: Iterable[str]) -> bool:
        """Return whether any of the axes `names` has more than one rank."""
        return any(self.axes.get(name, 1) > 1 for name in names)

    def first_name(self, name: str) -> str:
        """Return the name under which a tensor is compared: the first name of its tie, if any.

        `name` may also be the name of optimizer state, `parameter/key`.
        """
        parameter, slash, key = name.partition("/")
        firsts = (tie[0] for tie in self.tied if parameter in tie)
        return f"{next(firsts, parameter)}{slash}{key}"


def plain(world_size: int) -> Layout:
    """Return the layout of ranks that declare none, so that each draws its own samples."""
    return Layout(axes={"dp": world_size})


def knows(names: Iterable[str] | None) -> bool:
    """Return whether `names` are distinct axes along which ranks can be arranged.

    False for None.
    """
    axes = [ALIASES.get(name, name) for name in names or ()]
    return names is not None and {*axes} <= {*DATA, *MODEL} and len({*axes}) == len(axes)


def are_data(names: Iterable[str]) -> bool:
    """Return whether each rank draws its own samples along all axes with these names."""
    return all(ALIASES.get(name, name) in DATA for name in names)


def require(axes: Mapping[Any, Any], world_size: int, where: str) -> dict[str, int]:
    """Return name -> size of the axes, with names in ALIASES replaced by the usual ones.

    Raises UsageError, with a message that begins with `where`, if they can't be the axes of
    `world_size` ranks.
    """
    sizes: dict[str, int] = {}
    for name, size in axes.items():
        axis = ALIASES.get(name, name)
        if axis in sizes:
            raise UsageError(f"{where}: {axis!r} and another name of it: give each axis once")
        if axis not in (*DATA, *MODEL):
            raise UsageError(
                f"{where}: axis {axis!r}: {did_you_mean(axis, (*DATA, *MODEL))}; "
                f"along {', '.join(DATA)} each rank draws samples of its own, "
                "along the others all draw the same"
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"{where}: {axis}={size!r}: use a number of ranks, 1 or more")
        sizes[axis] = size
    num_ranks = math.prod(sizes.values())
    if num_ranks != world_size:
        product = " x ".join(f"{axis}={size}" for axis, size in sizes.items()) or "no axis"
        raise UsageError(
            f"{where}: {product} is {num_ranks} ranks, world_size={world_size}: use sizes with "
            "the world size as their product"
        )
    return sizes


def require_ties(tied: Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """Return `tied` as tuples of names.

    Raises UsageError if a tie has fewer than two names, or if a name occurs twice.
    """
    ties = tuple(tuple([tie] if isinstance(tie, str) else map(str, tie)) for tie in tied)
    names = [name for tie in ties for name in tie]
    for tie in ties:
        if len(set(tie)) < 2:
            raise UsageError(
                f"tied={tie}: use tuples of two or more names of one tensor, such as "
                'tied=(("embedding.weight", "head.weight"),)'
            )
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"tied: {name} is named twice: name each tensor once, in one tie")
    return ties


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The block of a tensor that a rank has.

    The block has `shape` and begins at `offset` in the whole tensor, which has the shape `whole`.
    The ranks in `ranks` together have one copy of the whole tensor.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    ranks: tuple[int, ...]

    def to_list(self) -> list[list[int]]:
        """Return the piece as lists that can be written as JSON."""
        return [list(part) for part in (self.offset, self.shape, self.whole, self.ranks)]

    def arranged(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the flat elements of the piece in the shape that `place` selects."""
        return values.reshape(self.shape)

    @property
    def place(self) -> tuple[Any, ...]:
        """The slices of the whole tensor that the piece fills."""
        return tuple(
            slice(begin, begin + size) for begin, size in zip(self.offset, self.shape, strict=True)
        )


def piece_from(parts: Any) -> Piece:
    """Return the Piece that `to_list` wrote as `parts`.

    Raises ValueError or TypeError if `parts` are not the lists of a possible piece.
    """
    offset, shape, whole, ranks = (tuple(map(int, part)) for part in parts)
    fits = len(offset) == len(shape) == len(whole) and all(
        begin >= 0 and size >= 0 and begin + size <= full
        for begin, size, full in zip(offset, shape, whole, strict=True)
    )
    if not fits or not ranks:
        raise ValueError("no piece lies there")
    return Piece(offset=offset, shape=shape, whole=whole, ranks=ranks)
