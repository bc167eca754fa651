"""Contracts: load a YAML file into a `Contract` that knows the place of every clause.

This package decides nothing about trainers. It finds the clauses, keeps unknown parts of the file
as plain data, and reports problems with the file.

Contracts come from many authors, and a reader for a single schema would refuse most of them. So
`layout` recognizes clauses by their content, in any block. Each value keeps its line and column
(`shared.config`). Readers continue after an error, and all problems are raised at once. `bindings`
connect statements that name no check to a check. They are in a separate file, so that a contract by
someone else need not be changed. `rules` and `validation` judge how the contract itself is written;
their findings stop no run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from blake3 import blake3

from entrenar_py.check.contract import bindings, blocks, clauses, gates, layout
from entrenar_py.check.contract.clauses import CheckTerms, Vocabulary
from entrenar_py.check.contract.records import (
    EQUALITY_KINDS,
    SEVERITIES,
    TOLERANCE_KINDS,
    Binding,
    Contract,
    FalsificationTest,
    Gate,
    Invariant,
)
from entrenar_py.shared.config import composer
from entrenar_py.shared.config.composer import MapNode
from entrenar_py.shared.config.problems import Position, Problems

__all__ = [
    "EQUALITY_KINDS",
    "SEVERITIES",
    "TOLERANCE_KINDS",
    "Binding",
    "CheckTerms",
    "Contract",
    "FalsificationTest",
    "Gate",
    "Invariant",
    "Position",
    "Vocabulary",
    "load",
    "read",
]


def load(
    path: Path, *, vocabulary: Vocabulary, strict: bool = False, bind: Sequence[Path] = ()
) -> Contract:
    """Return the contract at `path`. Nothing in the file is executed.

    `vocabulary` has the names of checks and planted bugs that a clause may use. `bind` are files of
    bindings, in addition to the shipped one and the one next to the contract. Raises ContractError
    with all problems at once, each `file:line:column: error: ...`. With `strict`, warnings are
    errors, too.
    """
    problems = Problems()
    _, loaded = read(path, vocabulary=vocabulary, problems=problems, bind=bind)
    settled = problems.settle(strict=strict)
    assert loaded is not None  # otherwise there was an error
    return replace(loaded, problems=settled)


def read(
    path: Path, *, vocabulary: Vocabulary, problems: Problems, bind: Sequence[Path] = ()
) -> tuple[MapNode | None, Contract | None]:
    """Return the YAML tree of the file at `path` and its Contract.

    Both are None if the file is not a contract.

    Errors, warnings and notes are added to `problems`, also for a file that can't be read. If there
    is an error among them, the contract must not be used.
    """
    data = composer.read(path, problems)
    root = None if data is None else composer.compose(data, str(path), problems)
    if data is None or root is None:
        return None, None
    if layout.is_binding_registry(root):
        problems.error(root.at, _REGISTRY)
        return None, None
    if bindings.MARK in root.fields:
        problems.error(root.at, _BINDINGS)
        return None, None
    files = bindings.files(path, bind)
    loaded = _read(path, root, blake3(data).hexdigest(16), vocabulary, files, problems)
    blocks.follow_dependencies(path, root, problems)
    return root, loaded


_REGISTRY = (
    "this is a registry of bindings (which function implements which equation), not a contract; "
    "give one of the contracts that it names"
)
_BINDINGS = "these are bindings, not a contract; give them with --bind, and their contract as well"


def _read(
    path: Path,
    root: MapNode,
    digest: str,
    vocabulary: Vocabulary,
    files: bindings.Files,
    problems: Problems,
) -> Contract:
    metadata = blocks.metadata(root, problems)
    equations, obligations = blocks.equations(root, problems), blocks.obligations(root, problems)
    invariants = clauses.read(root, vocabulary, problems)
    if not invariants:
        invariants = blocks.as_clauses(obligations)
    targets = blocks.Targets(invariants, equations, obligations)
    tests = blocks.tests(root, targets, problems)
    stated = bindings.items(invariants, tests, obligations, equations)
    invariants = bindings.bind(stated, files, vocabulary, problems)
    clauses.tell_unbound(invariants, vocabulary, root.at, problems)
    loaded = Contract(
        path=path,
        digest=digest,
        metadata=metadata,
        invariants=invariants,
        falsification_tests=tests,
        equations=equations,
        obligations=obligations,
        harnesses=blocks.harnesses(root, problems),
        gate=gates.read(root, problems),
        blocks=layout.other_blocks(root),
    )
    gates.tell_unresolved(loaded, root, problems)
    blocks.warn_unexercised(invariants, tests, problems)
    blocks.unique_ids(root, problems)
    blocks.note_blocks(root, problems)
    return loaded
