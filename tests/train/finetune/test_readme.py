"""The README's three commands train as well as it says.

The one that trains is started as a user does, in processes of its own. The others run in this
process, which has loaded what they need.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.train.service import exit_codes
from tests.train.finetune import runs

ROOT = Path(__file__).parents[3]
SECTION = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Fine-tuning\n")[2]


@pytest.mark.integrations  # a minute; other tests train as shortly as they can
@pytest.mark.usefixtures("small")  # skips without the extra
def test_three_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recall and precision are what the page says, and a command that destroys is `unsafe`."""
    shutil.copytree(ROOT / "examples" / "finetune", tmp_path / "examples" / "finetune")
    block = re.search(r"^```\n(.*?)^```$", SECTION, flags=re.MULTILINE | re.DOTALL)
    assert block is not None
    make, train, ask = map(shlex.split, block[1].splitlines())
    assert (make[0], train[0], ask[0]) == ("python", "entrenar", "entrenar")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", make[1:])
    runpy.run_path(make[1], run_name="__main__")
    trained = _started(train[1:])
    capsys.readouterr()
    assert cli.main(ask[1:]) == exit_codes.DONE
    answer = capsys.readouterr().out.splitlines()
    stated = re.search(r"recall and precision are at least (\d\.\d+)", " ".join(SECTION.split()))
    scored = re.search(r"unsafe: recall (\S+) \(\d+ of 26\), precision (\S+),", trained)
    assert stated is not None
    assert scored is not None, trained
    assert min(map(float, scored.groups())) >= float(stated[1])
    assert answer[0].startswith("unsafe ")
    assert {tuple(step["workers"]) for step in runs.told(tmp_path / "out", "step")} == {(0, 1)}


def _started(arguments: list[str]) -> str:
    """Run `entrenar` with `arguments` in a process of its own; return its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "entrenar_py.entrenar", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
