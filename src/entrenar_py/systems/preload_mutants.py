"""Loads the catalogue of mutants on import, for the parent of processes that plant them."""

from entrenar_py.shared import mutants

mutants.catalogue()
