"""`entrenar-check anatomy -- COMMAND`, end to end and its command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from entrenar_py.check import cli
from falsification.twins import HERE

SCRIPT = (HERE / "anatomy" / "alone.py").read_text("utf-8")


def call(*words: str) -> int:
    """Return the exit code of the command."""
    return cli.main(["anatomy", *words])


def test_a_step_is_shown_in_every_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script without a line is shown as text, JSON and a page; --strict exits with 1."""
    monkeypatch.chdir(tmp_path)
    broken = SCRIPT.replace("        scaler.unscale_(optimizer)\n", "")
    broken = broken.replace("torch.manual_seed(0)", "nn.Sequential.__name__ = 'Two\\nlines'", 1)
    Path("train.py").write_text(broken)
    told = ("--strict", "--steps", "3", "--json", "a.json", "--html", "a.html")
    assert call(*told, "--", sys.executable, "train.py") == 1
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 40
    assert "  x2 | train.py:22  draw 4 samples: float32 [4, 4]" in shown
    assert "? clip-scaled: train.py:29" in shown
    assert r"forward Two\nlines: train" in shown
    written = json.loads(Path("a.json").read_text())
    assert (written["steps"], written["suspects"][0]["name"]) == (3, "clip-scaled")
    assert written["lanes"]["0"][0]["times"] == 2
    assert "clip-scaled" in Path("a.html").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print(1)", "no step was seen: no process"),
        ("raise SystemExit(3)", "exit code 3"),
        (
            "import torch\n"
            "weight = torch.nn.Parameter(torch.ones(2))\n"
            "adam = torch.optim.Adam([weight])\n"
            "weight.register_post_accumulate_grad_hook(lambda _: adam.step())\n"
            "weight.sum().backward()\n",
            "no step was seen: its optimizers step within backward passes",
        ),
    ],
)
def test_a_command_without_steps_is_no_anatomy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    """A command that doesn't train, or that fails, exits with 4 and says why."""
    script = tmp_path / "train.py"
    script.write_text(text)
    assert call("--in-place", "--", sys.executable, str(script)) == 4
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "a command is missing"),
        (("--steps", "0", "--", "python"), "whole number from 1"),
        (("--json", "no/such/a.json", "--", sys.executable, "x.py"), "does not exist"),
        (("--", "no-such-program"), "no such program"),
    ],
)
def test_wrong_command_lines_are_refused(
    words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing runs, the exit code is 2, and the message names the option."""
    assert call(*words) == 2
    assert problem in capsys.readouterr().err
