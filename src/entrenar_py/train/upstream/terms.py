"""The terms of a run over the original system's wire, and the effects of its state machine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.upstream.frames import (
    BlockGradient,
    JoinRequest,
    NonBlock,
    Part,
    Upload,
    WireMessage,
)
from entrenar_py.train.wire.effects import Effect, Peer

BLOCKS_MAX = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingRun:
    """A run of `num_steps` steps by at most `world_size` workers, which hold the weights.

    In each step, the next `batch_size` of `num_samples` samples, in numeric order, are cut into
    `num_shards` shards; the last batch of an epoch may be shorter. The run waits for `num_awaited`
    workers before its first step. `gradient_bytes_max` limits the total size of one shard's
    gradient. A shard ends with its GradientPayload or, if `components` are given, with the last of
    its blocks and these components. If `late_joins`, workers may join after the first step has
    begun.
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

    A connection has `hello_s` for its JoinRequest, and a worker has `shard_s` for a shard. A worker
    that sends heartbeats is dropped if it has a shard and no byte of it arrives for `dead_after_s`.
    A run fails after `gather_s` without enough workers.
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
    """The size of a part: the number of its gradients, and the sizes of a block's components."""

    num_gradients: int
    component_sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, upload: Upload) -> Extent:
        """Return the extent of the part in `upload`."""
        sizes = upload.component_sizes if isinstance(upload, BlockGradient) else ()
        return cls(upload.gradients, sizes)


def parts_of(components: tuple[int, ...], num_blocks: int) -> set[Part]:
    """Return the parts of a gradient of `num_blocks` blocks and these components."""
    blocks = {Part(BlockGradient.tag, block) for block in range(num_blocks)}
    return blocks | {Part(NonBlock.tag, component) for component in components}


def lacking(parts: Collection[Part], num_blocks: int) -> list[Part]:
    """Return the blocks that are missing in `parts`, if it has any block."""
    if not any(part.tag == BlockGradient.tag for part in parts):
        return []
    return sorted(parts_of((), num_blocks).difference(parts))


class Tell(Effect):
    """Send `message` to `peer`, with the average of `part` unless that is None."""

    peer: Peer
    message: WireMessage
    part: Part | None = None


class Admit(Effect):
    """Accept a worker's messages from `peer`, which takes part from now on."""

    peer: Peer


class Enlist(Effect):
    """`worker` takes part from now on. `late` is true if `step` had begun without it."""

    worker: int
    step: int
    late: bool
    asked: JoinRequest


class KeepPart(Effect):
    """Keep the gradients just received from `worker` as `part` of `shard`."""

    worker: int
    shard: int
    part: Part


class VoidPart(Effect):
    """Forget `part` of `shard`: the worker left before the shard was complete."""

    shard: int
    part: Part


class AveragePart(Effect):
    """Average `part` of `step`, which was kept for every shard; then call `averaged`.

    `weights` has a weight for each shard, in order.
    """

    step: int
    part: Part
    weights: tuple[int, ...]


class BeginStep(Effect):
    """`step` is next; forget the averages of the previous step."""

    step: int


class MadeStep(Effect):
    """All parts of `step` are averaged. `workers` computed its shards; `parts` are in order.

    `loss` is the weighted mean loss; `correct` and `total` are sums. All three are None if shards
    end without a GradientPayload, which carries them.
    """

    step: int
    workers: tuple[int, ...]
    parts: tuple[Part, ...]
    num_samples: int
    loss: float | None
    correct: int | None
    total: int | None
