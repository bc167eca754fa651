"""A long run that reports when its workers are busy, frozen or idle; it is ended from outside."""

from __future__ import annotations

import signal
import sys

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.star.processes import ProcessTransport
from entrenar_py.systems.star.scenario_run import ScenarioRun
from entrenar_py.train.wire.effects import Apply, Effect

FREEZE = Fault(kind="freeze", step=2, rank=1, at="Average", seconds=600.0)


class Telling(ScenarioRun):
    """Reports when worker 1 was just frozen, and when a step was made."""

    def strike(self, fault: Fault) -> None:
        super().strike(fault)
        print("frozen", flush=True)

    def notify(self, effect: Effect) -> None:
        super().notify(effect)
        if mood == "busy" and effect == Apply(2):
            print("busy", flush=True)


if __name__ == "__main__":
    mood = sys.argv[1]
    Telling(
        Scenario(
            system="parameter_server",
            workload="linear",
            world_size=2,
            seed=0,
            num_steps=3 if mood == "idle" else 10**6,
            faults=(FREEZE,) if mood == "frozen" else (),
        ),
        ProcessTransport,
    ).train()
    print("idle", flush=True)
    signal.pause()
