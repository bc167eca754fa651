"""A turned knob in the scenario of a run of somebody's own trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from entrenar_py.checks import run_comparison
from entrenar_py.scenario import Scenario

# Where a scenario says which knob was turned. Earlier releases also said there, by the key `model`,
# how the usual run differs.
OPTION = "pair"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """`knob` is at `value` in one of two runs, and at `usual` in the other.

    Knobs `beside` it are turned with it, which alone change nothing.
    """

    knob: str
    value: str
    usual: str
    beside: Mapping[str, str]

    @property
    def words(self) -> run_comparison.Words:
        """Return how findings speak of the two."""
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
    """Return `scenario`, of a run that has `knob` at `value`, saying so."""
    pair = {"knob": knob, "value": value, "usual": usual, "beside": dict(beside)}
    return scenario.with_(options={**scenario.options, OPTION: pair})


def pair_of(scenario: Scenario) -> Pair | None:
    """Return which knob was turned for a run; None for a run as the script usually is."""
    pair = scenario.options.get(OPTION)
    if pair is None:
        return None
    return Pair(**{name: pair[name] for name in ("knob", "value", "usual", "beside")})


def unturned(scenario: Scenario) -> Scenario:
    """Return `scenario` as of a run in which no knob was turned."""
    options = {name: held for name, held in scenario.options.items() if name != OPTION}
    return scenario.with_(options=options)
