"""The names that the contracts of these tests may use."""

from __future__ import annotations

from entrenar_py import checks, kill_matrix
from entrenar_py.contract import Vocabulary

# As the command line has it.
OURS = Vocabulary(checks=checks.terms(), mutants=kill_matrix.planted_bugs)
# A harness that has neither checks nor mutants.
NOTHING = Vocabulary(checks=(), mutants=lambda: None)
