"""Read and write, in a scenario's options, which knob of a user's trainer was turned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from entrenar_py.check.causes import run_comparison
from entrenar_py.check.evidence import run_names
from entrenar_py.shared.codec import Schema
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario

# The option that says which knob was turned. Earlier releases also wrote there, by the key `model`,
# how the usual run differs.
OPTION = run_names.KNOB
# The knobs whose values are used as numbers, and which numbers are allowed.
_NUMBERS = {"accumulation": "a whole number >= 1", "clip": "a number > 0"}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A knob that has `value` in one of two runs, and `usual` in the other.

    The knobs `beside` are turned, too, and change nothing by themselves. Raises UsageError if a
    value is not allowed for the knob.
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
    def words(self) -> run_comparison.Words:
        """Return the words in which findings name the two runs."""
        turned = {self.knob: self.value, **self.beside}
        values = ", ".join(f"{knob}={value}" for knob, value in turned.items())
        return run_comparison.Words(
            who=f"the run with {self.knob}={self.usual}",
            its=f"that of {self.knob}={self.usual}",
            before=f"with {values}: ",
            elsewhere=", so the knob did more than it should",
        )


def told(
    scenario: Scenario, *, knob: str, value: str, usual: str, beside: Iterable[tuple[str, str]] = ()
) -> Scenario:
    """Return `scenario` with the option that says that the run has `knob` at `value`."""
    pair = {"knob": knob, "value": value, "usual": usual, "beside": dict(beside)}
    return scenario.with_(options={**scenario.options, OPTION: pair})


def pair_of(scenario: Scenario) -> Pair | None:
    """Return which knob was turned for a run, or None if no knob was turned.

    Raises UsageError if the scenario, which may come from a file, has a malformed option.
    """
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
