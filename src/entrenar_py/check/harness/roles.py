"""Infers which stored run answers which need. Only the runs' scenarios can tell."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from entrenar_py.check.evidence import run_names
from entrenar_py.check.evidence.needs import (
    ALONE,
    CONTROLLED,
    NUDGED,
    ORACLE,
    REORDERED,
    REPEATED,
    SHORTENED,
    Near,
    Need,
    Runs,
)
from entrenar_py.check.harness import companions
from entrenar_py.shared import faults
from entrenar_py.shared.scenario import Scenario

K = TypeVar("K")

# Field -> (the run's value, the value that is needed).
Differences = Mapping[str, tuple[Any, Any]]
# A run that differs from the needed one in more fields than this is of another training.
_NEAR_MAX = 3
# Fields observed in a run of a user's command. A turned knob may change any of them.
_SHOWN = (
    *("num_shards", "num_samples", "batch_size", "num_steps", "accumulation"),
    *("optimizer", "learning_rate", "weight_decay", "dropout"),
)


def of(needs: Collection[Need], own: K, scenarios: Mapping[K, Scenario]) -> Runs[K]:
    """Return the run `own` and the other runs that a check with `needs` compares it with.

    Runs are named by their keys in `scenarios`. A run answers a need if its scenario is the one
    that `companions` derives, apart from `detail` and the fields that the need leaves free. If no
    run does, `near` holds the nearest one and the fields in which it differs.
    """
    subject = scenarios[own]
    meant = companions.of(needs, subject)
    others = {
        key: scenario
        for key, scenario in scenarios.items()
        # A copy of the run can't serve as its baseline.
        if key != own and scenario != subject and not faults.are_of_witnesses(scenario.faults)
    }
    near: dict[Need, Near[K]] = {}

    def runs_of(scenario: Scenario, need: Need) -> tuple[K, ...]:
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
        need: tuple(dict.fromkeys(key for scenario in needed for key in runs_of(scenario, need)))
        for need, needed in meant.beside.items()
    }
    base: tuple[K, ...] = (own,)
    for need in meant.beside:  # the one need that `own` answers if it is not the base itself
        if meant.base is not None and meant.base != subject:
            base = runs_of(meant.base, need)
    keys = {scenario: key for key, scenario in scenarios.items()}
    return Runs(
        base=next(iter(base), None),
        beside=beside,
        undropped=None if meant.undropped is None else meant.undropped.chosen(keys.get),
        near={need: run for need, run in near.items() if not (base and beside[need])},
        witnesses=_witnesses(subject, scenarios) if subject.workload == "own" else {},
    )


def _witnesses(subject: Scenario, scenarios: Mapping[K, Scenario]) -> dict[Need, tuple[K, ...]]:
    """Return the runs of a user's trainer that show whether others can be compared, if any.

    REPEATED: two runs that should be equal. ALONE: the run on one worker. NUDGED: a run, and the
    same run with nudged weights. REORDERED: the like, with parameters in another order. CONTROLLED:
    all runs with equal random numbers or shares. SHORTENED: those with short epochs, or more steps.

    A run on one worker is also found if it had another batch.
    """
    nudged = {key: one for key, one in scenarios.items() if faults.are_nudged(one.faults)}
    others = {k: one for k, one in scenarios.items() if not faults.are_of_witnesses(one.faults)}
    plain = companions.plain(run_names.unturned(subject), repeat=0)
    keys = {scenario: key for key, scenario in others.items()}
    alone = _nearest(subject, plain.with_(world_size=1), ALONE, others)
    twice: tuple[K, ...] = ()
    if again := _nearest(subject, plain.with_(repeat=1), REPEATED, others):
        first = keys.get(others[again[0]].with_(repeat=0))
        twice = () if first is None else (first, again[0])
    turned = {key: one for key, one in scenarios.items() if faults.are_reordered(one.faults)}

    def pair(changed: Mapping[K, Scenario]) -> tuple[K, ...]:
        for key, scenario in changed.items():
            meant = plain.with_(world_size=scenario.world_size)
            if still := _nearest(subject, meant, ALONE, others):
                return still[0], key
        return ()

    longer = {key for key, one in scenarios.items() if faults.steps_of(one.faults)}
    shortened = {key for key, one in scenarios.items() if faults.are_shortened(one.faults)}
    short = tuple(
        key for key, one in scenarios.items() if key in longer | shortened and not one.stops
    )
    controlled = tuple(
        key for key in scenarios if key not in {*nudged, *turned, *others, *shortened, *longer}
    )
    once = () if alone is None else (alone[0],)
    return {
        ALONE: once,
        REPEATED: twice,
        NUDGED: pair(nudged),
        REORDERED: pair(turned),
        CONTROLLED: controlled,
        SHORTENED: short,
    }


def _nearest(
    subject: Scenario, meant: Scenario, need: Need, others: Mapping[K, Scenario]
) -> tuple[K, Differences] | None:
    """Return the run nearest to `meant`, and the fields that keep it from answering `need`.

    The run must equal `meant` in every field where `subject` differs from `meant`. It may differ in
    few other fields, apart from those that `need` leaves free. Return None if no run qualifies.
    """
    crucial = differences(subject, meant).keys()
    candidates = []
    for key, scenario in others.items():
        fields = differences(scenario, meant)
        missed = {name: pair for name, pair in fields.items() if name not in free(need)}
        if crucial.isdisjoint(fields) and len(missed) <= (0 if need is ORACLE else _NEAR_MAX):
            distance = (len(missed), len(fields), scenario.detail != meant.detail)
            candidates.append((distance, key, missed))
    if not candidates:
        return None
    _, key, missed = min(candidates, key=lambda candidate: candidate[0])
    return key, missed


def free(need: Need) -> tuple[str, ...]:
    """Return the scenario fields in which a run that answers `need` may differ."""
    return (*need.free, *_SHOWN) if need.knob else need.free


def differences(given: Scenario, needed: Scenario) -> Differences:
    """Return the fields, except `detail`, in which two scenarios differ, with both values."""
    right = needed.to_dict()
    return {
        name: (value, right[name])
        for name, value in given.to_dict().items()
        if value != right[name] and name != "detail"
    }
