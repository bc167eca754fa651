"""The option `updates`: a star's steps are made by every worker, or by the server for all."""

from __future__ import annotations

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import SERVED_PLACES
from entrenar_py.shared.scenario import Scenario

OPTION = "updates"
WORKERS, SERVER = "workers", "server"
# The optimizer of workers if the server makes the steps: plain SGD, which has no state.
_STATELESS = "sgd"


def by_server(scenario: Scenario) -> bool:
    """Return whether the server makes the steps; by default the workers do."""
    who = scenario.options.get(OPTION, WORKERS)
    if who not in (WORKERS, SERVER):
        raise UsageError.of(OPTION, who, f"use {WORKERS} or {SERVER}")
    return bool(who == SERVER)


def held(scenario: Scenario) -> str:
    """Return the name of the optimizer whose state workers hold: `sgd` if the server steps."""
    return _STATELESS if by_server(scenario) else scenario.optimizer


def places(scenario: Scenario, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Return a step's messages at which a fault can strike: `usual` if workers make the step."""
    return SERVED_PLACES if by_server(scenario) else usual
