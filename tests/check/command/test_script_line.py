"""Whether a command's script calls `observe`, so that `--auto` isn't needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrenar_py.check.command import launch, script_line

LINE = "import entrenar_py\nobs = entrenar_py.observe(model, optimizer)\n"


@pytest.mark.parametrize(
    ("files", "command", "has_line"),
    [
        ({"train.py": LINE}, "torchrun --nproc_per_node=2 train.py", True),
        ({"train.py": "import torch\n", "other.py": LINE}, "torchrun train.py", False),
        ({"train.py": "import engine\n", "engine.py": LINE}, "torchrun train.py", True),
        ({"train.py": "from lib import engine\n", "lib/engine.py": LINE}, "python train.py", True),
        ({"lib/train.py": LINE}, "torchrun -m lib.train", True),
        ({"run.sh": "torchrun lib/train.py", "lib/train.py": LINE}, "bash run.sh", True),
        ({"run.sh": "torchrun train.py", ".venv/lib/train.py": LINE}, "bash run.sh", False),
        ({"train.py": "import entrenar_py.canonical\n"}, "torchrun train.py", False),
        ({"train.py": LINE + "print 1"}, "torchrun train.py", False),
    ],
)
def test_the_script_and_its_own_modules_are_read(
    tmp_path: Path, files: dict[str, str], command: str, has_line: bool
) -> None:
    """Of an unknown script all files of the folder are read. Nothing is executed."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    assert script_line.is_in(command.split(), tmp_path) is has_line


def test_a_program_next_to_this_python_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment that was not activated has its own torchrun. PATH takes precedence."""
    for folder in ("bin", "path"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "torchrun").touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin/python"))
    monkeypatch.setenv("PATH", os.devnull)
    near = str(tmp_path / "bin/torchrun")
    assert launch.found(("torchrun", "train.py"), tmp_path) == (near, "train.py")
    assert launch.found(("accelerate", "launch"), tmp_path) == ("accelerate", "launch")
    assert launch.found(("./torchrun",), tmp_path) == ("./torchrun",)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert launch.found(("torchrun", "train.py"), tmp_path) == ("torchrun", "train.py")
