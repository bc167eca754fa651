"""Planting of bugs: functions are replaced by dotted path, and named clauses must then fail.

This module has only the machinery. The bugs and the benign variants are in the `falsification`
folder. Product code never asks whether a mutant is planted.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any

from entrenar_py.shared import package_data
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario

PACKAGE = "entrenar_py_falsification"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A changed trainer: `plants` maps dotted paths of functions to their replacements.

    - `invariants`: the clauses that the bug must break; empty for a benign variant.
    - `tried`: the clauses that must hold on a benign variant. Other clauses may be inconclusive
      on it, but not falsified.
    - `place`: what the counterexample must name (step, rank, shard, tensor, ...).
    - `source`: where the bug was seen.
    """

    name: str
    summary: str
    plants: Mapping[str, Callable[..., Any]]
    scenario: Scenario
    source: str = ""
    invariants: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    place: Mapping[str, Any] = field(default_factory=dict)

    @property
    def benign(self) -> bool:
        """True if this variant is a correct trainer, which no check may falsify."""
        return not self.invariants

    def subject(self) -> Scenario:
        """Return the scenario in which this variant is planted."""
        return self.scenario.with_(mutant=self.name)


@cache
def catalogue() -> dict[str, Variant]:
    """Return every variant by name, mutants first.

    Raises UsageError if the `falsification` folder isn't installed.
    """
    folder = package_data.falsification_folder()
    if folder is None:
        raise UsageError("the falsification folder with the mutants was not installed")
    if PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = module
        spec.loader.exec_module(module)
    variants: list[Variant] = sys.modules[PACKAGE].variants()
    assert len({variant.name for variant in variants}) == len(variants), "names are unique"
    return {variant.name: variant for variant in variants}


def names() -> tuple[str, ...]:
    """Return the names of all planted bugs, as contracts use them, without the benign variants.

    The names are read from a list, because loading the catalogue loads torch and the whole trainer.
    Raises UsageError if the bugs are not installed.
    """
    folder = package_data.falsification_folder()
    if folder is None:
        raise UsageError("the falsification folder with the mutants was not installed")
    return tuple((folder / "names.txt").read_text(encoding="utf-8").split())


class Planting:
    """A planted variant. `struck` becomes True when one of the replaced functions is called.

    It is True from the start if the variant only changes the scenario and replaces no function.
    """

    def __init__(self, *, struck: bool = False) -> None:
        self.struck = struck

    def counted(self, new: Callable[..., Any]) -> Callable[..., Any]:
        """Return `new`, wrapped so that a call sets `struck`."""

        @wraps(new)
        def replacement(*arguments: Any, **keywords: Any) -> Any:
            self.struck = True
            return new(*arguments, **keywords)

        return replacement


@contextmanager
def planted(name: str | None) -> Iterator[Planting]:
    """Plant the variant `name` (None: no variant) in the `with` block. UsageError if unknown."""
    if name is None:
        yield Planting()
        return
    if name not in catalogue():
        raise UsageError(f"mutant={name!r}: known are {', '.join(catalogue())}")
    from unittest.mock import patch  # imports asyncio

    plants = catalogue()[name].plants
    planting = Planting(struck=not plants)
    patches = [patch(path, planting.counted(new)) for path, new in plants.items()]
    try:
        for patcher in patches:
            patcher.start()
        yield planting
    finally:
        for patcher in reversed(patches):
            patcher.stop()
