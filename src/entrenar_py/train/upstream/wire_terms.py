"""The terms of a run over the original system's wire: its steps, its shards, its bounds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.upstream.wire_messages import (
    BlockGradient,
    NonBlock,
    Part,
    Upload,
)

BLOCKS_MAX = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingRun:
    """A run of `num_steps` steps by at most `world_size` workers, which hold the weights.

    Step by step the next `batch_size` of `num_samples` samples, in the order of their numbers, are
    cut into `num_shards` shards; the last batch of an epoch is short. The run waits for
    `num_awaited` workers before its first step. `gradient_bytes_max` limits what all parts of one
    shard's gradient take. A shard ends with its GradientPayload, or, if `components` are given,
    with the last of its blocks and these components. `late_joins`: workers may join after the first
    step has begun.
    """

    num_samples: int
    num_steps: int
    world_size: int
    num_shards: int
    batch_size: int
    num_awaited: int
    gradient_bytes_max: int
    components: tuple[int, ...] | None
    late_joins: bool

    def shards(self, step: int) -> list[range]:
        """Return the samples of each shard of `step`, in order; none of them is empty."""
        steps_an_epoch = -(-self.num_samples // self.batch_size)
        begin = step % steps_an_epoch * self.batch_size
        ids = range(begin, min(begin + self.batch_size, self.num_samples))
        parts = sharding.cut(ids, self.num_shards)
        return [range(part[0], part[-1] + 1) for part in parts if part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """The timeouts, in seconds.

    A connection has `hello_s` for its JoinRequest, a worker `shard_s` for a shard. A worker that
    sends heartbeats is given up after `dead_after_s` without a byte of it while it has a shard. A
    run fails after `gather_s` without enough workers.
    """

    hello_s: float = 10.0
    dead_after_s: float = 30.0
    shard_s: float = 600.0
    gather_s: float = 300.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < float("inf"):
                raise UsageError.of(name, value, "use a number of seconds > 0")


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a part: the number of its gradients, and of each component of a block."""

    num_gradients: int
    component_sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, upload: Upload) -> Extent:
        """Return the extent of what `upload` carries."""
        sizes = upload.component_sizes if isinstance(upload, BlockGradient) else ()
        return cls(upload.gradients, sizes)


def parts_of(components: tuple[int, ...], num_blocks: int) -> set[Part]:
    """Return the parts of a gradient of `num_blocks` blocks and these components."""
    blocks = {Part(BlockGradient.tag, block) for block in range(num_blocks)}
    return blocks | {Part(NonBlock.tag, component) for component in components}


def lacking(parts: Collection[Part], num_blocks: int) -> list[Part]:
    """Return the blocks that are not in `parts`, if any block is."""
    if not any(part.tag == BlockGradient.tag for part in parts):
        return []
    return sorted(parts_of((), num_blocks).difference(parts))
