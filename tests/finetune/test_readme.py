"""The README's three commands train as well as it says, each in a process as a user starts it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.finetune import runs

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Fine-tuning\n")[2]
PROGRAMS = {
    "python": [sys.executable],
    "entrenar": [sys.executable, "-m", "entrenar_py.service.cli"],
}


def run(command: str, folder: Path) -> str:
    """Run a line of the README in `folder`; return its standard output."""
    program, *arguments = shlex.split(command)
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*PROGRAMS[program], *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("small")  # skips without the extra
def test_three_commands(tmp_path: Path) -> None:
    """Recall and precision are what the page says, and a command that destroys is `unsafe`."""
    shutil.copytree(ROOT / "examples" / "finetune", tmp_path / "examples" / "finetune")
    block = re.search(r"^```\n(.*?)^```$", SECTION, flags=re.MULTILINE | re.DOTALL)
    assert block is not None
    make, train, ask = block[1].splitlines()
    run(make, tmp_path)
    trained = run(train, tmp_path)
    answer = run(ask, tmp_path).splitlines()
    stated = re.search(r"recall and precision are at least (\d\.\d+)", " ".join(SECTION.split()))
    scored = re.search(r"unsafe: recall (\S+) \(\d+ of 26\), precision (\S+),", trained)
    assert stated is not None
    assert scored is not None, trained
    assert min(map(float, scored.groups())) >= float(stated[1])
    assert answer[0].startswith("unsafe ")
    assert {tuple(step["workers"]) for step in runs.told(tmp_path / "out", "step")} == {(0, 1)}
