"""What several tests of an observed script need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from entrenar_py.check.observing import FOLDER, call_sites


@pytest.fixture(autouse=True, scope="module")
def _another_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Work in an empty folder: modules below the current one would be read as the script's.

    In the repository these are all tests that the process has loaded, a second for each run.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path_factory.mktemp("script"))
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that a rank records to."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Make a text that of the only module of the script, and return that module, not yet run."""

    def write(text: str) -> ModuleType:
        file = tmp_path / "selected.py"
        file.write_text(text)
        module = ModuleType("selected")
        module.__file__ = str(file)
        own = call_sites.is_own
        monkeypatch.setattr(call_sites, "is_own", lambda name: name == str(file) and own(name))
        monkeypatch.setitem(sys.modules, "selected", module)
        monkeypatch.chdir(tmp_path)
        return module

    return write
