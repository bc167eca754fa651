"""The tables on published contracts are those of today's bindings and their results."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from entrenar_py.shared import package_data

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def family() -> ModuleType:
    spec = util.spec_from_file_location("bound_family", DOCS / "bound_family.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_current(family: ModuleType) -> None:
    """The tables are current; run `python docs/bound_family.py` if not."""
    page = family.PAGE.read_text("utf-8")
    assert family.page(page) == page


def test_every_result_is_of_the_bindings_that_are_shipped(family: ModuleType) -> None:
    """Results are of the shipped bindings; if not, run `python docs/bound_family.py FOLDER`."""
    kept = json.loads(family.KEPT.read_text("utf-8"))
    now = {family.stem(path): family.digest(path) for path in package_data.all_bindings()}
    assert {name: one["digest"] for name, one in kept.items()} == now


def test_no_statement_that_a_check_tries_is_without_a_result(family: ModuleType) -> None:
    """Each statement is held as bound, and held or not applicable on other systems."""
    kept = json.loads(family.KEPT.read_text("utf-8"))
    told = [one for run in kept.values() for one in run["lines"].values()]
    tried = [one for one in told if one["as bound"][1]]
    assert len(tried) >= 50
    assert {verdict for one in tried for verdict, _ in one.values()} == {"held"}
