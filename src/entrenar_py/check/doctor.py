"""`entrenar doctor`: this machine's devices and versions, and the clauses it can exercise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from entrenar_py.check import contract
from entrenar_py.check.cli import session
from entrenar_py.check.contract import Invariant
from entrenar_py.check.harness import plan
from entrenar_py.check.reports import terminal
from entrenar_py.check.reports.report import NotApplying
from entrenar_py.compute import machine
from entrenar_py.compute.machine import Found
from entrenar_py.shared import package_data
from entrenar_py.shared.page import arguments, console
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import AUTO, SYSTEMS
from entrenar_py.shared.untrusted import escaping

SCHEMA = "entrenar-doctor/1"


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A trainer, the backends on which it can compute here, and its limits on them."""

    system: str
    backends: tuple[str, ...]
    limits: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How many of a clause's own scenarios this machine can exercise.

    `can` of the `planned` scenarios can run, some of them with something missing. `lacking` lists
    everything that the machine lacks for the planned scenarios.
    """

    contract: str
    id: str
    name: str
    planned: int
    can: int
    lacking: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """The reach in one word: yes, partly or no."""
        if not self.can:
            return "no"
        return "partly" if self.lacking or self.can < self.planned else "yes"


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The devices, versions and trainers of this machine, and the reach of clauses.

    `versions` has a text even for a library that is missing.
    """

    versions: dict[str, str]
    backends: Sequence[Found]
    trainers: Sequence[Trainer]
    clauses: Sequence[Reach]

    def to_dict(self) -> dict[str, Any]:
        """Return the examination as a dict that JSON can hold."""
        record = asdict(self)
        for clause, one in zip(record["clauses"], self.clauses, strict=True):
            clause["state"] = one.state
        return {"schema": SCHEMA, **record}


PROC = Path("/proc/self/clear_refs")


def trainers(backends: Sequence[Found]) -> list[Trainer]:
    """Return every trainer, with the backends that it supports and that work here."""
    records = []
    for name, system in SYSTEMS.items():
        if not system.trains:
            continue
        kinds = [
            backend
            for backend in backends
            if backend.serves and _kind(backend.name) in system.backends
        ]
        limits: tuple[str, ...] = ()
        num_gpus = sum(_kind(backend.name) == "cuda" for backend in kinds)
        if system.only and num_gpus:
            limits = (f"cuda: up to {num_gpus} ranks, one a GPU, with NCCL",)
        names = (
            (backend.name for backend in kinds) if not system.only else map(_kind, _names(kinds))
        )
        records.append(Trainer(system=name, backends=tuple(dict.fromkeys(names)), limits=limits))
    return records


def reaches(backends: Sequence[Found]) -> list[Reach]:
    """Return the reach of every clause of every shipped contract, for its own scenarios."""
    known = session.vocabulary()
    records = []
    for path in package_data.shipped_contracts():
        loaded = contract.load(path, vocabulary=known)
        records += [_reach(path.name, clause, backends) for clause in loaded.invariants]
    return records


def _reach(name: str, clause: Invariant, backends: Sequence[Found]) -> Reach:
    tasks, _ = plan.divide([clause], plan.Plan())
    scenarios = [] if not tasks or isinstance(tasks[0], NotApplying) else tasks[0].scenarios
    lacking: dict[str, None] = {}
    can = 0
    for scenario in scenarios:
        fatal, partial = _lacks(scenario, backends)
        lacking |= dict.fromkeys((*fatal, *partial))
        can += not fatal
    if not scenarios:
        lacking["no check covers it here: it needs runs of a different trainer"] = None
    return Reach(
        contract=name,
        id=clause.id,
        name=clause.name,
        planned=len(scenarios),
        can=can,
        lacking=tuple(lacking),
    )


def _lacks(scenario: Scenario, backends: Sequence[Found]) -> tuple[list[str], list[str]]:
    """Return what keeps `scenario` from running here, and what it lacks but can run without."""
    serving = {_kind(backend.name) for backend in backends if backend.serves} | {AUTO}
    named = {backend.name for backend in backends if backend.serves}
    missing = [
        f"{name} ({_why(name, backends)})"
        for name in dict.fromkeys(scenario.backends)
        if name not in serving | named
    ]
    if scenario.system == "backend_chain":
        return [], [f"{backend}: a simulated one fails instead" for backend in missing]
    if scenario.system == "manifest":
        enough = len(scenario.backends) - len(missing) > 1
        return ([], missing) if enough else (missing, [])
    if scenario.system == "memory" and not PROC.exists():
        return [f"{PROC}, from which peak memory is read: only Linux has it"], []
    return missing, list(_too_few(scenario, backends))


def _too_few(scenario: Scenario, found: Sequence[Found]) -> Iterator[str]:
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


_GIB = 2**30
_FEATURES = ("shader-f16", "subgroup", "timestamp-query")


def run(path: Path | None, *, clauses: bool, color: bool) -> None:
    """Print the examination of this machine; if `path` is not None, also write it there as JSON.

    The JSON always has the clauses. They are printed only if `clauses` is true, since planning them
    takes as long as everything else. Raises UsageError if `path` can't be written.
    """
    if path is not None:
        arguments.require_writable(path, "json")
    examined = examine(clauses=clauses or path is not None)
    show(examined, clauses=clauses, console=console.standard_output(color=color))
    if path is not None:
        arguments.write_file(examined.to_dict(), path)


def examine(*, clauses: bool) -> Examination:
    """Return the examination of this machine; with `clauses`, also the reach of each clause.

    Every device that is found is opened.
    """
    backends = machine.found()
    return Examination(
        versions=machine.versions(),
        backends=backends,
        trainers=trainers(backends),
        clauses=reaches(backends) if clauses else (),
    )


def show(examined: Examination, *, clauses: bool, console: Console) -> None:
    """Print the tables of the examination, and how many clauses can be exercised."""
    for table in (_versions(examined), _backends(examined), _trainers(examined)):
        terminal.print_table(console, table)
        console.print()
    if not clauses:
        console.print("entrenar doctor --clauses lists which clauses this machine can exercise")
        return
    terminal.print_table(console, _clauses(examined))
    counts = Counter(one.state for one in examined.clauses)
    told = f"{counts['yes']} exercised, {counts['partly']} partly, {counts['no']} not"
    console.print(
        f"{len(examined.clauses)} clauses with their planned runs on this machine: {told}"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    # Escaped, since devices and drivers choose their own names.
    table.add_row(*map(escaping.line, cells))


def _versions(examined: Examination) -> Table:
    table = _table("versions", "part", "version")
    for name, version in examined.versions.items():
        _add(table, name, version)
    return table


def _backends(examined: Examination) -> Table:
    table = _table("backends", "--backend", "serves", "device", "of it")
    for one in examined.backends:
        device = f"{one.device}{', software' if one.software else ''}"
        _add(table, one.name, "yes" if one.serves else "no", device, "; ".join(_facts(one)))
    return table


def _facts(backend: Found) -> Iterator[str]:
    if backend.reason:
        yield backend.reason
    if backend.facts.get("memory bytes"):
        free = backend.facts["free bytes"] / _GIB
        yield f"{backend.facts['memory bytes'] / _GIB:.1f} GiB, {free:.1f} free"
    if "compute capability" in backend.facts:
        yield f"compute capability {backend.facts['compute capability']}"
        problem = backend.facts["compiler problem"]
        yield f"can't compile a model's blocks: {problem}" if problem else "compiles blocks"
    if "limits" in backend.facts:
        limits = backend.facts["limits"]
        yield backend.facts["driver"]
        yield f"a binding holds {_bytes(limits['max-storage-buffer-binding-size'])}"
        yield f"a buffer {_bytes(limits['max-buffer-size'])}"
        yield f"{limits['max-storage-buffers-per-shader-stage']} storage buffers a stage"
        yield f"workgroups of {limits['max-compute-invocations-per-workgroup']}"
        yield f"with {_bytes(limits['max-compute-workgroup-storage-size'])}"
        has = [name for name in _FEATURES if name in backend.facts["features"]]
        yield f"of {', '.join(_FEATURES)} it has {', '.join(has) or 'none'}"
        yield "reports no size of its memory"


def _bytes(number: int) -> str:
    for size, unit in ((_GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number} bytes"


def _trainers(examined: Examination) -> Table:
    table = _table("trainers", "computes here on", "--system", "limits")
    alike: dict[tuple[str, str], list[str]] = {}  # (backends, limits) -> trainers
    for one in examined.trainers:
        place = ", ".join(one.backends) or "nothing", "; ".join(one.limits)
        alike.setdefault(place, []).append(one.system)
    for (backends, limits), systems in alike.items():
        _add(table, backends, ", ".join(systems), limits)
    return table


def _clauses(examined: Examination) -> Table:
    table = _table("clauses", "contract", "clause", "exercised", "runs", "lacking")
    for clause in examined.clauses:
        _add(
            table,
            clause.contract.removesuffix(".yaml"),
            f"{clause.id} {clause.name}",
            clause.state,
            f"{clause.can} of {clause.planned}",
            "; ".join(clause.lacking),
        )
    return table
