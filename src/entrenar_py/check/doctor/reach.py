"""Find the backends on which each trainer can compute, and the clauses that can be exercised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from entrenar_py.check import contract
from entrenar_py.check.cli import session
from entrenar_py.check.contract import Invariant
from entrenar_py.check.doctor import Reach, Trainer
from entrenar_py.check.harness import plan
from entrenar_py.check.reports.report import NotApplying
from entrenar_py.compute.machine import Found
from entrenar_py.shared import shipped
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import AUTO, SYSTEMS

PROC = Path("/proc/self/clear_refs")


def trainers(found: Sequence[Found]) -> list[Trainer]:
    """Return every trainer, with the backends that it supports and that work here."""
    records = []
    for name, system in SYSTEMS.items():
        if not system.trains:
            continue
        kinds = [one for one in found if one.serves and _kind(one.name) in system.backends]
        limits: tuple[str, ...] = ()
        num_gpus = sum(_kind(one.name) == "cuda" for one in kinds)
        if system.only and num_gpus:
            limits = (f"cuda: up to {num_gpus} ranks, one a GPU, with NCCL",)
        names = (one.name for one in kinds) if not system.only else map(_kind, _names(kinds))
        records.append(Trainer(system=name, backends=tuple(dict.fromkeys(names)), limits=limits))
    return records


def clauses(found: Sequence[Found]) -> list[Reach]:
    """Return the reach of every clause of every shipped contract, with its own scenarios."""
    known = session.vocabulary()
    records = []
    for path in shipped.shipped_contracts():
        loaded = contract.load(path, vocabulary=known)
        records += [_reach(path.name, clause, found) for clause in loaded.invariants]
    return records


def _reach(name: str, clause: Invariant, found: Sequence[Found]) -> Reach:
    tasks, _ = plan.divide([clause], plan.Plan())
    scenarios = [] if not tasks or isinstance(tasks[0], NotApplying) else tasks[0].scenarios
    lacking: dict[str, None] = {}
    can = 0
    for scenario in scenarios:
        fatal, partial = _lacks(scenario, found)
        lacking |= dict.fromkeys((*fatal, *partial))
        can += not fatal
    if not scenarios:
        lacking["no check covers it here: it needs runs of another trainer"] = None
    return Reach(
        contract=name,
        id=clause.id,
        name=clause.name,
        planned=len(scenarios),
        can=can,
        lacking=tuple(lacking),
    )


def _lacks(scenario: Scenario, found: Sequence[Found]) -> tuple[list[str], list[str]]:
    """Return what keeps `scenario` from running here, and what it lacks but can run without."""
    serving = {_kind(one.name) for one in found if one.serves} | {AUTO}
    named = {one.name for one in found if one.serves}
    missing = [
        f"{name} ({_why(name, found)})"
        for name in dict.fromkeys(scenario.backends)
        if name not in serving | named
    ]
    if scenario.system == "backend_chain":
        return [], [f"{one}: a stand-in fails in its place" for one in missing]
    if scenario.system == "manifest":
        enough = len(scenario.backends) - len(missing) > 1
        return ([], missing) if enough else (missing, [])
    if scenario.system == "memory" and not PROC.exists():
        return [f"{PROC}, from which peak memory is read: only Linux has it"], []
    return missing, list(_too_few(scenario, found))


def _too_few(scenario: Scenario, found: Sequence[Found]) -> Iterator[str]:
    """Yield a text if there are too few GPUs: on CUDA torch's trainers need one for each rank."""
    num_gpus = sum(one.serves and _kind(one.name) == "cuda" for one in found)
    own = bool(SYSTEMS[scenario.system].only) and scenario.backends[0] == "cuda"
    if own and scenario.world_size > num_gpus:
        yield f"{scenario.world_size} GPUs, one for each rank: there are {num_gpus}"


def _why(name: str, found: Sequence[Found]) -> str:
    reasons = [one.reason for one in found if _kind(one.name) == name and not one.serves]
    return reasons[0] if reasons else "there is none"


def _names(found: Sequence[Found]) -> list[str]:
    return [one.name for one in found]


def _kind(name: str) -> str:
    return name.partition(":")[0]
