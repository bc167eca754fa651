"""A host and its workers without a network: the test carries their messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from entrenar_py.shared import process
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.shared.trace import writer
from entrenar_py.shared.trace.ledger import Head
from entrenar_py.shared.trace.writer import Writer
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.service.host import Host, Stepped
from entrenar_py.train.service.run_events import Happening
from entrenar_py.train.wire.effects import Apply, Gather, Joined, Keep, Left, Stop
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import Message
from tests.systems import by_hand
from tests.systems.by_hand import Hands


def plan_of(**changes: Any) -> TrainingPlan:
    """Return a plan with two workers and four steps."""
    usual: dict[str, Any] = {"workload": "linear", "world_size": 2, "seed": 0, "num_steps": 4}
    return TrainingPlan(trainer="parameter_server", **{**usual, **changes})


def host_of(
    plan: TrainingPlan,
    *,
    heard: list[Happening] | None = None,
    checkpoint: Path | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    halt_on_spike: bool = False,
    stepped: Stepped = lambda made, tensors, tell: None,
) -> Host:
    """Return a host that appends its events to `heard`."""
    listeners = [] if heard is None else [heard.append]
    return Host(
        plan,
        checkpoint_path=checkpoint,
        listeners=listeners,
        clock=clock,
        halt_on_spike=halt_on_spike,
        stepped=stepped,
    )


def head_of(plan: TrainingPlan) -> Head:
    """Return the head of a ledger of `plan`."""
    return Head(plan=plan, environment=process.environment())


def record(host: Host, path: Path) -> Writer:
    """Make `host` write a new ledger at `path`, and return the writer."""
    ledger = writer.create(path, head_of(host.plan))
    host.write_to(ledger, writer.Standing())
    return ledger


class Noticed(Server):
    """A host's server that notifies the host of each effect, as the network driver does."""

    def __init__(self, host: Host) -> None:
        self.__dict__ = host.server.__dict__  # one state, with two sets of methods
        self._notify = host.notify

    def joined(self, effect: Joined) -> None:
        super().joined(effect)
        self._notify(effect)

    def left(self, effect: Left) -> None:
        super().left(effect)
        self._notify(effect)

    def keep(self, rank: int, message: Message, payload: Buffer) -> None:
        super().keep(rank, message, payload)
        self._notify(Keep(rank, message))

    def apply_average(self, step: int) -> None:
        super().apply_average(step)
        self._notify(Apply(step))

    def stop(self, effect: Stop) -> None:
        super().stop(effect)
        self._notify(effect)

    def gather(self, step: int) -> None:
        super().gather(step)
        self._notify(Gather(step))


def meet(host: Host, *, step: int = 0) -> Hands:
    """Let all workers join before `step`."""
    hands = Hands(Noticed(host), {})
    for rank in range(host.plan.world_size):
        by_hand.join(hands, rank, step=step)
    return hands


def train(hands: Hands, steps: Sequence[int]) -> None:
    """Let all workers make these steps."""
    for step in steps:
        for rank, shards in by_hand.shards_of(hands).items():
            by_hand.deliver(hands, rank, step, shards)
        by_hand.make(hands, step)
