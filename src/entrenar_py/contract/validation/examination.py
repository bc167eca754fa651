"""A contract's file looked at as a whole: its tree, what was made of it, what the reader said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from entrenar_py import contract
from entrenar_py.contract.problems import Problem, Problems
from entrenar_py.contract.records import Contract, Invariant
from entrenar_py.contract.tree import MapNode
from entrenar_py.contract.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class Examined:
    """`contract` is None where the file can't be read as one, `root` where it has no tree."""

    path: Path
    root: MapNode | None
    contract: Contract | None
    problems: tuple[Problem, ...]


def examine(
    path: Path,
    *,
    vocabulary: Vocabulary,
    bind: Sequence[Path],
    unrunnable: Callable[[Invariant], str],
) -> Examined:
    """Return the contract at `path` and what its reader says of it; raise none of that."""
    problems = Problems()
    root, loaded = contract.read(path, vocabulary=vocabulary, problems=problems, bind=bind)
    if any(problem.level == "error" for problem in problems.all):
        loaded = None
    for clause in () if loaded is None else loaded.invariants:
        if why := unrunnable(clause):
            problems.error(clause.position, why)
    return Examined(path=path, root=root, contract=loaded, problems=problems.all)
