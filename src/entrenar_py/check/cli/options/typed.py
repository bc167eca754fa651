"""Parses the arguments of the command line, before those of a configuration are added."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from entrenar_py.check.cli.options import modes, parser
from entrenar_py.shared.errors import UsageError


def read(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options as typed, without checking whether they go together.

    `mode` is a name in MODES, or None. `typed` holds the names of the options that were typed.
    Raises UsageError for an unknown option and for an invalid value.
    """
    cli = parser.build()
    own_arguments, command = split(arguments, cli)
    defaults = {action.dest: action.default for action in cli._actions}
    options = cli.parse_args(own_arguments, argparse.Namespace(**dict.fromkeys(defaults)))
    options.typed = frozenset(name for name, value in vars(options).items() if value is not None)
    for name, default in defaults.items():
        if name not in options.typed:
            setattr(options, name, default)
    options.contract = tuple(dict.fromkeys(options.contract or ()))
    options.command, options.command_folder, options.knobs = command, None, {}
    options.command_changes = ()
    options.mode = next((name for name in modes.MODES if getattr(options, name)), None)
    return options


def split(
    arguments: Sequence[str], cli: argparse.ArgumentParser
) -> tuple[Sequence[str], tuple[str, ...]]:
    """Return the arguments before `--`, which `cli` parses, and the command after it.

    Raises UsageError if no command follows `--`, or if a command is there without it.
    """
    place = list(arguments).index("--") if "--" in arguments else len(arguments)
    _require_options(arguments[:place], cli)
    if place == len(arguments):
        return arguments, ()
    if place == len(arguments) - 1:
        raise UsageError(
            "no command after --; write the command that trains: -- torchrun ... my_train.py"
        )
    return arguments[:place], tuple(arguments[place + 1 :])


def _require_options(arguments: Sequence[str], cli: argparse.ArgumentParser) -> None:
    """Raise UsageError if a word is neither an option of `cli` nor an option's value.

    Nothing is said after an unknown option, since the word may be its value.
    """
    values = {name: one.nargs for one in cli._actions for name in one.option_strings}
    at = 0
    while at < len(arguments):
        name, equals, _ = arguments[at].partition("=")
        if not name.startswith("-"):
            raise UsageError(_misplaced(arguments, at, cli.prog))
        if name not in values:
            return
        at += 1
        if not equals and values[name] is None:
            at += 1
        while values[name] == "+" and at < len(arguments) and arguments[at][:1] != "-":
            at += 1


def _misplaced(arguments: Sequence[str], at: int, prog: str) -> str:
    before, word, after = arguments[:at], arguments[at], arguments[at:]
    if word.endswith((".yaml", ".yml")):
        return f"{word}: a contract is given as --contract {word}"
    meant = f"{prog} {shlex.join((*before, '--', *after))}"
    return f"{word}: the command that trains stands behind --, as in: {meant}"
