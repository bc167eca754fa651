"""The maker of a star's steps: every worker, or the server alone, which sends new weights."""

from __future__ import annotations

from entrenar_py.errors import UsageError
from entrenar_py.faults import SERVED_PLACES
from entrenar_py.scenario import Scenario

OPTION = "updates"
WORKERS, SERVER = "workers", "server"
# What a worker keeps of an optimizer that is the server's: plain SGD is the one without a state.
_STATELESS = "sgd"


def by_server(scenario: Scenario) -> bool:
    """Return whether the server makes the steps; the workers do where the scenario doesn't say."""
    who = scenario.options.get(OPTION, WORKERS)
    if who not in (WORKERS, SERVER):
        raise UsageError.of(OPTION, who, f"use {WORKERS} or {SERVER}")
    return bool(who == SERVER)


def held(scenario: Scenario) -> str:
    """The optimizer whose state every worker holds."""
    return _STATELESS if by_server(scenario) else scenario.optimizer


def places(scenario: Scenario, usual: tuple[str, ...]) -> tuple[str, ...]:
    """The messages of a step at which a fault can strike: `usual`, where the workers update."""
    return SERVED_PLACES if by_server(scenario) else usual
