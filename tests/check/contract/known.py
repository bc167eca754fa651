"""Vocabularies for the contracts of these tests."""

from __future__ import annotations

from entrenar_py.check import clauses as checks
from entrenar_py.check import kill_matrix
from entrenar_py.check.contract import Vocabulary

# The vocabulary of the command line.
OURS = Vocabulary(checks=checks.terms(), mutants=kill_matrix.planted_bugs)
# A vocabulary without checks and without installed mutants.
NOTHING = Vocabulary(checks=(), mutants=lambda: None)
