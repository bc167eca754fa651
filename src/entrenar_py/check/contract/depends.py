"""Follows `depends_on`: finds the file of each name, and cycles among the files."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from entrenar_py.shared import shipped
from entrenar_py.shared.config import composer
from entrenar_py.shared.config.composer import MapNode
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Position, Problems


def check(path: Path, root: MapNode, problems: Problems) -> None:
    """Follow `metadata.depends_on` of the contract at `path` through all files it leads to.

    A cycle is an error. A name that leads to no readable contract is a note.
    """
    start = path.resolve()
    direct: dict[Path, Position] = {}
    graph: dict[Path, list[Path]] = {start: []}
    for name, at in _names(root, problems):
        target = _resolve(name, start.parent)
        if target is None or not _follow(target, graph):
            words = "leads to no contract next to this file and to no shipped one"
            problems.note(at, f"metadata: depends_on {name!r} {words}; its clauses are not read")
            continue
        direct.setdefault(target, at)
        graph[start].append(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[Path] = error.args[1][::-1]  # graphlib lists what is needed first
        at = next((direct[file] for file in circle if file in direct), min(direct.values()))
        chain = " -> ".join(file.name for file in circle)
        problems.error(at, f"metadata: depends_on is circular: {chain}; remove one")


def _names(root: MapNode, problems: Problems) -> list[tuple[str, Position]]:
    metadata = root.fields.get("metadata", root)
    if not isinstance(metadata, MapNode):
        return []
    record = Record(metadata, what="metadata", known=(), problems=problems)
    return [(item.text.strip(), item.at) for item in record.scalars("depends_on")]


def _resolve(name: str, folder: Path) -> Path | None:
    for candidate in (folder / name, folder / f"{name}.yaml", folder / f"{name}.yml"):
        try:
            if candidate.is_file():
                return candidate.resolve()
        except OSError:  # a name too long for the file system is no file
            continue
    found = shipped.shipped_contract(name)
    return None if found is None else found.resolve()


def _follow(start: Path, graph: dict[Path, list[Path]]) -> bool:
    """Add to `graph` the files that `start` leads to; return False if that is no contract."""
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path in graph:
            continue
        names = _dependencies(path)
        if names is None and path == start:
            return False
        targets = [_resolve(name, path.parent) for name in names or ()]
        graph[path] = [target for target in targets if target is not None]
        waiting += graph[path]
    return True


def _dependencies(path: Path) -> list[str] | None:
    quiet = Problems()  # problems of another file are reported when it is loaded itself
    root = composer.load(path, quiet)
    return None if root is None else [name for name, _ in _names(root, quiet)]
