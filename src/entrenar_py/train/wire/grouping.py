"""A coordinator whose workers connect to each other: it tells them where, and hears complaints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import ClassVar

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import messages as say
from entrenar_py.train.wire import terms
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.member import Member
from entrenar_py.train.wire.phases import Stage
from entrenar_py.train.wire.terms import Run, Timing

ROUNDS_MAX = 3  # complaints in one step, at which the worker with the most of them is thrown out


class Grouping(Coordinator):
    """The state machine of what meshes, rings and pipelines share.

    What workers send each other belongs to a round, which ends when one of them leaves or joins, or
    a link between two breaks.
    """

    def __init__(self, run: Run, *, secret: bytes, timing: Timing, now: float) -> None:
        super().__init__(run, secret=secret, timing=timing, now=now)
        self._round = 0
        self._group: list[Peer] = []  # the workers of this round
        self._complaints: Counter[Peer] = Counter()  # by and about each worker, in this step
        self._num_rounds = 0  # complaints in this step, those of both ends of a link as one
        self._told: tuple[int, int] | None = None  # the last complaint: its sender, and about whom

    def _hello(self, peer: Peer, member: Member, hello: say.Hello, now: float) -> list[Effect]:
        ours, secret = self.run.terms, self.secret
        entitled = terms.refusal(hello, member.challenge, ours, secret=secret) is None
        if entitled and hello.port is None:  # `super` answers strangers and applicants
            raise ProtocolError("Hello port=null: in a mesh every worker has to listen")
        host = f"[{member.host}]" if ":" in member.host else member.host
        member.address = f"{host}:{hello.port}"
        return super()._hello(peer, member, hello, now)

    def _unreachable(
        self, peer: Peer, member: Member, said: say.Unreachable, now: float
    ) -> list[Effect]:
        """Begin another round; at the third complaint throw out the worker that most involve.

        Both ends may complain about one broken connection, the second end in the round that began
        with the first end's complaint. Such a pair counts once.
        """
        if said.round != self._round:
            return []
        if self.stage is not Stage.COMPUTING:
            self._group = []  # so the next step begins a new round
            return []
        rank_of = {member.in_rank(): peer for peer, member in self._members().items()}
        self._complaints.update([peer, rank_of.get(said.rank)])
        del self._complaints[None]
        ends = member.in_rank(), said.rank
        is_second = self._told == ends[::-1]
        self._told = None if is_second else ends
        self._num_rounds += not is_second
        if self._num_rounds < ROUNDS_MAX:
            return self._regroup(self._members(), now)
        worst = max(rank_of, key=lambda rank: (self._complaints[rank_of[rank]], rank))
        reason = f"worker {member.in_rank()} can't reach worker {said.rank}: {said.reason}"
        return self._throw_out(rank_of[worst], reason, now)

    _turns: ClassVar[Mapping[type[say.Message], Callable[..., list[Effect]]]] = {
        **Coordinator._turns,
        say.Hello: _hello,
        say.Unreachable: _unreachable,
    }

    def _regroup(self, members: Mapping[Peer, Member], now: float) -> list[Effect]:
        """Begin a new round with `members`, in the step that is being computed."""
        raise NotImplementedError

    def _begin_round(self, members: Mapping[Peer, Member], holders: list[int]) -> list[Effect]:
        """Begin a new round with `members`, and tell them; `holders` are those of `Group`."""
        self._round += 1
        self._group = list(members)
        addresses = {member.in_rank(): member.address for member in members.values()}
        ranks = sorted(addresses)
        group = say.Group(
            step=self.step,
            round=self._round,
            holders=tuple(holders),
            ranks=tuple(ranks),
            addresses=tuple(addresses[rank] for rank in ranks),
        )
        return [do.Send(peer, group) for peer in members]

    def _gather(self, step: int, now: float) -> list[Effect]:
        if step > self.step or not self._members():  # else the same workers may complain again
            self._forget_complaints()
        return super()._gather(step, now)

    def _forget_complaints(self) -> None:
        self._complaints.clear()
        self._num_rounds, self._told = 0, None
