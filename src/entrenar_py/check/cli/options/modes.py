"""Checks combinations of options: an option that would have no effect is refused."""

from __future__ import annotations

import argparse

from entrenar_py.check.cli.options import parser
from entrenar_py.check.cli.options.outputs import FILES
from entrenar_py.shared.errors import UsageError

# Only with a user's command behind --.
COMMANDED = ("steps", "epochs", "deadline", "auto", "in_place", "launcher")
_RULES = ("rule", "suppress")  # only with --validate
# Option that has an effect only in one mode -> description of that mode.
_ALONE = {
    **dict.fromkeys(COMMANDED, "a command behind --"),
    **dict.fromkeys(_RULES, "--validate"),
}

_CONTRACT = ("contract", "bind", "strict", "no_color")
_CONFIGURED = ("config", "no_config")
_SELECTION = ("only", "exclude", "severity")
_REPORT = (*FILES, "github", "allow_inconclusive", "quiet", "verbose")
_VARIATION = ("system", "world_size", "backend", "seed")

# Mode, which replaces the search for counterexamples -> its options; all others are refused.
# Without a mode every option is allowed but those in _ALONE.
MODES: dict[str, tuple[str, ...]] = {
    "list": (*_CONTRACT, *_CONFIGURED, *_SELECTION),
    "validate": (*_CONTRACT, "json", "sarif", "github", *_CONFIGURED, *_RULES),
    "suggest": (*_CONTRACT, *_CONFIGURED),
    "judge": (*_CONTRACT, *_CONFIGURED, *_SELECTION, *_VARIATION, *_REPORT),
    "replay": (*_CONTRACT, "trace_dir", *_CONFIGURED, *_REPORT),
    "mutants": ("no_color",),
    "command": (
        *(*_CONTRACT, "world_size", "seed", *COMMANDED, "trace_dir"),
        *(*_CONFIGURED, *_SELECTION, *_REPORT),
    ),
}


def require_compatible(options: argparse.Namespace, *, mode: str = "") -> None:
    """Raise UsageError if an option that was typed has no effect with the other options.

    `mode` describes `options.mode` in messages, if it was set by something other than an option.
    """
    for action in parser.build()._actions:
        name, option = action.dest, action.option_strings[0]
        if name not in options.typed:
            continue
        if options.mode is None:
            if name in _ALONE:
                raise UsageError(f"{option} has an effect only with {_ALONE[name]}; leave it out")
        elif name not in (options.mode, *MODES[options.mode]):
            beside = mode or _described(options.mode)
            raise UsageError(f"{option} has no effect with {beside}; leave it out")
    if options.command and options.mode != "command":
        raise UsageError(f"a command behind -- has no effect with --{options.mode}; leave it out")


def _described(mode: str) -> str:
    return "a command behind --" if mode == "command" else f"--{mode}"
