"""The reference of the command line, as Markdown: what docs/cli.md holds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from entrenar_py.check.cli import anatomy
from entrenar_py.check.project.command_line import EPILOG, MODES, PROG, build, flag


def reference() -> str:
    """Return the page."""
    codes, _, examples = EPILOG.partition("\n\nexamples:\n")
    parts = [
        f"# `{PROG}`",
        f"`{PROG} [--contract FILE] [options] [-- COMMAND ...]`, `{PROG} init [-- COMMAND ...]`, "
        f"`{PROG} anatomy [options] -- COMMAND ...`, "
        f"`{PROG} diff [options] A B` ([why two runs differ](diff.md))",
        "Generated from `entrenar_py.check.project.command_line`; a test says whether this page is "
        "current. "
        "Options that are left out are read from the project's [configuration](configuration.md).",
    ]
    for group in build()._action_groups:
        rows = [_row(action) for action in group._group_actions if action.dest != "help"]
        if rows:
            parts += [f"## {(group.title or '').capitalize()}", _table("option", rows)]
    own = [*map(_row, anatomy.build()._actions[1:])]
    parts += ["## Of [`anatomy`](anatomy.md)", _table("option", own)]
    meant = [
        (
            "`-- COMMAND`" if mode == "command" else f"`--{mode}`",
            ", ".join(map(_option, MODES[mode])),
        )
        for mode in MODES
    ]
    parts += [
        "## Options that go together",
        "Any other option has no effect with these and is refused, with exit code 2.",
        _table("with", meant),
        "## Exit codes",
        "The same whatever the output format.",
        _table("code", [line.strip().split("  ", 1) for line in codes.splitlines()[1:]]),
        "## Examples",
        "\n".join(["```", *(line.strip() for line in examples.splitlines()), "```"]),
    ]
    return "\n\n".join(parts) + "\n"


def _row(action: argparse.Action) -> tuple[str, str]:
    metavar = f" {action.metavar}" if action.metavar else ""
    metavar += f" [{action.metavar} ...]" if action.nargs == "+" else ""
    return ", ".join(f"`{name}{metavar}`" for name in action.option_strings), action.help or ""


def _option(name: str) -> str:
    return f"`{flag(name)}`"


def _table(title: str, rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {title} | meaning |", "|---|---|"]
    return "\n".join([*lines, *(f"| {left} | {right} |" for left, right in rows)])
