"""The tutorial and the first look, followed by their text: files, changes, commands, output."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.check.command import runs, warm
from tests.check.command import zygote
from tests.command_line import check

ROOT = Path(__file__).parents[2]
PAGE, FIRST_LOOK = (
    (ROOT / f"docs/{name}.md").read_text("utf-8") for name in ("tutorial", "first-look")
)
BLOCK = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FORKED = ROOT / "tests/check/command/forked.py"
# What differs between machines: decimals and counts, but not steps, ranks and ids.
VARIES = re.compile(r"(?<![\w=-])(?<!rank )(?<!step )(?<!exit code )-?\d[\d.,+]*")
ABORTED = "terminate called without an active exception"
EXIT_CODES = re.compile(r"The exit code is (\d)")


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start in an empty folder; fork the ranks that torchrun would start, which is quicker.

    They are forked from the process of all tests, so no command prepares one of its own.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    activated = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", activated)
    monkeypatch.setattr(warm.Parents, "prepare", lambda *_: None)
    record = runs.record
    monkeypatch.setattr(
        runs, "record", lambda plan, show: record(replace(plan, launch=_launch), show)
    )


def test_the_tutorial_can_be_followed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each block does what the page says, and prints the shown lines. The first command starts
    torchrun. `--last-failed` runs what was falsified.
    """
    codes = _follow(PAGE, capsys)
    told = [int(code) for code in EXIT_CODES.findall(PAGE)]
    assert codes == [0, told[0], 0, 0, told[1]] == [0, 1, 0, 0, 0]


def test_a_first_look_shows_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """A script in a style of its own is inconclusive first, and exits 0 in the end."""
    codes = _follow(FIRST_LOOK, capsys)
    told = [int(code) for code in EXIT_CODES.findall(FIRST_LOOK)]
    assert codes == [told[0], 0, told[1]] == [4, 0, 0], "first look, init, second look"


def _follow(page: str, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """Do what each block of a page says; return the exit codes of its commands."""
    codes = []
    for info, text in BLOCK.findall(page):
        if info.startswith("python title="):
            Path(info.partition("=")[2].strip('"')).write_text(text, "utf-8")
        elif info == "diff":
            _change(Path("train.py"), text)
        elif info == "console":
            command, *shown = text.removeprefix("$ ").splitlines()
            codes.append(_run(shlex.split(command)))
            _compare(shown, capsys.readouterr().out.splitlines())
    return codes


def test_the_install_commands_are_the_tested_ones() -> None:
    """tests/test_wheel.py installs the package into a fresh environment, as the page says."""
    assert [text for info, text in BLOCK.findall(PAGE) if not info] == [
        "python3 -m venv .venv && source .venv/bin/activate\npip install ~/entrenar-py\n"
    ]


def _run(command: Sequence[str]) -> int:
    """Return the exit code of `command`; 0 if torch aborts when the script is over.

    It sometimes does while the interpreter takes down gloo's threads. What was printed decides.
    """
    if command[0] == "entrenar-check":
        return check(*command[1:])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    print(done.stderr, file=sys.stderr)
    return 0 if ABORTED in done.stderr else done.returncode


def _launch(command: Sequence[str], **told: Any) -> Any:
    """Fork the ranks that `torchrun --standalone --nproc_per_node=N SCRIPT` starts."""
    launcher, standalone, number, script, *options = command
    assert (launcher, standalone) == ("torchrun", "--standalone")
    world_size = number.removeprefix("--nproc_per_node=")
    launch: Callable[..., Any] = zygote.launch
    path = str(Path(script).resolve())
    return launch([sys.executable, str(FORKED), world_size, path, *options], **told)


def _change(path: Path, diff: str) -> None:
    """Replace in the file the lines of `diff` without `+` by those without `-`."""
    before, after = (
        "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith(other))
        for other in "+-"
    )
    text = path.read_text("utf-8")
    assert text.count(before) == 1, f"{before!r} stands once in the file"
    path.write_text(text.replace(before, after), "utf-8")


def _compare(shown: Sequence[str], printed: Sequence[str]) -> None:
    """Check that the shown lines are in the output, in this order; `...` stands for any lines."""
    left = iter(map(_essence, printed))
    for line in shown:
        if line not in ("", "..."):
            found = any(one.startswith(_essence(line)) for one in left)
            assert found, f"{line!r} is not in {printed}"


def _essence(line: str) -> str:
    return " ".join(VARIES.sub("", line).split())
