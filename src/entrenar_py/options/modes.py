"""Combinations of options: one that would be accepted and ignored is refused."""

from __future__ import annotations

import argparse

from entrenar_py.errors import UsageError
from entrenar_py.options import parser
from entrenar_py.options.outputs import FILES

COMMANDED = ("steps", "deadline")  # of somebody's own command alone
_RULES = ("rule", "suppress")  # of validation alone

_CONTRACT = ("contract", "bind", "strict", "no_color")
_CONFIGURED = ("config", "no_config")
_SELECTION = ("only", "exclude", "severity")
_REPORT = (*FILES, "github", "allow_inconclusive", "quiet")
_VARIATION = ("system", "world_size", "backend", "seed")

# What runs in place of the search -> the options that mean something then; all others are refused.
# Without a mode every option counts.
MODES: dict[str, tuple[str, ...]] = {
    "list": (*_CONTRACT, *_CONFIGURED, *_SELECTION),
    "validate": (*_CONTRACT, "json", "sarif", "github", *_CONFIGURED, *_RULES),
    "suggest": (*_CONTRACT, *_CONFIGURED),
    "judge": (*_CONTRACT, *_CONFIGURED, *_SELECTION, *_VARIATION, *_REPORT),
    "replay": (*_CONTRACT, "trace_dir", *_CONFIGURED, *_REPORT),
    "mutants": ("no_color",),
    "command": (
        *(*_CONTRACT, "world_size", "seed", "steps", "deadline", "trace_dir"),
        *(*_CONFIGURED, *_SELECTION, *_REPORT),
    ),
}


def require_compatible(options: argparse.Namespace, *, mode: str = "") -> None:
    """Raise UsageError if an option that was typed means nothing beside the others.

    `mode` describes the mode of `options` in messages, where no typed option names it.
    """
    for action in parser.build()._actions if options.mode is not None else ():
        name = action.dest
        if name in options.typed and name not in (options.mode, *MODES[options.mode]):
            told = mode or _described(options.mode)
            raise UsageError(f"{action.option_strings[0]} means nothing with {told}; leave it out")
    if options.command and options.mode != "command":
        raise UsageError(f"a command behind -- means nothing with --{options.mode}; leave it out")
    for name in () if options.command else COMMANDED:
        if name in options.typed:
            raise UsageError(
                f"{parser.flag(name)} means something with a command behind -- alone; leave it out"
            )
    for name in () if options.mode == "validate" else _RULES:
        if name in options.typed:
            raise UsageError(
                f"{parser.flag(name)} means something with --validate alone; leave it out"
            )


def _described(mode: str) -> str:
    return "a command behind --" if mode == "command" else f"--{mode}"
