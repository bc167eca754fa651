"""Vocabularies for the contracts of these tests."""

from __future__ import annotations

from entrenar_py.check import clauses as checks
from entrenar_py.check.contract import Vocabulary
from entrenar_py.shared import mutants

# The vocabulary of the command line.
OURS = Vocabulary(checks=checks.terms(), mutants=mutants.names)
# A vocabulary without checks and without installed mutants.
NOTHING = Vocabulary(checks=(), mutants=lambda: None)
