"""Stars, meshes and rings in virtual time: the protocol's state machines in the seeded simulator.

Gradients and bytes are real; only clocks and connections are simulated.
"""

from __future__ import annotations

from functools import partial

from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.star.lies import Liar
from entrenar_py.systems.star.scenario_run import ScenarioRun
from entrenar_py.train.wire.effects import Finish
from entrenar_py.train.wire.terms import Run, Timing
from entrenar_py.train.wire_io.injections import Guest
from entrenar_py.train.wire_io.simulation import Simulation

# A longer run counts as hung. Most failing runs end by themselves within minutes.
VIRTUAL_S_MAX = 1_000.0
VIRTUAL_S_MAX_A_STEP = 10.0
RESTART_S = 1.0  # until a worker that was killed is started again


def run(scenario: Scenario) -> trace.Trace:
    """Train as `scenario` says."""
    return ScenarioRun(scenario, SimulatedTransport).train()


class SimulatedTransport:
    """The processes of one run in a simulation."""

    simulation: Simulation
    secret = b""

    def __init__(self, of: ScenarioRun) -> None:
        self._of, self._scenario = of, of.scenario
        seed = self._scenario.options.get("network_seed", 0)
        if type(seed) is not int:
            raise UsageError(f"options network_seed={seed!r}: use a whole number")
        # The seed changes only the delays, not the training.
        self._seeds = self._scenario.rng("network", *([seed] if seed else []))

    def drive(self, run: Run) -> Finish:
        """Let virtual time pass until the coordinator has finished."""
        self.simulation = Simulation(
            run,
            self._of.server,
            self._of.member,
            seed=int(self._seeds.integers(2**63)),
            meddle=self._of.meddle,
            timing=Timing(),
            worker=self._of.worker,
            notify=self._of.notify,
        )
        self._of.begin(run)
        until_s = VIRTUAL_S_MAX + VIRTUAL_S_MAX_A_STEP * self._scenario.num_steps
        finish = self.simulation.run(until_s=until_s)
        self._of.measure(None, self.simulation.coordinator)
        for node in self.simulation.nodes:
            self._of.measure(node.end.machine.rank, node.end)
        return finish

    def start(self, rank: int) -> None:
        """Start a simulated worker."""
        lies = Liar(
            lambda: [one for one in self._of.waiting("lie") if one.rank == rank], self._of.strike
        )
        self.simulation.start(rank, self._scenario.backend_of(rank), lies.speak)

    def visit(self, guest: Guest) -> None:
        """Connect `guest`, which is no worker, after the current event is handled."""
        self.simulation.later(0.0, partial(self.simulation.visit, guest))

    def befall(self, fault: Fault) -> None:
        """Replace the coordinator after the current event, or restart a killed worker."""
        if fault.kind == "restart":
            self.simulation.later(0.0, self._restart)
        elif fault.kind == "kill" and fault.rank is not None:
            self.simulation.later(RESTART_S, partial(self.start, fault.rank))

    def _restart(self) -> None:
        died_in = self.simulation.coordinator.machine.step
        self.simulation.restart(self._of.taken_up(died_in), self._of.server)
