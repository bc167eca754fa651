"""Hints on unknown names, and the format of problem lines."""

from __future__ import annotations

import pytest

from entrenar_py.shared.config import problems
from entrenar_py.shared.config.problems import Position, Problems
from entrenar_py.shared.errors import ContractError

KNOWN = ("severity", "tolerance")
AT = Position("c.yaml", 3, 5)


def test_a_near_name_gets_the_match_alone() -> None:
    """The hint names only the near match, and the list of known names is still unused."""
    found = Problems()
    assert found.hint("severty", KNOWN) == "; did you mean 'severity'?"
    assert found.hint("owner", KNOWN) == "; known are severity, tolerance"


def test_a_list_is_told_once_a_file() -> None:
    """The known names are listed once; each kind of mapping has its own list."""
    found = Problems()
    hints = [found.hint(name, KNOWN) for name in ("owner", "colour", "severty")]
    assert hints == ["; known are severity, tolerance", "", "; did you mean 'severity'?"]
    assert found.hint("owner", ("version",)) == "; known are version"


def test_a_far_name_may_have_advice_of_its_own() -> None:
    """The advice replaces the list of known names."""
    assert Problems().hint("owner", KNOWN, otherwise="see the page") == "; see the page"


def test_the_search_for_near_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file of thousands of unknown names the number of comparisons is bounded."""
    monkeypatch.setattr(problems, "COMPARISONS_MAX", 3)
    found = Problems()
    assert found.hint("severty", KNOWN) == "; did you mean 'severity'?"
    assert found.hint("severty", KNOWN, otherwise="see the page") == "; see the page"


def test_lines_begin_as_a_compiler_s() -> None:
    """A line is place, level, message; under strict a warning is an error."""
    found = Problems()
    found.warn(AT, "odd")
    assert [one.line for one in found.settle(strict=False)] == ["c.yaml:3:5: warning: odd"]
    with pytest.raises(ContractError) as caught:
        found.settle(strict=True)
    assert caught.value.problems == ["c.yaml:3:5: error: odd"]
