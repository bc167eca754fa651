"""Bugs in the common step of workers and a parameter server.

Each shows only under a fault. Random schedules of faults (`falsification.schedules`) find every one
of them, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.train.arithmetic import checkpoint
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.wire import frames
from entrenar_py.train.wire.attendance import Member as Seen
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Apply, Effect, Keep, Peer, Send
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import (
    Applied,
    Halt,
    Message,
    NonFinite,
    Welcome,
)
from entrenar_py.train.wire.worker import Worker

from .subjects import COORDINATOR, FRAMES, MEMBER, SERVER, TRAINING, WORKER, star

_payload, _apply_average, _save = Server.payload, Server.apply_average, checkpoint.save
_receive, _drop, _reduced = Coordinator.receive, Coordinator._drop, Coordinator.reduced
_enter, _load = Worker._enter, Member.load
_end_prefix, _end_frame = frames.Decoder._end_prefix, frames.Decoder._end_frame

# server -> its state one step ago, for `state_before`
_before: WeakKeyDictionary[Server, bytes] = WeakKeyDictionary()
_were_in: WeakSet[Worker] = WeakSet()


# --- when a step is made ----------------------------------------------------------------------


def made_when_reduced(
    self: Coordinator, step: int, block: int, loss: float, weight: float, now: float
) -> list[Effect]:
    """Makes the step on the server as soon as the average is complete, before workers commit."""
    last = not self._missing and len(self._reducing) == 1
    effects = _reduced(self, step, block, loss, weight, now)
    return [Apply(step), *effects] if last else effects


def applied_already(self: Coordinator, peer: Peer, message: Message, now: float) -> list[Effect]:
    """Does not make the step on the server when the first worker has made it."""
    effects = _receive(self, peer, message, now)
    if isinstance(message, Applied):
        return [effect for effect in effects if not isinstance(effect, Apply)]
    return effects


def committed_when_reduced(
    self: Coordinator, step: int, block: int, loss: float, weight: float, now: float
) -> list[Effect]:
    """Counts the step as made when the average is complete, before a worker has staged it."""
    last = not self._missing and len(self._reducing) == 1
    self._made |= last
    effects = _reduced(self, step, block, loss, weight, now)
    return [Apply(step), *effects] if last else effects


def any_step(self: Coordinator | Worker, step: int) -> None:
    """Accepts messages of any step."""


def enter_where_it_was(self: Worker, welcome: Welcome) -> list[Effect]:
    """Continues at the step in which the connection was lost."""
    before = self.step
    effects = _enter(self, welcome)
    if self in _were_in:
        self.step = before
    _were_in.add(self)
    return effects


def keep_own_state(self: Member, welcome: Welcome, payload: Buffer) -> None:
    """Keeps the worker's state from when its connection was lost."""
    if not self.replicas.workers:
        _load(self, welcome, payload)
        return
    self.recorder.drain()
    self.replicas.record_start(self.worker, welcome.step)


def halt_for_one(self: Coordinator, peer: Peer, message: Message, now: float) -> list[Effect]:
    """Halts only the worker that found a non-finite value; others take over its shards."""
    if isinstance(message, NonFinite) and peer in self.peers:
        rank = self.peers[peer].in_rank()
        halt = Send(peer, Halt(step=message.step, reason="not finite"))
        return [Keep(rank, message), halt, *_drop(self, peer, "halted", now)]
    return _receive(self, peer, message, now)


def never_silent(self: Coordinator, member: Seen, now: float) -> bool:
    """Waits for silent workers for ever."""
    return False


# --- state that is handed on ------------------------------------------------------------------


def _late(message: Message) -> bool:
    return isinstance(message, Welcome) and message.step > 0 and not message.resumed


def weights_alone(self: Server, message: Message) -> frames.Buffer:
    """Sends no moments to a worker that joins late."""
    if not _late(message):
        return _payload(self, message)
    moments = self.replica.state
    self.replica.state = {name: np.zeros_like(vector) for name, vector in moments.items()}
    try:
        return _payload(self, message)
    finally:
        self.replica.state = moments


def remembered(self: Server, step: int) -> None:
    """Makes the step, and keeps the state from before it for `state_before`."""
    arrays, moments = self.replica.replica.arrays, self.replica.state
    specs, kind = self.replicas.layout.specs, self.plan.optimizer
    _before[self] = bytes(checkpoint.dump_state(specs, kind, self.replicas.stands, arrays, moments))
    _apply_average(self, step)


def state_before(self: Server, message: Message) -> frames.Buffer:
    """Sends the state from before the latest step to a worker that joins late."""
    return _before[self] if _late(message) and self in _before else _payload(self, message)


def torn(path: Path, arrays: checkpoint.Arrays, progress: Mapping[str, Any]) -> None:
    """Overwrites the file in place, and dies before it writes the moments, which stay old."""
    if path.exists():
        old, _ = checkpoint.load(path)
        arrays = {n: old[n] if n.startswith("optimizer/") else a for n, a in arrays.items()}
    _save(path, arrays, progress)


# --- frames -----------------------------------------------------------------------------------


def any_number(self: frames.Decoder) -> frames.Received | None:
    """Accepts a frame with any number, even a repeated one."""
    self._number = int.from_bytes(self._prefix[8:16], "little")
    _end_prefix(self)
    return None


def any_checksum(self: frames.Decoder) -> frames.Received | None:
    """Accepts a frame with any checksum."""
    assert self._received is not None
    key = frames.NO_KEY if isinstance(self._received.message, frames.UNKEYED) else self.key
    fields = self._prefix[: frames.FIELDS.size]
    right = frames.checksum_of(key, fields, self._header, self._chunk)
    self._prefix[frames.FIELDS.size :] = right
    return _end_frame(self)


def _at(kind: str, place: str, *, rank: int = 1, step: int = 1) -> Fault:
    return Fault(kind=kind, rank=rank, step=step, at=place)


def _lie(value: str) -> Fault:
    return Fault(kind="lie", rank=1, step=1, at="TreeNode", value=value)


_LEAVING = star(faults=(Fault(kind="leave", rank=1, step=1),))
_ALL_DIE = star(world_size=2, faults=tuple(_at("kill", "Average", rank=n) for n in (0, 1)))
_BACK = star(faults=(_at("cut", "Commit"),), optimizer="momentum")

VARIANTS = (
    Variant(
        name="old-step-counted",
        summary="the step of a delivery is never checked",
        source="classic (stale gradient)",
        plants={f"{COORDINATOR}.Coordinator._require_step": any_step},
        scenario=star(faults=(_lie("old_step"),)),
        invariants=("F-WP-005",),
        place={"step": 1, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="flips-pass",
        summary="the checksum of a received frame is never checked",
        source="classic (silent corruption in transit)",
        plants={f"{FRAMES}.Decoder._end_frame": any_checksum},
        scenario=star(faults=(_at("flip", "TreeNode"),)),
        invariants=("F-WP-005", "F-DP-005"),
        place={"step": 1, "rank": 0, "tensor": "hidden1.weight", "element": 404},
    ),
    Variant(
        name="made-when-reduced",
        summary="the server takes a step before any worker; if all die, it takes the step again",
        source="classic (two-phase commit)",
        plants={
            f"{COORDINATOR}.Coordinator.reduced": made_when_reduced,
            f"{COORDINATOR}.Coordinator.receive": applied_already,
        },
        scenario=_ALL_DIE,
        invariants=("F-DP-001",),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="committed-when-reduced",
        summary="a step counts as taken before it is staged; if all workers die, nobody took it",
        source="classic (two-phase commit)",
        plants={f"{COORDINATOR}.Coordinator.reduced": committed_when_reduced},
        scenario=_ALL_DIE,
        invariants=("F-DP-002", "F-WP-005"),
        place={"step": 1},
    ),
    Variant(
        name="stale-step-accepted",
        summary="a disconnected worker continues at its own step, without comparing steps",
        source="classic (elastic training)",
        plants={
            f"{MEMBER}.Member.load": keep_own_state,
            f"{WORKER}.Worker._enter": enter_where_it_was,
            f"{WORKER}.Worker._require_step": any_step,
            f"{COORDINATOR}.Coordinator._require_step": any_step,
        },
        scenario=_BACK,
        invariants=("F-DP-001", "F-DP-002"),
        place={"step": 1, "rank": 1},
    ),
    Variant(
        name="halt-for-one",
        summary="a non-finite value halts only its worker, and the others take its shards",
        source="classic (halt not propagated)",
        plants={f"{COORDINATOR}.Coordinator.receive": halt_for_one},
        scenario=star(
            faults=(
                Fault(kind="non_finite_gradient", step=2, rank=1, shard=2, element=3, value="nan"),
            )
        ),
        invariants=("F-DP-003",),
        place={"step": 2, "rank": 1, "shard": 2},
    ),
    Variant(
        name="never-given-up",
        summary="the coordinator waits for a silent worker forever",
        source="classic (no deadline)",
        plants={f"{COORDINATOR}.Coordinator._is_silent": never_silent},
        scenario=star(faults=(_at("half_open", "TreeNode"),)),
        invariants=("F-WP-005",),
        place={"step": 1},
    ),
    Variant(
        name="rejoin-without-moments",
        summary="a worker that rejoins gets the weights, but no moments",
        source="torch elastic",
        plants={f"{SERVER}.Server.payload": weights_alone},
        scenario=_BACK,
        invariants=("F-DP-001",),
        place={"step": 1, "rank": 1, "tensor": "momentum"},
    ),
    Variant(
        name="rejoin-one-step-old",
        summary="a worker that rejoins gets the state from before the latest step",
        source="classic (asynchronous snapshot)",
        plants={
            f"{SERVER}.Server.apply_average": remembered,
            f"{SERVER}.Server.payload": state_before,
        },
        scenario=_BACK,
        invariants=("F-DP-001",),
        place={"step": 1, "rank": 1, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="checkpoint-torn",
        summary="a checkpoint overwrites the old one in place, and is never complete",
        source="classic (not atomic)",
        plants={f"{TRAINING}.checkpoint.save": torn},
        scenario=star(stops=(1, 2), optimizer="momentum"),
        invariants=("F-TI-002",),
        place={"step": 2, "tensor": "momentum"},
    ),
)
