"""One simulated run of a pipeline with faults: by a seed, or one fault at a given message."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.messages import Message, Unreachable
from entrenar_py.train.wire.pipeline_peers import PipelineWorker
from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire_io.injections import Fate, Meddling
from entrenar_py.train.wire_io.simulation import Simulation
from tests.train.stages.linear import Plan, alone
from tests.train.stages.stages import LinearServer, LinearStage
from tests.train.stages.witness import Witness
from tests.train.wire_io.fakes import SECRET

UNTIL_S = 3_000.0
RESTART_S = 1.0
# Why a worker or a link is lost in a run in which nobody breaks the protocol.
BLAMELESS = re.compile(
    r"(closed by the (worker|coordinator): |left: |worker \d+ can't reach worker \d+: )*"
    r"(connection re(set|fused)|the process died|the coordinator (died|was silent)|silent for"
    r"|it has connected again|this worker left its group|it is not in the group any more)"
)
LASTING = (Fate.FREEZE, Fate.DELAY)
BENDING = (Fate.DUPLICATE, Fate.REORDER, Fate.TRUNCATE, Fate.FLIP)
BENDINGS_MAX = 2  # a worker that is thrown out three times for one reason ends the run
RESTART = "restart"  # the coordinator dies, and goes on from its checkpoint

# Which message of a run, counted from 0 -> what befalls it, and for how many seconds.
Strikes = Mapping[int, tuple[Fate | str, float]]


@dataclass
class Trial:
    """A run of `plan` whose messages meet `strikes`; `said` are all messages, with their senders.

    `arrivals` are the ranks that workers ask for.
    """

    plan: Plan
    seed: int
    strikes: Strikes = field(default_factory=dict)
    arrivals: tuple[int | None, ...] | None = None
    prepare: Callable[[LinearStage], None] = lambda hands: None
    said: list[tuple[int | None, bool, Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.witness = Witness(self.plan)
        self.server = LinearServer(self.plan, self.witness)
        self.simulation = Simulation(
            self.plan.run(),
            self.server,
            self._member,
            seed=self.seed,
            meddle=self._meddle,
            timing=Timing(),
            secret=SECRET,
            worker=PipelineWorker,
            notify=self.witness.noticed,
        )
        ranks = range(self.plan.places.num_ranks)
        for rank in ranks if self.arrivals is None else self.arrivals:
            self.simulation.start(rank, "cpu")

    def finish(self) -> do.Finish:
        """Run to the end."""
        return self.simulation.run(until_s=UNTIL_S)

    def require_undisturbed(self) -> None:
        """Run to the end, and assert that it is that of a run without faults."""
        finish = self.finish()
        assert finish == do.Finish("completed"), f"{finish}: {self._story()}"
        trained = tuple(one.tobytes() for one in self.server.weights)
        assert trained == alone(self.plan)[-1], "not the bits of one process"
        assert self.witness.made == list(range(self.plan.num_steps))
        for node in self.simulation.nodes:
            hands = cast(LinearStage, node.end.hands)
            if len(hands.made) == self.plan.num_steps:
                assert hands.weights.tobytes() == trained[hands.stage], "a worker has other bits"
            assert node.end.finished is None or node.end.finished.status == "completed", (
                f"worker {node.end.machine.rank} gave up: {node.end.finished}"
            )

        if not any(fate in BENDING for fate, _ in self.strikes.values()):
            self._require_blameless()

    def _require_blameless(self) -> None:
        """Assert that nobody was accused of a breach of the protocol."""
        complaints = [one.reason for _, _, one in self.said if isinstance(one, Unreachable)]
        for reason in [*complaints, *(one.reason for one in self.witness.left)]:
            assert BLAMELESS.match(reason), f"accused: {reason}"

    def _story(self) -> str:
        machine = self.simulation.coordinator.machine
        there = {member.rank: str(member.phase) for member in machine.peers.values()}
        left = [f"{one.rank} in step {one.step}: {one.reason}" for one in self.witness.left]
        return f"{machine.stage} {machine.step} {there}, lost {left}"

    def _member(self) -> LinearStage:
        hands = LinearStage(self.plan, self.witness)
        self.prepare(hands)
        return hands

    def _meddle(self, rank: int | None, up: bool, message: Message) -> Meddling | None:
        fate, seconds = self.strikes.get(len(self.said), (None, 0.0))
        self.said.append((rank, up, message))
        if fate == RESTART:
            self.simulation.later(0.0, self._restart)
            return None
        if fate is Fate.KILL:
            asked = None if self.arrivals and None in self.arrivals else rank
            self.simulation.later(RESTART_S, lambda: self._start(asked))
        return None if fate is None else Meddling(Fate(fate), seconds)

    def _start(self, rank: int | None) -> None:
        self.simulation.start(rank, "cpu")

    def _restart(self) -> None:
        if self.simulation.coordinator.finished is not None:
            return
        self.server = self.server.restored()
        self.witness.restarted(self.server.step)
        run = replace(self.plan.run(), first_step=self.server.step, resumed=self.server.step > 0)
        self.simulation.restart(run, self.server)


def seeded(seed: int) -> Trial:
    """Return the trial of `seed`: stages, shards, schedule and faults follow from it."""
    drawn = random.Random(seed)
    num_stages = drawn.randint(2, 4)
    doubled = drawn.choice([None, None, *range(num_stages)])
    ranks, at = list[tuple[int, ...]](), 0
    for stage in range(num_stages):
        count = 2 if stage == doubled else 1
        ranks.append(tuple(range(at, at + count)))
        at += count
    plan = Plan(tuple(ranks), num_shards=drawn.randint(1, 6), num_steps=drawn.randint(1, 4))
    strikes: dict[int, tuple[Fate | str, float]] = {}
    num_bent = 0
    for _ in range(drawn.randint(0, 7)):
        fate = drawn.choice([*Fate, RESTART])
        num_bent += fate in BENDING
        if fate not in BENDING or num_bent <= BENDINGS_MAX:
            seconds = drawn.choice([0.05, 0.5, 5.0, 45.0]) if fate in LASTING else 0.0
            strikes[drawn.randrange(70 * num_stages)] = fate, seconds
    arrivals = drawn.choice([None, tuple(drawn.sample(range(at), at)), (None,) * at])
    return Trial(plan, seed, strikes, arrivals)
