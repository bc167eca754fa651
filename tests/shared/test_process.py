"""The process of a command: a crash in native code is told."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["entrenar_py.check.cli", "entrenar_py.entrenar"])
def test_no_crash_is_silent(command: str) -> None:
    """A command that dies of a signal has said which one, and in which line it was."""
    code = (
        f"import os, sys\nfrom {command} import main\nsys.argv[1:] = ['--no-such-option']\n"
        "main()\nos.kill(os.getpid(), 11)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -11
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert 'File "<string>", line 5' in done.stderr
