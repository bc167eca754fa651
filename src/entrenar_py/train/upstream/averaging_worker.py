"""One connection as the averaging coordinator sees it: its phase, and what its shard lacks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.upstream.wire_messages import (
    UPLOADS,
    BlockGradient,
    GradientPayload,
    Heartbeat,
    JoinRequest,
    Part,
    Upload,
    WireMessage,
    part_of,
)
from entrenar_py.train.upstream.wire_terms import BLOCKS_MAX, AveragingRun, Extent

IGNORED_MAX = 64  # messages of a worker that came twice or late, before it is thrown out


class WirePhase(StrEnum):
    """The phase of one connection."""

    CONNECTED = "connected"  # must ask to join
    IDLE = "idle"  # has no shard; what it sends of steps before is late, and ignored
    COMPUTING = "computing"  # has a shard to deliver


MAY_SEND: dict[WirePhase, tuple[type[WireMessage], ...]] = {
    WirePhase.CONNECTED: (JoinRequest,),
    WirePhase.IDLE: (Heartbeat, *UPLOADS),
    WirePhase.COMPUTING: (Heartbeat, *UPLOADS),
}


@dataclass(slots=True)
class AveragingWorker:
    """One connection. Times are seconds on a monotonic clock."""

    host: str
    heard: float  # when the last byte came
    worker_id: int | None = None
    node_id: str = ""
    beats: bool = False  # whether it ever sent a heartbeat
    shard: int | None = None
    since: float = 0.0  # when the shard was assigned
    extents: dict[Part, Extent] = field(default_factory=dict)  # what came of the shard
    num_blocks: int = 0  # as it said with a block of the shard
    num_done: int = 0  # shards of this step that it delivered
    takes_part: bool = False  # gets the averages of this step
    told: set[Part] = field(default_factory=set)  # the averages of this step that were sent to it
    num_ignored: int = 0

    @property
    def phase(self) -> WirePhase:
        """The phase that the connection is in."""
        if self.worker_id is None:
            return WirePhase.CONNECTED
        return WirePhase.IDLE if self.shard is None else WirePhase.COMPUTING

    def name(self) -> str:
        """Return how messages call the worker."""
        return f"worker {self.worker_id} ({self.node_id!r})"

    def begin_step(self) -> None:
        """Note that a step begins, in which the worker takes part."""
        self.num_done, self.takes_part = 0, True
        self.told.clear()

    def assign(self, shard: int, now: float) -> None:
        """Note that the worker has to deliver `shard`."""
        self.shard, self.since, self.heard = shard, now, now
        self.takes_part, self.num_blocks = True, 0
        self.extents.clear()

    def end_shard(self) -> None:
        """Note that the shard is delivered."""
        self.shard = None
        self.num_done += 1

    # --- what it sends ----------------------------------------------------------------------------

    def require_legal(self, message: WireMessage) -> None:
        """Raise ProtocolError unless the worker may send such a message now."""
        if not isinstance(message, MAY_SEND[self.phase]):
            kind = type(message).__name__
            raise ProtocolError(f"{kind} from a connection that is {self.phase}")
        if isinstance(message, UPLOADS) and message.worker_id != self.worker_id:
            raise ProtocolError(f"worker_id={message.worker_id}: it was accepted as {self.name()}")

    def is_due(self, upload: Upload, step: int) -> bool:
        """Return whether `upload` is for the worker's shard of `step`; False if it came twice or
        late. ProtocolError if it can't have been asked for, or came so too often.
        """
        what = f"{type(upload).__name__} of step {upload.step}"
        if upload.step > step:
            raise ProtocolError(f"{what}: the run is at step {step}")
        if upload.step == step:
            if self.shard is not None and part_of(upload) not in self.extents:
                return True
            if self.shard is None and not self.num_done:
                raise ProtocolError(f"{what}: no shard of it was assigned to this worker")
        if self.num_ignored >= IGNORED_MAX:
            raise ProtocolError(f"{what}: the {IGNORED_MAX + 1}th message that came twice or late")
        return False

    def require_possible(self, upload: Upload, run: AveragingRun) -> None:
        """Raise ProtocolError if `upload` is not of this run, or no shard has room for it."""
        part = part_of(upload)
        if isinstance(upload, BlockGradient):
            if not 0 < upload.num_blocks <= BLOCKS_MAX or upload.block >= upload.num_blocks:
                raise ProtocolError(
                    f"block={upload.block} of num_blocks={upload.num_blocks}: use a block below "
                    f"num_blocks, and at most {BLOCKS_MAX} of them"
                )
        elif run.components is not None:
            if isinstance(upload, GradientPayload):
                raise ProtocolError(
                    "GradientPayload: with `components` in the configuration a shard has blocks "
                    "and components alone"
                )
            if upload.component not in run.components:
                raise ProtocolError(f"component={part.number}: use one of {run.components}")
        held = 4 * sum(extent.num_gradients for extent in self.extents.values())
        if held + 4 * upload.gradients > run.gradient_bytes_max:
            raise ProtocolError(
                f"{part}: with it the shard's gradient has {held + 4 * upload.gradients} bytes; "
                f"gradient_bytes_max is {run.gradient_bytes_max}"
            )

    def take(self, upload: Upload) -> None:
        """Note that a part of the shard came."""
        self.extents[part_of(upload)] = Extent.of(upload)
        if isinstance(upload, BlockGradient):
            self.num_blocks = upload.num_blocks
