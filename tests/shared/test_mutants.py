"""The catalogue of variants, and the planting of one."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest

from entrenar_py import systems
from entrenar_py.shared import mutants, package_data
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import End, Planted
from entrenar_py.shared.verdict import Counterexample
from entrenar_py.train.arithmetic import optimizer, reduction

CATALOGUE = mutants.catalogue()
PLACES = {field.name for field in fields(Counterexample)} - {"message", "scenario"}


@pytest.mark.parametrize("variant", CATALOGUE.values(), ids=CATALOGUE.keys())
def test_a_variant_is_well_described(variant: Variant) -> None:
    """Each variant has one line and an existing target; a mutant also source, clauses and place."""
    assert 10 <= len(variant.summary) <= 90
    assert not variant.summary.endswith(".")
    for path, replacement in variant.plants.items():
        assert callable(resolve_name(path))
        assert resolve_name(path) is not replacement
    if variant.benign:
        assert variant.tried
        assert not variant.place
    else:
        assert variant.plants
        assert variant.source
        assert variant.place.keys() <= PLACES
        assert variant.place


def test_mutants_come_first() -> None:
    """The catalogue is in the order of the matrix."""
    benign = [variant.benign for variant in CATALOGUE.values()]
    assert benign == sorted(benign)
    assert all(name == variant.name for name, variant in CATALOGUE.items())


def test_subject() -> None:
    """A scenario with the mutant's name differs from the original in that name only."""
    variant = CATALOGUE["ddp-bypass"]
    assert variant.subject().mutant == "ddp-bypass"
    assert variant.subject().with_(mutant=None) == variant.scenario
    assert variant.subject().digest != variant.scenario.digest


def test_planted_and_gone() -> None:
    """All functions of a variant are replaced inside the context, and restored outside."""
    before = reduction.fold, reduction.root
    with mutants.planted("arrival-order"):
        found = [inspect.unwrap(one) for one in (reduction.fold, reduction.root)]
        assert found == list(CATALOGUE["arrival-order"].plants.values())
    assert (reduction.fold, reduction.root) == before


def test_a_planting_knows_whether_it_struck() -> None:
    """A planting has struck once a replaced function is called, or at once if it replaces none."""
    with mutants.planted("clip-scaled") as planting:
        before = planting.struck
        optimizer.clip(np.ones(2, dtype=np.float32), 2.0, 1.0)
        assert (before, planting.struck) == (False, True)
    with mutants.planted("more-ranks-than-samples") as planting:
        assert not CATALOGUE["more-ranks-than-samples"].plants
        assert planting.struck


def test_a_trace_says_whether_its_mutant_took_part() -> None:
    """A mutant of another system is never called, and the trace says so."""
    scenario = Scenario(system="reference", workload="linear", world_size=2, seed=0)
    assert systems.run(scenario.with_(mutant="arrival-order")).of(Planted)
    assert not systems.run(scenario.with_(mutant="ddp-bypass")).of(Planted)
    assert not systems.run(scenario).of(Planted)


def test_gone_after_an_exception() -> None:
    """A run that crashes leaves no mutant planted."""
    before = optimizer.clip

    def crash() -> None:
        with mutants.planted("clip-scaled"):
            assert optimizer.clip is not before
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        crash()
    assert optimizer.clip is before


def test_no_mutant() -> None:
    """None plants nothing."""
    with mutants.planted(None):
        assert optimizer.clip.__module__ == optimizer.__name__


def test_unknown_mutant() -> None:
    """The message lists the known ones."""
    with pytest.raises(UsageError, match=r"mutant='no-such': known are ga-mean, "):
        systems.run(next(iter(CATALOGUE.values())).scenario.with_(mutant="no-such"))


def test_missing_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the falsification folder there is no catalogue, and the message says so."""
    monkeypatch.setattr(package_data, "falsification_folder", lambda: None)
    with pytest.raises(UsageError, match="falsification folder"):
        mutants.catalogue.__wrapped__()


def test_loaded_from_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder is a package of its own, loaded under the name PACKAGE."""
    (tmp_path / "__init__.py").write_text("def variants():\n    return []\n")
    monkeypatch.setattr(package_data, "falsification_folder", lambda: tmp_path)
    monkeypatch.delitem(sys.modules, mutants.PACKAGE)
    assert mutants.catalogue.__wrapped__() == {}


def test_a_mutant_that_crashes_is_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant that crashes is a failed run with its reason, and is not counted as detected."""

    def crash(*arguments: object) -> None:
        raise ZeroDivisionError("planted crash")

    scenario = Scenario(system="reference", workload="linear", world_size=2, seed=0)
    crashing = Variant(
        name="crashing",
        summary="",
        plants={"entrenar_py.train.arithmetic.optimizer.mean": crash},
        scenario=scenario,
    )
    monkeypatch.setattr(mutants, "catalogue", lambda: {"crashing": crashing})
    end = systems.run(crashing.subject()).end
    assert end == End(status="failed", reason="ZeroDivisionError: planted crash")
