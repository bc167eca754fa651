"""The soak: on correct trainers no check may report FALSIFIED, whatever the scenario.

`python -m tests.check.harness.test_no_false_alarm 1000` tries 1000 scenarios instead of a test
run's few.
"""

from __future__ import annotations

import argparse

from hypothesis import given, settings

from entrenar_py import systems
from entrenar_py.check.clauses import CHECKS, Check
from entrenar_py.check.harness import companions
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.verdict import Verdict
from tests import traces
from tests.check.clauses.scenarios import scenarios

NUM_SCENARIOS = 15


def fits(check: Check, scenario: Scenario) -> bool:
    """Return whether `check` judges training runs, and needs only what the trainer promises."""
    promises_bits = scenario.system == "reference"
    return check.explores and (promises_bits or check.name != "worker_count")


def alarms(scenario: Scenario) -> list[str]:
    """Return one line for each check that reports FALSIFIED, and for each run that failed."""
    runs: dict[Scenario, Trace] = {}
    found = []
    for check in CHECKS.values():
        if not fits(check, scenario):
            continue
        family = list(dict.fromkeys((scenario, *companions.of(check.needs, scenario))))
        runs |= {member: systems.run(member) for member in family if member not in runs}
        finding = traces.judge(check.name, [runs[member] for member in family])
        if finding.verdict is Verdict.FALSIFIED:
            place = finding.counterexample.place() if finding.counterexample else ""
            found.append(f"{check.name}: {finding.reason} ({place})")
    found += [run.end.reason for run in runs.values() if run.end.status == "failed"]
    return found


def soak(num_scenarios: int) -> None:
    """Try random scenarios; AssertionError names the smallest that raises an alarm."""

    @settings(max_examples=num_scenarios, deadline=None)
    @given(scenario=scenarios())
    def stays_silent(scenario: Scenario) -> None:
        assert alarms(scenario) == []

    stays_silent()


def test_right_trainers_never_alarm() -> None:
    """No check reports FALSIFIED on the correct reference and textbook trainers."""
    soak(NUM_SCENARIOS)


def main() -> None:
    """Soak with as many scenarios as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.check.harness.test_no_false_alarm")
    parser.add_argument("num_scenarios", type=int, help="how many random scenarios to try")
    count = parser.parse_args().num_scenarios
    soak(count)
    print(f"no false alarm in {count} scenarios")


if __name__ == "__main__":
    main()
