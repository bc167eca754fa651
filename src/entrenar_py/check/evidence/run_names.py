"""Name the runs of a user's command in sentences: `the run on 2 workers, with a worker killed`."""

from __future__ import annotations

from collections.abc import Mapping

from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.wording import counted, named

# The option of a scenario that says which knob was turned (`checks.knob_pairs`).
KNOB = "pair"
# Kind of a planted fault -> what was done to the run.
_DONE: Mapping[str, str] = {
    "non_finite_gradient": "with a NaN planted in a gradient",
    "leave": "with a worker killed",
    "nudged_weights": "with its weights moved by some roundings",
    "common_numbers": "with random numbers that are alike for all samples",
    "common_order": "with one order of samples for any number of workers",
    "mirrored_ranks": "with the same samples on all ranks",
    "merged_batches": "which loads the batches of several workers at once",
    "replayed_batches": "which is given the batches that several workers had",
    "replayed_in_turn": "which is given the batches that several workers had, in turn",
    "shortened_epochs": "with epochs of two steps",
    "more_steps": "with more steps",
    "repeated_share": "with the samples of one rank, repeated",
}


def of(scenario: Scenario) -> str:
    """Return the name of a run, with everything in which it differs from the plain one."""
    parts = list[str]()
    turn = scenario.options.get(KNOB)
    if isinstance(turn, Mapping):
        turned = {turn.get("knob"): turn.get("value"), **turn.get("beside", {})}
        parts.append(f"with {', '.join(f'{knob}={value}' for knob, value in turned.items())}")
    parts += [_DONE.get(fault.kind, f"with the fault {fault.kind}") for fault in scenario.faults]
    if scenario.stops:
        parts.append(f"stopped before {named('step', scenario.stops)} and resumed")
    if scenario.repeat:
        parts.append("made again")
    run = f"the run on {counted(scenario.world_size, 'worker')}"
    return " ".join([run, ", ".join(parts)]) if parts else run
