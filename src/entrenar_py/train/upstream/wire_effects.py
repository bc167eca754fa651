"""Effects of the machine of the original system's wire, in addition to those of `effects`."""

from __future__ import annotations

from entrenar_py.train.upstream.wire_messages import JoinRequest, Part, WireMessage
from entrenar_py.train.wire.effects import Effect, Peer


class Tell(Effect):
    """Send `message` to `peer`, with the average of `part` if it is of one."""

    peer: Peer
    message: WireMessage
    part: Part | None = None


class Admit(Effect):
    """Take what a worker sends from `peer`, which takes part from now on."""

    peer: Peer


class Enlist(Effect):
    """`worker` takes part from now on, as `asked`; `late` if `step` had begun without it."""

    worker: int
    step: int
    late: bool
    asked: JoinRequest


class KeepPart(Effect):
    """Keep the gradients just received from `worker`: they are `part` of `shard`."""

    worker: int
    shard: int
    part: Part


class VoidPart(Effect):
    """Forget `part` of `shard`: the worker left before the shard was complete."""

    shard: int
    part: Part


class AveragePart(Effect):
    """Average `part` of `step`, kept for every shard; then call `averaged`.

    `weights` has a weight for each shard, in order.
    """

    step: int
    part: Part
    weights: tuple[int, ...]


class BeginStep(Effect):
    """`step` is next; forget the averages of the one before."""

    step: int


class MadeStep(Effect):
    """All parts of `step` are averaged. `workers` computed shards of it; `parts` are in order.

    `loss` is the weighted mean loss, `correct` and `total` are summed; all are None if the shards
    end without GradientPayload, which has them.
    """

    step: int
    workers: tuple[int, ...]
    parts: tuple[Part, ...]
    num_samples: int
    loss: float | None
    correct: int | None
    total: int | None
