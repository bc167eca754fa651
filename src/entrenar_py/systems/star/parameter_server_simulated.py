"""The parameter server in virtual time: the protocol's machines under the seeded simulator.

The gradients are real, and so are the bytes; only clocks and connections are not.
"""

from __future__ import annotations

from functools import partial

from entrenar_py import faults, trace
from entrenar_py.drivers.message_faults import Fate, Meddling
from entrenar_py.drivers.simulated import Simulation
from entrenar_py.drivers.uninvited_client import Guest
from entrenar_py.errors import UsageError
from entrenar_py.protocol.effects import Finish
from entrenar_py.protocol.messages import Assign, Message
from entrenar_py.protocol.terms import Run, Timing
from entrenar_py.protocol.worker import Worker
from entrenar_py.scenario import Scenario
from entrenar_py.systems.star.lies import Liar
from entrenar_py.systems.star.member import Member
from entrenar_py.systems.star.star import Star

VIRTUAL_S_MAX = 10_000.0
RESTART_S = 1.0  # until a worker that was killed is started again


def run(scenario: Scenario) -> trace.Trace:
    """Trains as `scenario` says."""
    return SimulatedStar(scenario).train()


class SimulatedStar(Star):
    """A run in a simulation."""

    simulation: Simulation
    member: type[Member] = Member
    worker: type[Worker] = Worker

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        seed = scenario.options.get("network_seed", 0)
        if type(seed) is not int:
            raise UsageError(f"options network_seed={seed!r}: use a whole number")
        # Another seed makes other delays, and the same training.
        self._seeds = scenario.rng("network", *([seed] if seed else []))

    def drive(self, run: Run) -> Finish:
        """Lets virtual time pass until the coordinator is finished."""
        self.simulation = Simulation(
            run,
            self,
            lambda: self.member(self.scenario),
            seed=int(self._seeds.integers(2**63)),
            meddle=self.meddle,
            timing=Timing(),
            worker=self.worker,
        )
        self.begin(run)
        finish = self.simulation.run(until_s=VIRTUAL_S_MAX)
        self.measure(None, self.simulation.coordinator)
        for node in self.simulation.nodes:
            self.measure(node.end.machine.rank, node.end)
        return finish

    def _restart(self) -> None:
        """Goes on from the checkpoint with a new coordinator, and with whoever comes back."""
        self.simulation.restart(self.taken_up(self.simulation.coordinator.machine.step), self)

    def start(self, rank: int) -> None:
        """Starts a simulated worker."""
        lies = Liar(lambda: [one for one in self.waiting("lie") if one.rank == rank], self.strike)
        self.simulation.start(rank, self.scenario.backend_of(rank), lies.speak)

    def visit(self, guest: Guest) -> None:
        """A simulated stranger, in a moment: what is being done is done first."""
        self.simulation.later(0.0, partial(self.simulation.visit, guest))

    def meddle(self, rank: int | None, up: bool, message: Message) -> Meddling | None:
        """What the scenario's faults do to a message; one that is killed is started again later."""
        self.meet(message)
        for fault in self.waiting("restart"):
            if (fault.step, fault.at) == (getattr(message, "step", None), type(message).__name__):
                self.strike(fault)
                self.simulation.later(0.0, self._restart)
                return Meddling(Fate.CUT)
        for fault in self.waiting("leave", *faults.ON_THE_WAY):
            at = fault.at or Assign.__name__
            step = getattr(message, "step", None)
            if (fault.rank, fault.step, at) == (rank, step, type(message).__name__):
                self.strike(fault)
                if fault.kind == "kill" and rank is not None:
                    self.simulation.later(RESTART_S, partial(self.start, rank))
                fate = Fate.KILL if fault.kind == "leave" else Fate(fault.kind)
                return Meddling(fate, fault.seconds or 0.0)
        return None
