"""The runs that a check compares a run with: derived from a scenario, or chosen among traces.

`of` derives the scenarios of runs that are still to be made. `among` infers from the scenarios of
stored runs which run answers which need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

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
    Near,
    Need,
    Runs,
)
from entrenar_py.check.evidence.needs import witnesses as witnesses_of
from entrenar_py.shared import faults
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import SILENT, SURVIVED
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import SYSTEMS, unplaced

_WORKERS = (1, 2, 3, 4, 5, 8)
_POWERS_OF_TWO = (1, 2, 4, 8)
# Need -> the field that must not be empty in the scenario of its run; it is empty in the base.
_DISTURBANCES: Mapping[Need, str] = {KILLED: "faults", RESUMED: "stops"}


def of(needs: Collection[Need], scenario: Scenario) -> Runs[Scenario]:
    """Return the scenarios of all runs that a check with `needs` compares for `scenario`.

    If `scenario` itself answers one of `needs` (by its faults, its stops or a turned knob), the
    base is the same scenario without that change. Otherwise the base is `scenario`.
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
    runs = {scenario: scenario}  # equal scenarios share one run
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
    """Return `scenario` with `changes`, and without faults, stops and mutant."""
    if changes.get("world_size", scenario.world_size) != scenario.world_size:
        scenario = scenario.with_(options=unplaced(scenario.options))
    return scenario.with_(**{"faults": (), "stops": (), "mutant": None, **changes})


def _undropped(needs: Collection[Need], scenario: Scenario) -> Runs[Scenario] | None:
    """Return the runs without dropout, if dropout masks would make the usual ones incomparable.

    Masks that each rank draws depend on the number of workers, and on which workers were lost.
    Masks from a trainer's own generators differ from those of any single device. Otherwise None.
    """
    system = SYSTEMS.get(scenario.system)
    if not scenario.dropout or system is None:
        return None
    masks = system.traits.masks
    apart = (masks != "shard" and {ORACLE, ALONE} <= {*needs}) or (
        masks == "rank" and KILLED in needs
    )
    return of(needs, scenario.with_(dropout=0.0)) if apart else None


# System -> the independent trainer that makes the same training, if that isn't `textbook`.
_ORACLES: Mapping[str, str] = {"elastic": "elastic_oracle"}


def _oracle(scenario: Scenario) -> list[Scenario]:
    system = _ORACLES.get(scenario.system, "textbook")
    single = {"system": system, "world_size": 1, "accumulation": 1, "backends": ("cpu",)}
    return [plain(scenario, **single, options={})]


def _counts(scenario: Scenario) -> list[Scenario]:
    """Return `scenario` with each number of workers for which it has enough shards and samples."""
    most = min(scenario.num_shards, scenario.num_samples)
    system = SYSTEMS.get(scenario.system)
    counts: tuple[int, ...] = _WORKERS
    if system is not None and system.powers_of_two:
        # Each worker needs its own GPU, so no number above the scenario's is used.
        most, counts = min(most, scenario.world_size), _POWERS_OF_TWO
    return [
        plain(scenario, world_size=count, mutant=scenario.mutant)
        for count in counts
        if count <= most
    ]


def _calm(scenario: Scenario) -> list[Scenario]:
    """Return the same training without audits, and without faults that must not change its numbers.

    These are the faults in SURVIVED and SILENT.
    """
    kept = tuple(fault for fault in scenario.faults if fault.kind not in (*SURVIVED, *SILENT))
    options = {name: value for name, value in scenario.options.items() if name != "audit_share"}
    return [plain(scenario, faults=kept, options=options)]


def _twin(scenario: Scenario) -> list[Scenario]:
    """Return the same reduction in one process; for a ring, a simulation with a different seed."""
    system = SYSTEMS.get(scenario.system)
    if system is not None and system.traits.topology == "ring":
        options = _kept(scenario, ("block_bytes", "terms"))
        seed = scenario.options.get("network_seed", 0)
        if type(seed) is not int:
            raise UsageError.of("network_seed", seed, "use a whole number")
        options["network_seed"] = seed + 1
        # The mutant stays: a ring without it would have different bits.
        changes = {"system": "ring_simulated", "options": options, "mutant": scenario.mutant}
        return [plain(scenario, **changes)]
    options = _kept(scenario, ("terms",))
    return [plain(scenario, system="reference", world_size=1, options=options)]


def _finetuned(scenario: Scenario, system: str) -> Scenario:
    """Return the same fine-tuning by one worker of `system`, without the option `facts`."""
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


K = TypeVar("K")

# Field -> (its value in the run, the value that is needed).
Differences = Mapping[str, tuple[Any, Any]]
# A run that differs from the needed run in more fields belongs to another training.
_NEAR_MAX = 3
# Fields that are observed in a run of a user's command. A turned knob may change any of them.
_SHOWN = (
    *("num_shards", "num_samples", "batch_size", "num_steps", "accumulation"),
    *("optimizer", "learning_rate", "weight_decay", "dropout"),
)


def among(
    needs: Collection[Need],
    own: K,
    scenarios: Mapping[K, Scenario],
    *,
    witnesses: Collection[Need] = (),
) -> Runs[K]:
    """Return the run `own` and the runs that a check with `needs` compares it with.

    Runs are named by their keys in `scenarios`. A run answers a need if `of` derives its scenario
    from that of `own`; `detail` and the fields in the need's `free` may differ. If no run does,
    `near` holds the nearest run and the fields in which it differs.
    """
    subject = scenarios[own]
    meant = of(needs, subject)
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
    for need in meant.beside:  # if `own` is not the base, the need that it answers
        if meant.base is not None and meant.base != subject:
            base = runs_of(meant.base, need)
    keys = {scenario: key for key, scenario in scenarios.items()}
    return Runs(
        base=next(iter(base), None),
        beside=beside,
        undropped=None if meant.undropped is None else meant.undropped.chosen(keys.get),
        near={need: run for need, run in near.items() if not (base and beside[need])},
        witnesses=_witnesses(witnesses, subject, scenarios) if subject.workload == "own" else {},
    )


def _witnesses(
    needs: Collection[Need], subject: Scenario, scenarios: Mapping[K, Scenario]
) -> dict[Need, tuple[K, ...]]:
    """Return need -> the runs of a user's trainer that show whether other runs can be compared.

    ALONE is answered by the run on one worker, even with a different batch; REPEATED by two runs
    that should be equal; other needs as in `needs.witnesses`.
    """
    others = {k: run for k, run in scenarios.items() if not faults.are_of_witnesses(run.faults)}
    undisturbed = plain(run_names.unturned(subject), repeat=0)
    keys = {scenario: key for key, scenario in others.items()}
    alone = _nearest(subject, undisturbed.with_(world_size=1), ALONE, others)
    twice: tuple[K, ...] = ()
    if again := _nearest(subject, undisturbed.with_(repeat=1), REPEATED, others):
        first = keys.get(others[again[0]].with_(repeat=0))
        twice = () if first is None else (first, again[0])

    def without_faults(key: K) -> K | None:
        meant = undisturbed.with_(world_size=scenarios[key].world_size)
        nearest = _nearest(subject, meant, ALONE, others)
        return None if nearest is None else nearest[0]

    planned = {key: run.faults for key, run in scenarios.items() if not run.stops}
    return {
        ALONE: () if alone is None else (alone[0],),
        REPEATED: twice,
        **witnesses_of(needs, planned, without_faults),
    }


def _nearest(
    subject: Scenario, meant: Scenario, need: Need, others: Mapping[K, Scenario]
) -> tuple[K, Differences] | None:
    """Return the key of the run nearest to `meant`, and how it differs from what `need` requires.

    The run must equal `meant` in every field in which `subject` differs from `meant`. The fields in
    the need's `free` may differ, and at most _NEAR_MAX others. Return None if no run qualifies.
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


def differences(run: Scenario, needed: Scenario) -> Differences:
    """Return field -> (value in `run`, value in `needed`) where they differ, except `detail`."""
    right = needed.to_dict()
    return {
        name: (value, right[name])
        for name, value in run.to_dict().items()
        if value != right[name] and name != "detail"
    }
