"""Names of the runs of a user's command, by how each differs from the plain run.

An option of a run's scenario says which knob was turned (`Pair`). Its faults and stops say the
rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from entrenar_py.shared.codec import Schema
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import OF_WITNESSES, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.wording import counted, named

# The option that says which knob was turned. Earlier releases also wrote the key `model` into it,
# which says how the usual run differs.
OPTION = "pair"
# Knobs with a number as value -> the allowed numbers, in words.
_NUMBERS = {"accumulation": "a whole number >= 1", "clip": "a number > 0"}


@dataclass(frozen=True, kw_only=True)
class Words:
    """The words for the reference run in findings: `gradient is not <its>`, `<run> halted`."""

    run: str = "the single-device run"
    its: str = "the single device's"
    before: str = ""  # begins each message
    elsewhere: str = ": see F-DP-002"  # refers to the clause that judges which samples are drawn


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A turned knob: it has `value` in one run and `usual` in the run that it is compared with.

    Other knobs may be turned together with it, to fixed values; alone they change nothing. Raises
    UsageError if a value is not allowed for the knob.
    """

    knob: str
    value: str
    usual: str
    beside: Mapping[str, str]

    def __post_init__(self) -> None:
        for name in ("value", "usual"):
            text = getattr(self, name)
            if self.knob in _NUMBERS and not _is_number(text, is_whole=self.knob == "accumulation"):
                problem = f"{name}={text!r} of knob {self.knob}: use {_NUMBERS[self.knob]}, as text"
                raise UsageError(f"{_WHAT} {problem}")

    @property
    def words(self) -> Words:
        """Return the words in which findings name the reference run."""
        turned = {self.knob: self.value, **self.beside}
        values = ", ".join(f"{knob}={value}" for knob, value in turned.items())
        return Words(
            run=f"the run with {self.knob}={self.usual}",
            its=f"that of {self.knob}={self.usual}",
            before=f"with {values}: ",
            elsewhere=", so the knob did more than it should",
        )


def with_turned(
    scenario: Scenario, *, knob: str, value: str, usual: str, beside: Iterable[tuple[str, str]] = ()
) -> Scenario:
    """Return `scenario` with an option that says that `knob` has `value` instead of `usual`."""
    names = (field.name for field in fields(Pair))
    pair = dict(zip(names, (knob, value, usual, dict(beside)), strict=True))
    return scenario.with_(options={**scenario.options, OPTION: pair})


def pair_of(scenario: Scenario) -> Pair | None:
    """Return the knob that was turned for a run, with its values; None if no knob was turned."""
    record = scenario.options.get(OPTION)
    if record is None:
        return None
    if isinstance(record, Mapping):
        record = {name: value for name, value in record.items() if name != "model"}
    return _SCHEMA.load(record)


def unturned(scenario: Scenario) -> Scenario:
    """Return `scenario` without the option that says which knob was turned."""
    options = {name: held for name, held in scenario.options.items() if name != OPTION}
    return scenario.with_(options=options)


_WHAT = f"option {OPTION}"
_SCHEMA = Schema(Pair, what=_WHAT)


def _is_number(text: str, *, is_whole: bool) -> bool:
    try:
        number = int(text) if is_whole else float(text)
    except ValueError:
        return False
    return 0 < number < math.inf


# --- names in sentences ---------------------------------------------------------------------------


# Kind of a planted fault -> words on what was done to the run.
_DONE: Mapping[str, str] = {
    "non_finite_gradient": "with a NaN planted in a gradient",
    "leave": "with a worker killed",
    "nudged_weights": "with its weights changed by some roundings",
    "common_numbers": "with the same random numbers for all samples",
    "common_order": "with one order of samples for any number of workers",
    "mirrored_ranks": "with the same samples on all ranks",
    "merged_batches": "which loads the batches of several workers at once",
    "replayed_batches": "which is given the batches that several workers had",
    "replayed_in_turn": "which is given the batches that several workers had, in turn",
    "shortened_epochs": "with epochs of two steps",
    "more_steps": "with more steps",
    "reordered_groups": "with the parameters of each group in a different order",
    "repeated_share": "with the samples of one rank, repeated",
}


def done(fault: Fault) -> str:
    """Return what was done to a run by a planted fault: `with a worker killed`."""
    return _DONE.get(fault.kind, f"with the fault {fault.kind}")


def of(scenario: Scenario) -> str:
    """Return the name of the run of `scenario`, with all its differences from the plain run."""
    parts = list[str]()
    turn = scenario.options.get(OPTION)
    if isinstance(turn, Mapping):
        knob, value, _, others = (turn.get(field.name) for field in fields(Pair))
        turned = {knob: value, **(others or {})}
        parts.append(f"with {', '.join(f'{knob}={value}' for knob, value in turned.items())}")
    parts += [done(fault) for fault in scenario.faults]
    if scenario.stops:
        parts.append(f"stopped before {named('step', scenario.stops)} and resumed")
    if scenario.repeat:
        parts.append("made again")
    run = f"the run on {counted(scenario.world_size, 'worker')}"
    return " ".join([run, ", ".join(parts)]) if parts else run


def run_name(trace: Trace) -> str:
    """Return the name of a trace's run: `the run on 2 workers`, `the run with clip=0.01`."""
    scenario = trace.scenario
    pair = pair_of(scenario)
    words = (
        f"with {pair.knob}={pair.value}" if pair else f"on {counted(scenario.world_size, 'worker')}"
    )
    stopped = ", stopped and resumed" if scenario.stops else ""
    kinds = {fault.kind for fault in scenario.faults}
    killed = ", with a worker killed" if "leave" in kinds else ""
    planted = " with a planted value" if kinds - {"leave", "join", *OF_WITNESSES} else ""
    return f"the run {words}{stopped}{killed}{planted}"
