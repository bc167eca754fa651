"""Statements of a file by line."""

from __future__ import annotations

from entrenar_py.check.observing import statements

TEXT = """\
import os

@decorated
def f(a):
    return [
        g(b) for b in a
    ]

for x in os.listdir(
    folder
):
    seed = int(os.environ["PORT"])
"""


def test_a_statement_has_its_lines_and_names() -> None:
    """A compound statement ends where its body begins, and its body isn't part of it."""
    of_line = statements.by_line(TEXT)
    returned, loop = of_line[6], of_line[10]
    assert (returned.first, returned.last, returned.is_loop) == (5, 7, False)
    assert set(returned.names) == {"a", "b", "g"}
    assert (loop.first, loop.last, loop.is_loop) == (9, 11, True)
    assert set(loop.names) == {"x", "os", "folder"}
    assert loop.words == {"listdir"}
    assert of_line[12].words == {"int", "environ"}
    assert of_line[4].names == ("decorated",)


def test_a_file_that_is_not_python_has_none() -> None:
    """It may be a notebook's cell, or of a newer version."""
    assert not statements.by_line("def (")
