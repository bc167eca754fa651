"""The roles of stored runs, inferred from their scenarios, since nothing says them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from entrenar_py.checks.needs import ORACLE, Near, Need, Runs
from entrenar_py.harness import companions
from entrenar_py.scenario import Scenario

K = TypeVar("K")

# Field -> (what a run has, what it would have to have).
Differences = Mapping[str, tuple[Any, Any]]
# A run that differs in more fields than these from the one that is meant is of another training.
_NEAR_MAX = 3
# A turned knob may change whatever a run of a command shows of itself.
_SHOWN = (
    *("num_shards", "num_samples", "batch_size", "num_steps", "accumulation"),
    *("optimizer", "learning_rate", "weight_decay", "dropout"),
)


def of(needs: Collection[Need], own: K, scenarios: Mapping[K, Scenario]) -> Runs[K]:
    """Return the run `own`, and those of `scenarios` that a check with `needs` judges it beside.

    A run answers a need if its scenario is the one that is meant, but for how much was recorded and
    for what the need leaves free. Of a need that none answers, `near` has how the nearest run
    misses it.
    """
    subject = scenarios[own]
    meant = companions.of(needs, subject)
    others = {
        key: scenario
        for key, scenario in scenarios.items()
        if key != own and scenario != subject  # a copy is none to judge it by
    }
    near: dict[Need, Near[K]] = {}

    def found(scenario: Scenario, need: Need) -> tuple[K, ...]:
        if scenario == subject:
            return (own,)
        nearest = _nearest(subject, scenario, need, others)
        if nearest is None:
            return ()
        key, missed = nearest
        if missed:
            near.setdefault(need, Near(key, missed))
        return () if missed else (key,)

    beside = {
        need: tuple(dict.fromkeys(key for one in wanted for key in found(one, need)))
        for need, wanted in meant.beside.items()
    }
    base: tuple[K, ...] = (own,)
    for need in meant.beside:  # what is disturbed has one need: that of which it misses the base
        if meant.base is not None and meant.base != subject:
            base = found(meant.base, need)
    keys = {scenario: key for key, scenario in scenarios.items()}
    return Runs(
        base=next(iter(base), None),
        beside=beside,
        undropped=None if meant.undropped is None else meant.undropped.chosen(keys.get),
        near={need: one for need, one in near.items() if not (base and beside[need])},
    )


def _nearest(
    subject: Scenario, meant: Scenario, need: Need, others: Mapping[K, Scenario]
) -> tuple[K, Differences] | None:
    """Return the run that comes nearest to `meant`, and the fields in which it misses it.

    None where none is near: what the subject and the run that is meant differ in must be right.
    """
    crucial = differences(subject, meant).keys()
    found = []
    for key, scenario in others.items():
        fields = differences(scenario, meant)
        missed = {name: pair for name, pair in fields.items() if name not in free(need)}
        if crucial.isdisjoint(fields) and len(missed) <= (0 if need is ORACLE else _NEAR_MAX):
            found.append((len(missed), len(fields), scenario.detail != meant.detail, key, missed))
    if not found:
        return None
    *_, key, missed = min(found, key=lambda one: one[:3])
    return key, missed


def free(need: Need) -> tuple[str, ...]:
    """Return the fields of a scenario in which a run that answers `need` may differ."""
    return (*need.free, *_SHOWN) if need.knob else need.free


def differences(given: Scenario, needed: Scenario) -> Differences:
    """Return the fields in which two scenarios differ, but for how much was recorded."""
    right = needed.to_dict()
    return {
        name: (value, right[name])
        for name, value in given.to_dict().items()
        if value != right[name] and name != "detail"
    }
