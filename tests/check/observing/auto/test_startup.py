"""The start-up module: it waits for torch, runs the user's own, and never breaks a script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from entrenar_py.check.observing import FOLDER
from entrenar_py.check.observing.auto import SETTINGS, STARTUP, Settings
from entrenar_py.check.rank_files import notes


class Home:
    """A folder on the path of a Python that is started with the start-up module."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path / "own", path / "run"
        self.path.mkdir()
        self.folder.mkdir()
        (self.folder / notes.ASKED).touch()

    def has(self, name: str, text: str) -> None:
        """Put a module there."""
        file = self.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)

    def run(self, code: str, *options: str) -> str:
        """Return what Python prints, to standard error as well."""
        environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        environment |= Settings(steps=2).variables({"PYTHONPATH": str(self.path)})
        ended = subprocess.run(
            [sys.executable, *options, "-c", code],
            env={**environment, FOLDER: str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        return ended.stdout


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_a_script_without_torch_pays_nothing(home: Home) -> None:
    """Nothing of this package is imported, and the mark tells that the module was run."""
    heavy = "[name for name in sys.modules if name.startswith(('entrenar_py', 'json', 'pathlib'))]"
    assert home.run(f"import sys; print({heavy})") == "[]\n"
    assert "no process stepped a torch optimizer" in notes.why_nothing(home.folder)


def test_the_users_own_is_run(home: Home) -> None:
    """A `sitecustomize` of the user's own runs, under its own name."""
    home.has("sitecustomize.py", "import sys; sys.mark = __name__, __file__")
    expected = ("sitecustomize", str(home.path / "sitecustomize.py"))
    assert home.run("import sys; print(sys.mark)") == f"{expected}\n"


def test_an_error_of_the_users_own_is_told_as_ever(home: Home) -> None:
    """Python tells of an error in a `sitecustomize`, and runs the script."""
    home.has("sitecustomize.py", "raise ValueError('of mine')")
    printed = home.run("print('ran')")
    assert "ValueError: of mine" in printed
    assert printed.endswith("ran\n")


def test_a_python_without_this_package(home: Home) -> None:
    """The script runs with its own torch, and the harness is told what to install, and where."""
    home.has("torch/__init__.py", "kind = 'own'")
    home.has("entrenar_py/__init__.py", "raise ImportError('not here')")
    assert home.run("import torch; print(torch.kind, torch.__spec__.name)") == "own torch\n"
    why = notes.why_nothing(home.folder)
    assert f"{sys.executable} (Python 3.{sys.version_info.minor}) can't import entrenar_py" in why
    assert "install entrenar-py there" in why


def test_a_torch_that_was_looked_for_before(home: Home) -> None:
    """Libraries ask whether torch is installed, without importing it, and more than once."""
    home.has("torch/__init__.py", "")
    home.has("entrenar_py/__init__.py", "raise ImportError('not here')")
    look = "import importlib.util as u; u.find_spec('torch'); spec = u.find_spec('torch')"
    home.run(f"{look}; import torch; assert type(torch.__loader__) is type(spec.loader)")
    assert "can't import entrenar_py" in notes.why_nothing(home.folder)


def test_a_torch_whose_first_import_fails(home: Home) -> None:
    """A second import of a module that raised the first time is followed, too."""
    home.has("torch/__init__.py", "import sys; sys.argv.append(0); assert len(sys.argv) > 2")
    home.has("entrenar_py/__init__.py", "raise ImportError('not here')")
    home.run("try: import torch\nexcept AssertionError: import torch")
    assert "can't import entrenar_py" in notes.why_nothing(home.folder)


def test_a_torch_that_is_missing(home: Home) -> None:
    """A script that tries to import torch gets Python's own error."""
    code = "\n".join(
        (
            "import sys",
            "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]",
            "try: import torch",
            "except ImportError as error: print(error)",
        )
    )
    assert home.run(code) == "No module named 'torch'\n"


def test_an_interpreter_that_ignores_the_path(home: Home) -> None:
    """With -E nothing is run at start, and the reason says so."""
    assert home.run("print(1)", "-E") == "1\n"
    assert "ignores PYTHONPATH" in notes.why_nothing(home.folder)


def test_names_are_the_same_in_both_places() -> None:
    """The start-up module can't import the names of files and variables, and repeats them."""
    text = (STARTUP / "sitecustomize.py").read_text()
    for name in (FOLDER, SETTINGS, notes.LOADED):
        assert f'"{name}"' in text
    assert notes.PROBLEMS.replace("*", "%d") in text
