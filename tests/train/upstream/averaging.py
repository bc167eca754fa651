"""An averaging coordinator without sockets, and workers that speak the bytes of the description."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from entrenar_py.train.upstream.averager import Averager
from entrenar_py.train.upstream.frames import WireMessage
from entrenar_py.train.upstream.server import AveragingEnd
from entrenar_py.train.upstream.terms import AveragingRun, Patience
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.frames import Buffer
from tests.train.upstream import original
from tests.train.wire_io.fakes import AtOnce

PATIENCE = Patience(hello_s=10.0, dead_after_s=30.0, shard_s=600.0, gather_s=300.0)
FRAME_BYTES_MAX = 2**20


def run_of(**changes: Any) -> AveragingRun:
    """Return a run of two steps over ten samples, by two workers."""
    usual: dict[str, Any] = {
        "num_samples": 10,
        "num_steps": 2,
        "world_size": 2,
        "gradient_bytes_max": 2**20,
        "components": None,
        "late_joins": True,
    }
    given = {**usual, **changes}
    given.setdefault("num_shards", given["world_size"])
    given.setdefault("batch_size", given["num_samples"])
    given.setdefault("num_awaited", given["world_size"])
    return AveragingRun(**given)


class Office:
    """The coordinator. `told` are its effects; `closed` has why it closed each connection."""

    def __init__(self, **changes: Any) -> None:
        self.now = 0.0
        self.told: list[Effect] = []
        self.closed: dict[Peer, str] = {}
        self.admitted: list[Peer] = []
        self._boxes: defaultdict[Peer, bytearray] = defaultdict(bytearray)
        machine = Averager(run_of(**changes), patience=PATIENCE, now=0.0)
        self.end = AveragingEnd(
            *(machine, self, lambda: self.now, AtOnce()),
            frame_bytes_max=FRAME_BYTES_MAX,
            notify=self.told.append,
        )

    # --- what the end writes to -------------------------------------------------------------------

    def write(self, peer: Peer, message: WireMessage, buffers: Sequence[Buffer]) -> None:
        assert peer not in self.closed
        self._boxes[peer] += b"".join(buffers)

    def admit(self, peer: Peer) -> None:
        self.admitted.append(peer)

    def close(self, peer: Peer, reason: str) -> None:
        self.closed[peer] = reason

    # --- what workers do --------------------------------------------------------------------------

    def connect(self, peer: Peer) -> None:
        self.end.connected(peer, "127.0.0.1")

    def say(self, peer: Peer, *frames: bytes, piece: int = 2**20) -> None:
        """Send frames, in pieces; nothing is read of a connection that was closed."""
        data = b"".join(frames)
        while data:
            place = self.end.buffer(peer)
            if place is None:
                return
            size = min(piece, len(data), place.nbytes)
            place[:size] = data[:size]
            data = data[size:]
            self.end.filled(peer, size)

    def heard(self, peer: Peer, *, count: str = "<Q") -> list[tuple[Any, ...]]:
        """Return what was sent to `peer` since the last call."""
        box = bytes(self._boxes.pop(peer, b""))
        at, found = 0, []

        def read(size: int) -> bytes:
            nonlocal at
            at += size
            return box[at - size : at]

        while at < len(box):
            found.append(original.parsed(original.body(read), count=count))
        return found

    def join(self, *peers: Peer) -> None:
        """Let `peers` connect and join."""
        for peer in peers:
            self.connect(peer)
            self.say(peer, original.join(str(peer)))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.end.tick()

    def effects(self, kind: type[Effect]) -> list[Any]:
        return [effect for effect in self.told if isinstance(effect, kind)]
