"""A worker of a star: it joins, loads the state, computes its shards and applies committed steps.

It is a state machine like the coordinator, which is its only peer. Its driver connects it, and
reconnects it when the connection is lost.
"""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Sequence
from itertools import count

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import messages as say
from entrenar_py.train.wire.attendance import THROWN_OUT_MAX, Expulsions, problem
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.messages import TAKING_PART, WORKER_MAY_HEAR
from entrenar_py.train.wire.messages import WorkerPhase as Phase
from entrenar_py.train.wire.terms import Terms, Timing, greet


class Worker:
    """The worker's state machine. Times are seconds on a monotonic clock."""

    may_hear = WORKER_MAY_HEAR

    def __init__(
        self,
        terms: Terms,
        *,
        secret: bytes,
        backend: str,
        rank: int | None = None,
        port: int | None = None,
        timing: Timing,
    ) -> None:
        self.terms, self.secret, self.timing = terms, secret, timing
        self.backend = backend
        self.rank, self.port = rank, port
        self.step = 0
        self.phase = Phase.AWAY
        self._peer: Peer = None
        self._nonce = ""
        self._heard = self._said = 0.0
        self._expected = ""  # the coordinator's proof
        self._work: deque[do.Compute] = deque()  # the first is being computed
        self._tickets = count()
        self._num_blocks = 0
        self._thrown_out = Expulsions()  # since the last step that this worker applied
        self._held: set[int] = set()  # received blocks of the average or the new weights of `step`

    # --- events -----------------------------------------------------------------------------------

    def connected(self, peer: Peer, nonce: str, now: float) -> list[Effect]:
        """Return the effects of a new connection to the coordinator.

        `nonce` has 32 random hex digits. A worker that is over disconnects.
        """
        if self.phase is Phase.OVER:
            return [do.Close(peer, "this worker is over")]
        self._peer, self._nonce = peer, nonce
        self._heard = self._said = now
        self._work.clear()
        self.phase = Phase.CONNECTED
        return []

    def heard(self, now: float) -> None:
        """Note that a whole frame arrived."""
        self._heard = now

    def receive(self, message: say.Message, now: float) -> list[Effect]:
        """Return the effects of a whole message. An illegal message ends the connection."""
        self._heard = now
        try:
            if not isinstance(message, self.may_hear[self.phase]):
                raise ProtocolError(f"{type(message).__name__} to a worker that is {self.phase}")
            return self._turn(message)
        except ProtocolError as error:
            return self._object(str(error))

    def lost(self, reason: str) -> list[Effect]:
        """Return the effects of a lost connection."""
        return [] if self.phase in (Phase.AWAY, Phase.OVER) else self._drop(reason)

    def broken(self, reason: str) -> list[Effect]:
        """Return the effects that end a connection over which malformed bytes arrived."""
        if self.phase in (Phase.AWAY, Phase.OVER):
            return []
        return self._object(reason)

    def _object(self, reason: str) -> list[Effect]:
        if self.phase not in TAKING_PART:
            return self._drop(reason)
        return [do.Send(self._peer, say.Leave(reason=say.brief(reason))), *self._depart(reason)]

    def leave(self, reason: str) -> list[Effect]:
        """Return the effects that leave the run for good.

        A connected coordinator gets the reason.
        """
        if self.phase in (Phase.AWAY, Phase.OVER):
            self.phase = Phase.OVER
            return [do.Finish("failed", f"left: {reason}")]
        greeted = self.phase not in (Phase.CONNECTED, Phase.GREETED)
        said = [do.Send(self._peer, say.Leave(reason=say.brief(reason)))] if greeted else []
        return [*said, *self._end(do.Finish("failed", f"left: {reason}"))]

    def wants(self, asked: do.Compute) -> bool:
        """Return whether `asked` is still needed, because its connection has not ended."""
        return bool(self._work) and self._work[0] == asked

    def computed(
        self, effect: do.Compute, outcome: Sequence[say.TreeNode] | say.NonFinite
    ) -> list[Effect]:
        """Return the effects of a result of `effect`: tree nodes, or a shard that isn't finite."""
        if not self.wants(effect):
            return []
        self._work.popleft()
        if isinstance(outcome, say.NonFinite):
            return [do.Send(self._peer, outcome)]
        computed = do.Send(self._peer, say.Computed(step=effect.step, shards=effect.shards))
        if not self._work:
            self.phase = Phase.READY
        next_one = [self._work[0]] if self._work else []
        return [computed, *self._deliver(outcome), *next_one]

    def tick(self, now: float) -> list[Effect]:
        """Send a heartbeat if one is due; disconnect from a coordinator that is silent too long."""
        if self.phase in (Phase.AWAY, Phase.OVER):
            return []
        silence = now - self._heard
        if silence >= self.timing.dead_after_s:
            return self._drop(f"the coordinator was silent for {silence:.1f} s")
        if self.phase is Phase.CONNECTED or now - self._said < self.timing.heartbeat_s:
            return []
        self._said = now
        return [do.Send(self._peer, say.Heartbeat())]

    # --- messages ---------------------------------------------------------------------------------

    def _turn(self, message: say.Message) -> list[Effect]:
        match message:
            case say.Challenge():
                return self._greet(message)
            case say.Welcome():
                return self._enter(message)
            case say.Refuse():
                return self._refused(message)
            case say.Assign():
                return self._take(message)
            case say.Average() | say.Weights():
                return self._hold(message)
            case say.Commit():
                self._require_step(message.step)
                self._thrown_out.clear()
                applied = do.Send(self._peer, say.Applied(step=message.step))
                return [do.Make(message.step), applied, *self._begin(self.step + 1)]
            case say.Halt():
                return self._end(do.Finish("halted", message.reason))
            case say.Shutdown(problem=str(problem)):
                return self._end(do.Finish("failed", problem))
            case say.Shutdown():
                return self._end(do.Finish("completed"))
            case _:
                return []  # a heartbeat

    def _greet(self, challenge: say.Challenge) -> list[Effect]:
        if challenge.version != say.VERSION:
            reason = f"version={challenge.version}: this worker speaks version {say.VERSION}"
            return self._end(do.Finish("failed", reason))
        greeting = greet(
            challenge,
            self.terms,
            secret=self.secret,
            backend=self.backend,
            nonce=self._nonce,
            rank=self.rank,
            port=self.port,
        )
        self._expected, self.phase = greeting.expected, Phase.GREETED
        return [do.Send(self._peer, greeting.hello), do.Secure(self._peer, greeting.key)]

    def _enter(self, welcome: say.Welcome) -> list[Effect]:
        if not hmac.compare_digest(welcome.proof, self._expected):
            raise ProtocolError("Welcome proof: this coordinator does not know the secret")
        if not welcome.blocks:
            raise ProtocolError("Welcome blocks=0: there is at least one")
        self.rank, self._num_blocks = welcome.rank, welcome.blocks
        loaded = do.Send(self._peer, say.Loaded(step=welcome.step))
        return [do.Load(welcome.rank, welcome.step), loaded, *self._begin(welcome.step)]

    def _refused(self, refuse: say.Refuse) -> list[Effect]:
        if self.phase in TAKING_PART:
            return self._depart(refuse.reason)
        if refuse.retry:
            return self._drop(f"refused: {refuse.reason}")
        return self._end(do.Finish("failed", f"refused: {refuse.reason}"))

    def _depart(self, reason: str) -> list[Effect]:
        """End the connection after a breach of protocol; leave for good the third time."""
        times = self._thrown_out.count(self.rank, reason)
        if times < THROWN_OUT_MAX:
            return self._drop(reason)
        return self._end(do.Finish("failed", problem(self.rank, self.step, times, reason)))

    def _take(self, assign: say.Assign) -> list[Effect]:
        self._require_step(assign.step)
        self._work.append(do.Compute(next(self._tickets), self.step, assign.shards))
        self.phase = Phase.COMPUTING
        return [self._work[0]] if len(self._work) == 1 else []

    def _deliver(self, nodes: Sequence[say.TreeNode]) -> list[Effect]:
        return [do.Send(self._peer, node) for node in nodes]

    def _hold(self, message: say.Average | say.Weights) -> list[Effect]:
        self._require_step(message.step)
        block, name = message.block, type(message).__name__
        if block in self._held or block >= self._num_blocks:
            raise ProtocolError(
                f"{name} block={block}: it was already received, or there is no such block"
            )
        self._held.add(block)
        if len(self._held) < self._num_blocks:
            return [do.Hold(self.step, block)]
        self.phase = Phase.STAGED
        return [do.Hold(self.step, block), do.Send(self._peer, say.Staged(step=self.step, round=0))]

    def _begin(self, step: int) -> list[Effect]:
        self.step, self.phase = step, Phase.READY
        self._held.clear()
        return []

    def _drop(self, reason: str) -> list[Effect]:
        self.phase = Phase.AWAY
        self._work.clear()
        return [do.Close(self._peer, reason)]

    def _end(self, finish: do.Finish) -> list[Effect]:
        self.phase = Phase.OVER
        self._work.clear()
        return [do.Close(self._peer, finish.reason or finish.status), finish]

    def _require_step(self, step: int) -> None:
        if step != self.step:
            raise ProtocolError(f"step={step}: this worker is at step {self.step}")
