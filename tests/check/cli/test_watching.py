"""The command `entrenar watch`: it becomes the command, with the start-up module on its path."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.check.observing.auto import STARTUP, Settings
from entrenar_py.train.service import exit_codes


def test_it_becomes_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command gets its own arguments, and the environment that has ranks watched."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(os, "execve", lambda *given: calls.append(given))
    contract = ["--contract", "training-integrity-v1.yaml"]
    cli.main(["watch", "--every", "7", *contract, "--", sys.executable, "train.py", "--", "-x"])
    ((program, words, environment),) = calls
    assert program == sys.executable
    assert words == [sys.executable, "train.py", "--", "-x"]
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(STARTUP)
    settings = Settings.of(environment)
    assert (settings.every, settings.steps) == (7, None)
    assert Path(settings.contract or "").name == "training-integrity-v1.yaml"


def test_variables_before_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell allows them there, and so does every other command that gets one."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(os, "execve", lambda *given: calls.append(given))
    cli.main(["watch", "--", "SEED=1", sys.executable, "train.py"])
    ((program, words, _),) = calls
    assert Path(program).name == "env"
    assert words == ["env", "SEED=1", sys.executable, "train.py"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "no command after --"),
        (["--every", "2", "--"], "no command after --"),
        (["--", "no-such-program"], "there is no such program"),
        (["--every", "0", "--", "ls"], "use a whole number from 1"),
        (["--contract", "wire-protocol-v1.yaml", "--", "ls"], "no clause that can be watched"),
    ],
)
def test_what_is_invalid(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid call starts nothing, and says what to do."""
    assert cli.main(["watch", *words]) == exit_codes.INVALID
    assert problem in capsys.readouterr().err
