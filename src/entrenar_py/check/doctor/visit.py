"""`entrenar doctor`: examine this machine, print the results in tables, and write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from entrenar_py.check.doctor import Examination, reach
from entrenar_py.check.reports import terminal
from entrenar_py.compute import machine
from entrenar_py.compute.machine import Found
from entrenar_py.shared.page import console, output_file
from entrenar_py.shared.untrusted import escaping

_GIB = 2**30
_FEATURES = ("shader-f16", "subgroup", "timestamp-query")


def run(path: Path | None, *, clauses: bool, color: bool) -> None:
    """Print the examination of this machine, and write it to `path` as JSON if that is given.

    Clauses are printed only on request: to plan them takes as long as all the rest. JSON has them.
    Raises UsageError if `path` can't be written.
    """
    if path is not None:
        output_file.require_writable(path, "json")
    examined = examine(clauses=clauses or path is not None)
    show(examined, clauses=clauses, console=console.standard_output(color=color))
    if path is not None:
        output_file.write(examined.to_dict(), path)


def examine(*, clauses: bool) -> Examination:
    """Return the examination of this machine, with or without the clauses that it can exercise.

    Opens every device that it finds.
    """
    backends = machine.found()
    return Examination(
        versions=machine.versions(),
        backends=backends,
        trainers=reach.trainers(backends),
        clauses=reach.clauses(backends) if clauses else (),
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
    console.print(f"{len(examined.clauses)} clauses, as they are planned, on this machine: {told}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    """Add a row; the cells are escaped, as devices and drivers choose their own names."""
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
    alike: dict[tuple[str, str], list[str]] = {}  # trainers with the same backends and limits
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
