"""A simulated star in which faults strike between two blocks of a vector."""

from __future__ import annotations

from dataclasses import replace

import torch

from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import traits_of
from entrenar_py.shared.trace import Trace
from entrenar_py.systems.star.scenario_run import ScenarioRun
from entrenar_py.systems.star.simulation import SimulatedTransport
from entrenar_py.train.wire.effects import Effect, Gather
from entrenar_py.train.wire.messages import Average, Message, TreeNode, Weights
from entrenar_py.train.wire_io.injections import Meddling


class Between(ScenarioRun):
    """A fault at a message with a block strikes `block`'s message; those before it arrive.

    `num_again` counts the blocks that a worker sent though they were averaged: for a worker that
    was lost after that.
    """

    def __init__(self, scenario: Scenario, block: int) -> None:
        super().__init__(scenario, SimulatedTransport)
        self.block = block
        self.num_again = 0
        self._averaged: set[tuple[int, int]] = set()

    def train(self) -> Trace:
        """Run on one thread, as `systems.run` does: threads change the order of sums."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return replace(super().train(), traits=traits_of(self.scenario))
        finally:
            torch.set_num_threads(before)

    def notify(self, effect: Effect) -> None:
        super().notify(effect)
        if isinstance(effect, Gather):
            self._averaged.clear()

    def meddle(self, rank: int | None, up: bool, message: Message) -> Meddling | None:
        if isinstance(message, Average | Weights):
            self._averaged.add((message.step, message.block))
        elif isinstance(message, TreeNode):
            self.num_again += (message.step, message.block) in self._averaged
        if getattr(message, "block", self.block) != self.block:
            return None
        return super().meddle(rank, up, message)
