"""What a message advises to install can be installed, as it stands there."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from entrenar_py.shared import shipped

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
ADVICE = re.compile(r"extras\.advice\(['\"](\w+)['\"]\)")
OF_THIS_PACKAGE = re.compile(r"pip install [^\n`]*\bentrenar[-_]py\[")
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_advice_is_what_the_project_requires() -> None:
    """Each message names an extra that there is, and the command installs all of it."""
    named = {extra for path in SOURCES for extra in ADVICE.findall(path.read_text("utf-8"))}
    assert named == {"finetune", "integrations", "tensorboard", "wgpu"}
    for extra in named:
        pip, install, *words = shlex.split(shipped.extra_advice(extra))
        assert (pip, install) == ("pip", "install")
        required = PROJECT["optional-dependencies"][extra]
        assert sorted(map(str, map(Requirement, words))) == sorted(
            map(str, map(Requirement, required))
        )


def test_nobody_is_sent_to_an_index_for_this_package() -> None:
    """It is on none; in its checkout `.[extra]` installs an extra."""
    pages = [ROOT / "README.md", ROOT / "action.yml", *(ROOT / "docs").rglob("*.md")]
    for path in (*SOURCES, *pages):
        assert not OF_THIS_PACKAGE.search(path.read_text("utf-8")), path


def test_without_metadata_the_checkout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert shipped.extra_advice("wgpu") == "pip install '.[wgpu]' in the checkout"
