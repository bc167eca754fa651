"""Recipes are whole: what they name exists, and the recorded results are those they explain."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from docs import field_page
from tests.conftest import shipped_invariants
from tests.field import run
from tests.field.recipe import HERE, Edit, Kind, Recipe, Trial
from tests.field.recipes import everything
from tests.field.sources import Mismatch, change

LINES_MAX = 30
RECIPES = everything()
EXPLAINED = [
    (recipe, trial, one) for recipe in RECIPES for trial in recipe.trials for one in trial.expected
]


def test_names_are_used_once() -> None:
    """Recipes have names of their own, and so have the trials of each."""
    names = [one.name for one in RECIPES]
    names += [f"{one.name} {trial.name}" for one in RECIPES for trial in one.trials]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_sources_are_named() -> None:
    """A script comes from a commit of a repository, or is a driver that exists."""
    for one in RECIPES:
        assert bool(one.repository) == (len(one.commit) == len("0" * 40)), one.name
        assert one.repository or one.driver, one.name
        assert not one.driver or (HERE / "drivers" / one.driver).is_file(), one.name


def test_every_verdict_is_explained() -> None:
    """Each clause exists, and is explained once; a defect or default is reproduced."""
    for recipe, trial, one in EXPLAINED:
        at = (recipe.name, trial.name, one.clause)
        assert one.clause in shipped_invariants(), at
        assert one.because, at
        assert one.words, at
        assert one.verdict != "falsified" or one.kind is not Kind.UNDECLARED, at
        found = one.kind is Kind.DEFECT or (
            one.kind is Kind.DEFAULT and one.verdict != "inconclusive"
        )
        assert one.reproduction or not found, at
    clauses = Counter((recipe.name, trial.name, one.clause) for recipe, trial, one in EXPLAINED)
    assert [key for key, count in clauses.items() if count > 1] == []


def test_reproductions_are_short() -> None:
    """A reproduction has at most thirty lines of code, and a recipe that names it."""
    named = {one.reproduction for _, _, one in EXPLAINED} - {""}
    there = {path.name: path for path in (HERE / "reproductions").glob("*.py")}
    assert named == set(there)
    for path in there.values():
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
        assert len(lines) <= LINES_MAX, path.name
        assert "entrenar" not in path.read_text("utf-8"), path.name


def test_recorded_results_are_explained() -> None:
    """What was recorded is of the recipe's commit, with the verdicts that it explains.

    A clause that is tried otherwise since then may have no record.
    """
    for recipe in RECIPES:
        for trial in recipe.trials:
            result = field_page.results(recipe, trial)
            if result is not None:
                assert result["commit"] == recipe.commit, recipe.name
                recorded = run.of_clauses(trial, ",".join(result["clauses"]))
                assert run.differences(recorded, result["clauses"]) == [], recipe.name


def test_the_page_is_current() -> None:
    """docs/field.md is current; run `python -m docs.field_page` if not."""
    assert field_page.PAGE.read_text("utf-8") == field_page.page()


def test_an_edit_that_finds_no_line_is_an_error(tmp_path: Path) -> None:
    """The error names repository, file and line; an edit that finds it keeps indentation."""
    recipe = Recipe(name="x", title="x", repository="a/b", commit="0" * 40, trials=())
    (tmp_path / "t.py").write_text("if True:\n    step()\n")
    change(recipe, Edit("t.py", "step()", add="obs()"), tmp_path)
    assert (tmp_path / "t.py").read_text() == "if True:\n    step()\n    obs()\n"
    with pytest.raises(Mismatch, match=r"a/b 00000000: t\.py has 0 lines 'leap\(\)', 1 is needed"):
        change(recipe, Edit("t.py", "leap()", add="obs()"), tmp_path)


def test_a_difference_is_told() -> None:
    """A verdict without an explanation, one for another reason, and one that is gone are told."""
    trial = Trial(name="auto", command=("x",), expected=())
    held = {"F-DP-001": {"verdict": "held", "compared": 1, "reason": ""}}
    wrong = {"F-DP-001": {"verdict": "falsified", "compared": 1, "reason": "differs"}}
    assert run.differences(trial, held) == []
    assert run.differences(trial, wrong) == ["F-DP-001 falsified, unexplained: differs"]
    assert run.differences(trial, {}) == ["no clause was judged"]
