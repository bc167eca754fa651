"""Vocabularies for the contracts of these tests."""

from __future__ import annotations

from pathlib import Path

from entrenar_py.check import clauses as checks
from entrenar_py.check import contract
from entrenar_py.check.contract import Contract, Vocabulary
from entrenar_py.shared import mutants

# The vocabulary of the command line.
OURS = Vocabulary(checks=checks.terms(), mutants=mutants.names)
# A vocabulary without checks and without installed mutants.
NOTHING = Vocabulary(checks=(), mutants=lambda: None)


def load(folder: Path, text: str) -> Contract:
    """Return the contract of this text, by the vocabulary of the command line."""
    path = folder / "c.yaml"
    path.write_text(text)
    return contract.load(path, vocabulary=OURS)
