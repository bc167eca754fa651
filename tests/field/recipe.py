"""Recipes: how a training script of others is checked, and an explanation of each verdict.

To add one:

1. Write `Recipe(...)` into a module of `tests/field/recipes/`, in its tuple `RECIPES`. There is no
   list of modules. Give `repository`, `commit` and `folder` (only this folder is checked out); or a
   `driver` of `tests/field/drivers/` for a library, and the library in `needs`.
2. `data` makes data in the real format, tiny. It is called with the folder in which the command
   runs. What it needs besides Python and torch is imported inside of it and named in `needs`.
3. Give a `Trial` for `--auto` and one for the line, as small as the script's own options allow.
   `edits` that don't find their line are an error.
4. `python -m tests.field.run NAME --clones DIR --keep DIR` prints each verdict that no `Expected`
   explains. Find out why it is so, then explain it by `defect`, `default`, `by_design`,
   `undeclared` or `limit`: `because` for readers who know torch but not this project, `words` from
   the reason. A defect or default needs a `reproduction` of at most thirty lines in
   `tests/field/reproductions/`. It runs in the script's folder, without the harness, prints what it
   saw and exits 0 if that is the defect.
5. `--record` writes the results, and `python -m docs.field_page` the page. After a conflict in
   docs/field.md run the latter again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent
LANGUAGE_MODEL = "language-model-v1.yaml"


class Kind(StrEnum):
    """Whose doing a verdict is."""

    DEFECT = "defect"  # the script does what nobody wants
    DEFAULT = "default"  # the script or library does as documented, and the contract asks for more
    PROPERTY = "property"  # a design to which the comparison of the clause does not apply
    UNDECLARED = "not declared"  # a declaration or option of the command would settle it
    LIMIT = "limit of the tool"  # nothing that a user can say would settle it


@dataclass(frozen=True)
class Edit:
    """A change of one line of theirs: what is added after it, or stands in its place.

    The line is compared without indentation and must be there once. What is added is indented as
    it is, on top of its own indentation.
    """

    file: str
    line: str
    add: str = ""
    instead: str = ""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A verdict that is not "held", and why it is right."""

    clause: str
    verdict: Literal["falsified", "inconclusive", "advice"]
    kind: Kind
    words: str  # part of the reason that is reported
    because: str
    reproduction: str = ""  # file name
    known: str = ""  # https://... of the thread in which others report it


# A script's doing is falsified as a rule, and what can't be compared is inconclusive.
defect = partial(Expected, kind=Kind.DEFECT, verdict="falsified")
default = partial(Expected, kind=Kind.DEFAULT, verdict="falsified")
by_design = partial(Expected, kind=Kind.PROPERTY, verdict="inconclusive")
undeclared = partial(Expected, kind=Kind.UNDECLARED, verdict="inconclusive")
limit = partial(Expected, kind=Kind.LIMIT, verdict="inconclusive")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One call of entrenar-check. Clauses that `expected` leaves out must be held, or
    not be applied."""

    name: str  # "auto" or "line", and what tells it from others
    command: tuple[str, ...]
    expected: tuple[Expected, ...]
    edits: tuple[Edit, ...] = ()
    options: tuple[str, ...] = ()  # of entrenar-check
    configuration: str = ""  # text of its entrenar-check.toml
    contracts: tuple[str, ...] = ()  # those that are named; none: as a plain call judges
    gpus: int = 0  # 0: runs on the CPU, and sees no GPU

    @property
    def auto(self) -> bool:
        """Whether the script is checked without a line."""
        return self.name.startswith("auto")

    @property
    def hardware(self) -> str:
        """The kind of machine, as in the names of results."""
        return f"cuda{self.gpus}" if self.gpus else "cpu"


def of_tokens(trial: Trial, *expected: Expected, what: str = "") -> Trial:
    """Return `trial` judged by the contract of language models alone: of `what`, if it says so."""
    name = f"{trial.name}{what and f', {what}'}, language model"
    changes: dict[str, Any] = {"name": name, "contracts": (LANGUAGE_MODEL,), "expected": expected}
    return replace(trial, **changes)


def on_gpus(trial: Trial, num_gpus: int, **changes: Any) -> Trial:
    """Return `trial` on GPUs, where the script runs as it is published: without edits."""
    name = f"{trial.name} on {num_gpus} GPUs"
    return replace(trial, **{"name": name, "gpus": num_gpus, "edits": (), **changes})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A script that is checked, where it comes from, and how."""

    name: str
    title: str
    trials: tuple[Trial, ...]
    repository: str = ""  # owner/name on GitHub
    commit: str = ""
    folder: str = "."
    paths: tuple[str, ...] = ()  # what is checked out, if not the whole folder
    driver: str = ""  # file name
    needs: tuple[str, ...] = ()  # distributions on PyPI, besides torch
    data: Callable[[Path], None] = lambda _: None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The page of the script at its commit, or an empty text."""
        place = "" if self.folder == "." else f"/{self.folder}"
        home = f"https://github.com/{self.repository}/tree/{self.commit}{place}"
        return home if self.repository else ""


def result_path(recipe: Recipe, hardware: str) -> Path:
    """Return the file with the results of a recipe on a kind of machine."""
    return HERE / "results" / f"{recipe.name}.{hardware}.json"
