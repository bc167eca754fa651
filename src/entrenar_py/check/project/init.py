"""`entrenar-check init`: write a configuration, and report what was guessed and must be checked."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from entrenar_py.check.cli.options.parser import PROG, Parser
from entrenar_py.check.cli.options.typed import split
from entrenar_py.check.project import guessing, location
from entrenar_py.check.project.guessing import Guess
from entrenar_py.shared import shipped
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import printing

NAME = "init"
CONTRACT, INTEGRITY = shipped.FOR_SCRIPTS
STEPS = 8
DEADLINE_S = 300
_LINE_CHARS_MAX = 100
_PLAIN = re.compile(r"[\w@%+=:,./{}-]+", re.ASCII)


def run(arguments: Sequence[str]) -> int:
    """Write the configuration of the current folder and return 0; raises UsageError if it can't."""
    cli = _parser()
    own, command = split(arguments, cli)
    given = cli.parse_args(own)
    folder = Path.cwd()
    path, before = _file(folder)
    guess = guessing.guess(command, folder) if command else None
    chosen = tuple(given.contract or shipped.FOR_SCRIPTS)
    for contract in chosen:
        shipped.contract_path(contract)
    lines = _lines(guess, chosen)
    header = [f"[tool.{location.TABLE}]"] if path.name == location.SHARED else []
    _append(path, before, [*header, *lines])
    _tell(path, guess)
    return 0


def _parser() -> argparse.ArgumentParser:
    cli = Parser(
        prog=f"{PROG} {NAME}",
        usage="%(prog)s [--contract FILE] [-- COMMAND ...]",
        description="Writes the configuration of this folder: into pyproject.toml, if there is "
        f"one, else {location.OWN}. COMMAND is what trains, as it is run today; without it the "
        "reference trainers are configured.",
        allow_abbrev=False,
    )
    cli.add_argument(
        "--contract",
        metavar="FILE",
        action="append",
        help=f"a contract to check, instead of {CONTRACT} and {INTEGRITY}; may be given several "
        "times",
    )
    return cli


def _file(folder: Path) -> tuple[Path, str | None]:
    """Return the path to write to and its text so far; raises UsageError if already configured."""
    for name in (location.OWN, location.SHARED):
        path = folder / name
        if not path.exists():
            continue
        text = location.read(path)
        try:
            tools = location.parse(text).get("tool", {})
        except ValueError as error:
            raise UsageError(f"{name} is not valid TOML ({error}); correct it first") from error
        if name == location.OWN or (isinstance(tools, dict) and location.TABLE in tools):
            raise UsageError(
                f"{name} configures entrenar-check already; edit it, or remove what is there first "
                "(nothing was written)"
            )
        return path, text
    return folder / location.OWN, None


def _lines(guess: Guess | None, chosen: Sequence[str]) -> list[str]:
    """Return the lines of the keys, with a comment where a reader needs one."""
    lines = [
        f"# Written by `{PROG} {NAME}`; all keys: docs/configuration.md of entrenar-py.",
        f"contract = {_toml(list(chosen) if len(chosen) > 1 else chosen[0])}",
    ]
    if guess is None:
        return lines
    lines.append(f"command = {_command(guess.command)}")
    if any("{steps}" in word for word in guess.command):
        lines.append(f"steps = {STEPS}")
    if guess.world_size is not None:
        lines.append(f"world-size = {guess.world_size}")
    lines.append(f"deadline = {DEADLINE_S}  # seconds; a run that takes longer is ended")
    return lines


def _command(words: Sequence[str]) -> str:
    """Return the TOML value of a command: one text if it is short enough, else a list of words."""
    text = _typed(words)
    if len(text) <= _LINE_CHARS_MAX:
        return _toml(text)
    return f"[\n{''.join(f'  {_toml(word)},{chr(10)}' for word in words)}]"


def _typed(words: Sequence[str]) -> str:
    """Return `words` as typed in a shell: quoted where needed, but placeholders never."""
    return " ".join(word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in words)


def _toml(value: str | list[str]) -> str:
    """Return a string or a list of strings in TOML: JSON, with the character DEL escaped, too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _append(path: Path, before: str | None, lines: Sequence[str]) -> None:
    """Append `lines` to the file with the line ends that it has; its content stays as it is."""
    end = "\r\n" if before and "\r\n" in before else "\n"
    text = end.join("\n".join(lines).split("\n")) + end
    if before:
        text = ("" if before.endswith("\n") else end) + end + text
    try:
        encoded = text.encode()
        location.parse((before or "") + text)
    except UnicodeEncodeError as error:
        raise UsageError("the command has bytes that are not UTF-8; put it in a script") from error
    except ValueError as error:  # `tool` is an inline table, say
        raise UsageError(
            f"{path.name}: a table can't be added at its end ({error}); write one into "
            f"{location.OWN} by hand (nothing was written)"
        ) from error
    try:
        with path.open("ab") as file:
            file.write(encoded)
    except OSError as error:
        problem = f"can't be written ({error.strerror}); make it writable and run this again"
        raise UsageError(f"{path.name} {problem}") from error


def _tell(path: Path, guess: Guess | None) -> None:
    """Print what was written, what was guessed, and what the author has to look at."""
    shared = path.name == location.SHARED
    printing.say(f"wrote {f'[tool.{location.TABLE}] of ' * shared}{path.name}")
    if guess is None:
        printing.say("no command was given: the reference trainers will be checked")
    else:
        printing.say(f"command: {_typed(guess.command)}", indent=2)
        for line in guess.taken:
            printing.say(f"guessed: {line}", indent=2)
        for line in guess.look:
            printing.say(f"look at: {line}", indent=2)
    printing.say(f"now run: {PROG}")
