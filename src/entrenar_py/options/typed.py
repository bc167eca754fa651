"""Parses the arguments of the command line, before those of a configuration are added."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from entrenar_py.errors import UsageError
from entrenar_py.options import modes, parser


def read(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options as typed, without checking whether they go together.

    `mode` is a name in MODES, or None. `typed` holds the names of the options that were typed.
    Raises UsageError for an unknown option and for an invalid value.
    """
    cli = parser.build()
    own_arguments, command = split(arguments)
    defaults = {action.dest: action.default for action in cli._actions}
    options = cli.parse_args(own_arguments, argparse.Namespace(**dict.fromkeys(defaults)))
    options.typed = frozenset(name for name, value in vars(options).items() if value is not None)
    for name, default in defaults.items():
        if name not in options.typed:
            setattr(options, name, default)
    options.contract = tuple(dict.fromkeys(options.contract or ()))
    options.command, options.command_folder, options.knobs = command, None, {}
    options.mode = next((name for name in modes.MODES if getattr(options, name)), None)
    return options


def split(arguments: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """Return the arguments before `--` and the command after it.

    Raises UsageError if no command follows `--`.
    """
    if "--" not in arguments:
        return arguments, ()
    place = list(arguments).index("--")
    if place == len(arguments) - 1:
        raise UsageError(
            "no command after --; write the command that trains: -- torchrun ... my_train.py"
        )
    return arguments[:place], tuple(arguments[place + 1 :])
