"""`tests.english` finds what docs/contributing.md forbids, and leaves alone what it allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import english

LONG = "def f(xs):\n    one = xs[0]\n    a = 1\n    b = 2\n    return one, a, b\n"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.py", LONG, "name one: it lives for 4 lines"),
        ("a.py", "def f(given):\n\n\n    return given\n", "name given: it lives for 4 lines"),
        ("a.py", '"""The rank whose weights differ."""\n', "phrase 'whose'"),
        ("a.py", "x = 1  # compared beside the other\n", "phrase 'beside'"),
        ("a.py", 'raise ValueError("it is there already")\n', "phrase 'is there already'"),
        ("asked.py", "", "module asked"),
        ("held.py", "", "module held"),
    ],
)
def test_it_finds(name: str, text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    ((_, problem),) = english.problems(path)
    assert words in problem


@pytest.mark.parametrize(
    "text",
    [
        "def f(xs):\n    one = xs[0]\n    return one\n",
        "def f(xs):\n    return [one for one in xs]\n",
        "class Trace:\n    found: int = 0\n",  # a field says what it is by its class
        '"""The rank that died."""\n',
    ],
)
def test_it_leaves_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.py"
    path.write_text(text)
    assert list(english.problems(path)) == []


def test_a_problem_fails_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "told.py").write_text("")
    assert english.main([str(tmp_path)]) == 1
    assert "told.py:1: module told" in capsys.readouterr().out
