"""Derives from a scenario the scenarios of the other runs that a check needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from entrenar_py.check.evidence import run_names
from entrenar_py.check.evidence.needs import (
    ALONE,
    CALM,
    COUNTS,
    KILLED,
    ON_CPU,
    ORACLE,
    PEER,
    REPEATED,
    RESUMED,
    SINGLE,
    TWIN,
    Need,
    Runs,
)
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import SILENT, SURVIVED
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import SYSTEMS, unplaced

_WORKERS = (1, 2, 3, 4, 5, 8)
_POWERS_OF_TWO = (1, 2, 4, 8)
# Need -> the field of a scenario that makes the run killed or resumed; the base's is empty.
_DISTURBANCES: Mapping[Need, str] = {KILLED: "faults", RESUMED: "stops"}


def of(needs: Collection[Need], scenario: Scenario) -> Runs[Scenario]:
    """Return the scenarios of all runs that a check with `needs` compares for `scenario`.

    If `scenario` itself answers one of `needs`, by its faults, its stops or a turned knob, the base
    is the same scenario without those. Otherwise `scenario` is the base.
    """
    pair = run_names.pair_of(scenario)
    for need in needs:
        if pair is not None and need.knob == pair.knob:
            return Runs(run_names.unturned(scenario), {need: (scenario,)})
    for need in needs:
        name = _DISTURBANCES.get(need)
        if name is not None and getattr(scenario, name):
            base = scenario.with_(**{name: ()})
            return Runs(base, {need: (scenario,)}, undropped=_undropped(needs, scenario))
    if pair is not None:
        return Runs(scenario)
    runs = {scenario: scenario}  # equal scenarios are one run
    beside = {
        need: tuple(
            run
            for run in dict.fromkeys(runs.setdefault(run, run) for run in _CHANGES[need](scenario))
            if run is not scenario or need is ORACLE
        )
        for need in needs
        if need in _CHANGES
    }
    is_oracle = scenario in beside.get(ORACLE, ())
    return Runs(scenario, beside, undropped=None if is_oracle else _undropped(needs, scenario))


def plain(scenario: Scenario, **changes: Any) -> Scenario:
    """Return `scenario` without faults, stops and mutant, and with `changes`."""
    if changes.get("world_size", scenario.world_size) != scenario.world_size:
        scenario = scenario.with_(options=unplaced(scenario.options))
    return scenario.with_(**{"faults": (), "stops": (), "mutant": None, **changes})


def _undropped(needs: Collection[Need], scenario: Scenario) -> Runs[Scenario] | None:
    """Return the runs without dropout if the runs to compare would draw different masks, else None.

    Masks that each rank draws change with the number of workers and with the loss of a worker.
    Masks from a trainer's own generators differ from those of any single device.
    """
    system = SYSTEMS.get(scenario.system)
    if not scenario.dropout or system is None:
        return None
    masks = system.traits.masks
    apart = (masks != "shard" and {ORACLE, ALONE} <= {*needs}) or (
        masks == "rank" and KILLED in needs
    )
    return of(needs, scenario.with_(dropout=0.0)) if apart else None


def _oracle(scenario: Scenario) -> list[Scenario]:
    """Return the same training on a single device, by the system `textbook`."""
    single = {"system": "textbook", "world_size": 1, "accumulation": 1, "backends": ("cpu",)}
    return [plain(scenario, **single, options={})]


def _counts(scenario: Scenario) -> list[Scenario]:
    """Return `scenario` on each number of workers for which it has enough shards and samples."""
    most = min(scenario.num_shards, scenario.num_samples)
    system = SYSTEMS.get(scenario.system)
    counts: tuple[int, ...] = _WORKERS
    if system is not None and system.powers_of_two:
        # Each worker needs a GPU of its own, so no count above the scenario's is tried.
        most, counts = min(most, scenario.world_size), _POWERS_OF_TWO
    return [
        plain(scenario, world_size=count, mutant=scenario.mutant)
        for count in counts
        if count <= most
    ]


def _calm(scenario: Scenario) -> list[Scenario]:
    """Return the same training without audits, and without faults that are survived or silent."""
    kept = tuple(fault for fault in scenario.faults if fault.kind not in (*SURVIVED, *SILENT))
    options = {name: value for name, value in scenario.options.items() if name != "audit_share"}
    return [plain(scenario, faults=kept, options=options)]


def _twin(scenario: Scenario) -> list[Scenario]:
    """Return the same reduction in one process; for a ring, simulated with another network seed."""
    system = SYSTEMS.get(scenario.system)
    if system is not None and system.traits.topology == "ring":
        options = _kept(scenario, ("block_bytes", "terms"))
        seed = scenario.options.get("network_seed", 0)
        if type(seed) is not int:
            raise UsageError.of("network_seed", seed, "use a whole number")
        options["network_seed"] = seed + 1
        # The mutant stays: another ring without it would have other bits.
        changes = {"system": "ring_simulated", "options": options, "mutant": scenario.mutant}
        return [plain(scenario, **changes)]
    options = _kept(scenario, ("terms",))
    return [plain(scenario, system="reference", world_size=1, options=options)]


def _finetuned(scenario: Scenario, system: str) -> Scenario:
    """Return the same fine-tuning by another system's one worker, without facts of its own."""
    names = {*SYSTEMS[system].options} - {"facts"}
    single = {"system": system, "world_size": 1, "backends": ("cpu",)}
    return plain(scenario, **single, options=_kept(scenario, names))


def _kept(scenario: Scenario, names: Iterable[str]) -> dict[str, Any]:
    return {name: scenario.options[name] for name in names if name in scenario.options}


_CHANGES: Mapping[Need, Callable[[Scenario], list[Scenario]]] = {
    ALONE: lambda one: [plain(one, world_size=1, mutant=one.mutant)],
    COUNTS: _counts,
    REPEATED: lambda one: [one.with_(repeat=one.repeat + 1)],
    ORACLE: _oracle,
    CALM: _calm,
    TWIN: _twin,
    PEER: lambda one: [_finetuned(one, "finetuned_by_peer")],
    SINGLE: lambda one: [_finetuned(one, "finetuned")],
    ON_CPU: lambda one: [plain(one, backends=("cpu",))],
}
