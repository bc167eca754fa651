"""Read a training script without running it: its options, and whether it calls `observe`.

Options that a library adds, or whose names are built at run time, are not found.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BYTES_MAX = 2**22
_OBSERVES = ("observe", "ObserveCallback")  # of entrenar_py, and of its integrations

_SAVES = ("save", "save_checkpoint", "save_state")


@dataclass(frozen=True, kw_only=True)
class Script:
    """Facts of a script: `options` are the long options that it declares to argparse or click.

    `is_observed` tells whether it calls `entrenar_py.observe`, `saves` whether it saves anything.
    """

    options: tuple[str, ...]
    is_observed: bool
    saves: bool


def read(path: Path) -> Script | None:
    """Return the facts of the script at `path`; None if it can't be read as Python."""
    try:
        if not path.is_file() or path.stat().st_size > BYTES_MAX:
            return None
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = {alias.name for node in ast.walk(tree) for alias in _imported(node)}
    brought = any(name.partition(".")[0] == "entrenar_py" for name in named)
    observed = brought and any(_name(call.func) in _OBSERVES for call in calls)
    return Script(
        options=tuple(dict.fromkeys(_options(calls))),
        is_observed=observed,
        saves=any(_name(call.func) in _SAVES for call in calls),
    )


def _imported(node: ast.AST) -> list[ast.alias]:
    if isinstance(node, ast.ImportFrom):
        return [ast.alias(name=node.module or "")]
    return node.names if isinstance(node, ast.Import) else []


def _options(calls: list[ast.Call]) -> Iterator[str]:
    for call in calls:
        if _name(call.func) in ("add_argument", "option"):
            for argument in call.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    for name in argument.value.split("/"):  # click: --shout/--no-shout
                        if name.startswith("--") and len(name) > 2:
                            yield name


def _name(function: ast.expr) -> str:
    """Return the last part of a called function's name."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
