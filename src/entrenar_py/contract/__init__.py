"""A contract: what must hold, as read from a YAML file with the place of every clause.

Decides nothing about trainers: it finds the clauses, keeps what it does not know, and reports
what is wrong with the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from blake3 import blake3

from entrenar_py.contract import (
    attacks,
    binding_file,
    bindings,
    clauses,
    composer,
    depends,
    gates,
    items,
    layout,
    proofs,
    rules,
)
from entrenar_py.contract import vocabulary as vocabularies
from entrenar_py.contract.problems import Position, Problems
from entrenar_py.contract.records import (
    EQUALITY_KINDS,
    SEVERITIES,
    TOLERANCE_KINDS,
    Binding,
    Contract,
    FalsificationTest,
    Gate,
    Invariant,
)
from entrenar_py.contract.tree import MapNode
from entrenar_py.contract.vocabulary import CheckTerms, Vocabulary

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
    """Return the contract at `path`, valid; nothing in it was executed.

    `vocabulary` holds the names that a clause may use beside those in the file; `bind` are files of
    bindings, beside the one that lies next to it. Raises ContractError with all problems at once,
    each `file:line:column: error: ...`; under `strict` the warnings are problems too, the notes
    never.
    """
    problems = Problems()
    _, loaded = read(path, vocabulary=vocabulary, problems=problems, bind=bind)
    settled = problems.settle(strict=strict)
    assert loaded is not None  # else there was an error
    return replace(loaded, problems=settled)


def read(
    path: Path, *, vocabulary: Vocabulary, problems: Problems, bind: Sequence[Path] = ()
) -> tuple[MapNode | None, Contract | None]:
    """Return the tree of the file at `path` and the contract that it makes, or None for either.

    What is to say about them, or about a file that can't be read, goes into `problems`; with an
    error among these the contract is not fit for use.
    """
    data = composer.read(path, problems)
    root = None if data is None else composer.compose(data, str(path), problems)
    if data is None or root is None:
        return None, None
    if layout.is_binding_registry(root):
        problems.error(root.at, _REGISTRY)
        return None, None
    if binding_file.MARK in root.fields:
        problems.error(root.at, _BINDINGS)
        return None, None
    files = bindings.files(path, bind)
    loaded = _read(path, root, blake3(data).hexdigest(16), vocabulary, files, problems)
    depends.check(path, root, problems)
    return root, loaded


_REGISTRY = (
    "this is a registry of bindings (which function implements which equation), and no contract: "
    "give one of the contracts that it names"
)
_BINDINGS = "these are bindings, and no contract: give them with --bind, beside their contract"


def _read(
    path: Path,
    root: MapNode,
    digest: str,
    vocabulary: Vocabulary,
    files: bindings.Files,
    problems: Problems,
) -> Contract:
    metadata = rules.metadata(root, problems)
    equations, obligations = proofs.equations(root, problems), proofs.obligations(root, problems)
    invariants = clauses.read(root, vocabulary, problems)
    if not invariants:
        invariants = proofs.as_clauses(obligations)
    targets = attacks.Targets(invariants, equations, obligations)
    tests = attacks.read(root, targets, problems)
    stated = items.items(invariants, tests, obligations, equations)
    invariants = bindings.bind(stated, files, vocabulary, problems)
    vocabularies.tell_unbound(invariants, vocabulary, root.at, problems)
    loaded = Contract(
        path=path,
        digest=digest,
        metadata=metadata,
        invariants=invariants,
        falsification_tests=tests,
        equations=equations,
        obligations=obligations,
        harnesses=proofs.harnesses(root, problems),
        gate=gates.read(root, problems),
        blocks=layout.other_blocks(root),
    )
    gates.tell_unresolved(loaded, root, problems)
    attacks.warn_unexercised(invariants, tests, problems)
    rules.unique_ids(root, problems)
    rules.note_blocks(root, problems)
    return loaded
