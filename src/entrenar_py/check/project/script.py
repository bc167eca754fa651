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
_LOADS = ("load", "load_checkpoint", "load_state", "load_state_dict")
# Names by which scripts notice a value that is not finite: functions, arguments, classes.
_FINITE = ("isfinite", "isnan", "isinf", "error_if_nonfinite", "GradScaler", "TerminateOnNaN")


@dataclass(frozen=True, kw_only=True)
class Script:
    """Facts of a script: `options` are the long options that it declares to argparse or click.

    `is_observed` tells whether it calls `entrenar_py.observe`, `saves` and `loads` whether it saves
    or loads anything, `minds_nan` whether it may notice a value that is not finite.
    """

    options: tuple[str, ...]
    is_observed: bool
    saves: bool
    loads: bool
    minds_nan: bool


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
        loads=any(_name(call.func) in _LOADS for call in calls),
        minds_nan=any(_said(node) in _FINITE for node in ast.walk(tree)),
    )


def without_a_test_for_nan(path: Path) -> str:
    """Return what a script that never tests for NaN has to expect and can add; "" if it may test.

    A script that can't be read may.
    """
    script = read(path)
    if script is None or script.minds_nan:
        return ""
    return (
        f"{path.name} shows no test for NaN, so F-DP-003 is likely to be falsified, as with most "
        "scripts: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, "
        "error_if_nonfinite=True) before optimizer.step() is one"
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


def _said(node: ast.AST) -> str | None:
    """Return the name that a node says: of a variable, an attribute, or an argument."""
    if isinstance(node, ast.keyword):
        return node.arg
    return _name(node) if isinstance(node, ast.expr) else None


def _name(function: ast.expr) -> str:
    """Return the last part of a called function's name."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
