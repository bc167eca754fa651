"""The README shows what its commands print today."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.command_line import check

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Where the contract lies, and what differs between machines or whenever a contract or a check
# grows: counts, lines, seconds, values, digests. Ids, steps, ranks and scenarios are kept.
VARIES = re.compile(
    r"\S*(?=\bcontracts/)|\b[0-9a-f]{16}\b|(?<![\w=\[.-])(?<!rank )(?<!step )\d[\d.,+]*"
)


def _blocks() -> list[list[str]]:
    """Yield the lines of each block of commands, marked with `$`, and their output."""
    blocks = re.findall(r"^```\n(\$ .*?\n)```$", README, flags=re.MULTILINE | re.DOTALL)
    return [block.splitlines() for block in blocks]


RUN, BUG, SCALING = _blocks()


def _run(command: Sequence[str]) -> None:
    """Run `command` in this process as a shell would."""
    if command[0] == "entrenar-check":
        check(*command[1:])
        return
    spec = importlib.util.spec_from_file_location("example", ROOT / command[1])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(command[2:])


def _essence(lines: Sequence[str]) -> list[list[str]]:
    """Return the words of each line, without those that vary."""
    return [VARIES.sub("", line).split() for line in lines]


@pytest.mark.parametrize("block", [BUG, SCALING], ids=["bug", "scaling"])
def test_commands_print_what_is_shown(
    block: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The finding with its place and scenario, and the columns and last word of the table."""
    monkeypatch.chdir(tmp_path)
    commands = [line.removeprefix("$ ") for line in block if line.startswith("$ ")]
    shown = block[len(commands) :]
    for command in commands:
        _run(shlex.split(command))
    assert _essence(capsys.readouterr().out.splitlines()) == _essence(shown)


def test_the_first_screen_is_that_of_the_tutorial() -> None:
    """Its lines are lines of the tutorial, which is followed by a test of its own."""
    (first,) = re.findall(r"^```console\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    lines = iter((ROOT / "docs/tutorial.md").read_text("utf-8").splitlines())
    assert all(line in lines for line in first.splitlines()), "in this order"


def test_the_main_report_has_every_clause(capsys: pytest.CaptureFixture[str]) -> None:
    """Each clause of the contract is named, worst severity first, and all are counted as held."""
    assert check(*shlex.split(RUN[0])[2:], "--list") == 0
    clauses = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:]]
    named = [f"{id_} {name}" for id_, name, _ in sorted(clauses, key=lambda words: words[2])]
    assert RUN[2] == f"held: {', '.join(named)}"
    assert RUN[3].startswith(f"{len(named)} held: ")
    assert RUN[-2] == BUG[-2].partition("NOT PASSED: F-DP-001 falsified")[0] + "passed"
    assert RUN[-1] == f"exit 0: {len(named)} held"


def test_links_lead_somewhere() -> None:
    """Every file that is linked to exists."""
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
