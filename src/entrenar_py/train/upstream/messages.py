"""The messages of the original system's wire: a record for each, and a table of all.

A frame is a u32 in big-endian order, the number of bytes that follow; then a byte, the tag; then
the fields, little-endian, in the order in which the records list them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias, dataclass_transform

U8: TypeAlias = int
U32: TypeAlias = int
U64: TypeAlias = int
F32: TypeAlias = float
Text: TypeAlias = str  # u32, the number of bytes, then UTF-8
Sizes: TypeAlias = tuple[int, ...]  # u64, how many, then a u32 each
# u64, how many, then a float32 each. A record has only their number; the values are its payload.
Gradients: TypeAlias = int

COORDINATOR, WORKER, EITHER = "coordinator", "worker", "either"


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True)
class WireMessage:
    """A message. `tag` is its kind on the wire, `sender` the end that sends it.

    Every subclass is a frozen dataclass. Its fields are the message's.
    """

    tag: ClassVar[int]
    sender: ClassVar[str]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class JoinRequest(WireMessage):
    """Request to take part; the first message of a connection."""

    tag: ClassVar[int] = 0x01
    sender: ClassVar[str] = WORKER
    node_id: Text
    gpu_count: U32
    backend: Text


class JoinAccepted(WireMessage):
    """The worker takes part as `worker_id`; `total_workers` is the number of places."""

    tag: ClassVar[int] = 0x02
    sender: ClassVar[str] = COORDINATOR
    worker_id: U32
    total_workers: U32


class ShardAssignment(WireMessage):
    """Request for the gradient of samples `start` to `end` - 1 with the weights before `step`."""

    tag: ClassVar[int] = 0x03
    sender: ClassVar[str] = COORDINATOR
    step: U64
    start: U64
    end: U64


class GradientPayload(WireMessage):
    """The mean gradient and the mean loss over the `total` samples of the worker's shard.

    `correct` of them were predicted right. It is the last message of a shard, unless the
    configuration lists `components`.
    """

    tag: ClassVar[int] = 0x04
    sender: ClassVar[str] = WORKER
    step: U64
    worker_id: U32
    gradients: Gradients
    loss: F32
    correct: U64
    total: U64


class AveragedGradient(WireMessage):
    """The mean of all shards' gradients and losses, each weighted by its `total`."""

    tag: ClassVar[int] = 0x05
    sender: ClassVar[str] = COORDINATOR
    step: U64
    gradients: Gradients
    loss: F32


class Heartbeat(WireMessage):
    """The worker is alive; it gets no answer. `timestamp_ms` is not read."""

    tag: ClassVar[int] = 0x06
    sender: ClassVar[str] = EITHER
    node_id: Text
    timestamp_ms: U64


class Shutdown(WireMessage):
    """The run is over: complete, halted or stopped. No more averages follow."""

    tag: ClassVar[int] = 0x07
    sender: ClassVar[str] = COORDINATOR


class BlockGradient(WireMessage):
    """The mean gradient of one of `num_blocks` blocks over the worker's shard.

    The components of the block follow each other; `component_sizes` has their lengths, which add up
    to the number of `gradients`.
    """

    tag: ClassVar[int] = 0x08
    sender: ClassVar[str] = WORKER
    step: U64
    worker_id: U32
    block: U32
    num_blocks: U32
    component_sizes: Sizes
    gradients: Gradients


class AveragedBlock(WireMessage):
    """The mean of all shards' gradients of a block, each weighted by the shard's samples."""

    tag: ClassVar[int] = 0x09
    sender: ClassVar[str] = COORDINATOR
    step: U64
    block: U32
    component_sizes: Sizes
    gradients: Gradients


class NonBlock(WireMessage):
    """The mean gradient of a component outside of all blocks (a head, a norm, an embedding)."""

    tag: ClassVar[int] = 0x0A
    sender: ClassVar[str] = WORKER
    step: U64
    worker_id: U32
    component: U8
    gradients: Gradients


class AveragedNonBlock(WireMessage):
    """The mean of all shards' gradients of a component, each weighted by the shard's samples."""

    tag: ClassVar[int] = 0x0B
    sender: ClassVar[str] = COORDINATOR
    step: U64
    component: U8
    gradients: Gradients


WIRE_MESSAGES: dict[int, type[WireMessage]] = {
    kind.tag: kind
    for kind in (
        *(JoinRequest, JoinAccepted, ShardAssignment, GradientPayload, AveragedGradient),
        *(Heartbeat, Shutdown, BlockGradient, AveragedBlock, NonBlock, AveragedNonBlock),
    )
}
FROM_WORKERS = tuple(k for k in WIRE_MESSAGES.values() if k.sender in (WORKER, EITHER))

Upload: TypeAlias = GradientPayload | BlockGradient | NonBlock
UPLOADS = (GradientPayload, BlockGradient, NonBlock)


class Part(NamedTuple):
    """A part of the gradient that travels and is averaged by itself: tag of its upload, number."""

    tag: int
    number: int

    def __str__(self) -> str:
        if self.tag == GradientPayload.tag:
            return "the gradient"
        noun = "block" if self.tag == BlockGradient.tag else "component"
        return f"{noun} {self.number}"


WHOLE = Part(GradientPayload.tag, 0)


def part_of(upload: Upload) -> Part:
    """Return the part that `upload` carries."""
    if isinstance(upload, BlockGradient):
        return Part(upload.tag, upload.block)
    return WHOLE if isinstance(upload, GradientPayload) else Part(upload.tag, upload.component)
