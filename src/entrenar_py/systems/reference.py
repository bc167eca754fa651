"""The reference trainer under a scenario's faults and stops."""

from __future__ import annotations

from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.reference import Trainer


def run(scenario: Scenario) -> trace.Trace:
    """Train as `scenario` says; the trace promises `bitwise`, or `draws` if backends differ."""
    trainer = Trainer(scenario, faults=scenario.faults, stops=scenario.stops)
    status = trainer.train()
    promises = ("bitwise",) if trainer.devices.alike else ("draws",)
    return trainer.recorder.finish(promises=promises, status=status)
