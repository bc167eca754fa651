"""The soak: on right trainers no check may say FALSIFIED, whatever the scenario.

`python -m tests.test_no_false_alarm 1000` tries so many scenarios instead of the few of a test run.
"""

from __future__ import annotations

import argparse

from hypothesis import HealthCheck, example, given, settings

from entrenar_py import systems
from entrenar_py.checks import CHECKS, Check
from entrenar_py.contract import Invariant, Position
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Trace
from entrenar_py.verdict import Verdict
from tests.checks.scenarios import scenarios

NUM_SCENARIOS = 60
# The published tolerances; the other clauses are exact.
TOLERANCES = {"parity": 0.01, "recovery": 50.0}


def fits(check: Check, scenario: Scenario) -> bool:
    """Whether `check` judges training runs, and asks of the trainer only what it promises."""
    if not check.explores:
        return False
    return scenario.system == "reference" or check.name != "worker_count"


def alarms(scenario: Scenario) -> list[str]:
    """One line per check that says FALSIFIED on `scenario` and its family."""
    runs: dict[Scenario, Trace] = {}
    found = []
    for check in CHECKS.values():
        if not fits(check, scenario):
            continue
        for member in check.family(scenario):
            if member not in runs:
                runs[member] = systems.run(member)
        clause = Invariant(
            id=check.id,
            name=check.name,
            statement="",
            position=Position("soak", 1, 1),
            tolerance=TOLERANCES.get(check.name),
        )
        finding = check.judge(clause, [runs[member] for member in check.family(scenario)])
        if finding.verdict is Verdict.FALSIFIED:
            place = finding.counterexample.place() if finding.counterexample else ""
            found.append(f"{check.name}: {finding.reason} ({place})")
    return found


@settings(max_examples=NUM_SCENARIOS, deadline=None)
@given(scenario=scenarios())
def test_right_trainers_never_alarm(scenario: Scenario) -> None:
    """On the unbroken reference and textbook trainers no check says FALSIFIED."""
    assert alarms(scenario) == []
