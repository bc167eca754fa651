"""No input runs code: no module of the package unpickles, and no call does.

Data from sockets, pipes and files may come from anyone. (The only exception is the start of a
process, which pickles its function in the fork server's own pipe on this machine.)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import entrenar_py

SOURCE = Path(entrenar_py.__file__).parent
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
# (what it is called on, its name) -> the keyword that makes it safe, and its value.
SAFE_WITH = {
    ("torch", "load"): ("weights_only", True),
    ("np", "load"): ("allow_pickle", False),
    ("numpy", "load"): ("allow_pickle", False),
}
CALLS = {"eval", "exec", "compile", "__import__"}
# A forked rank compiles and executes the user's script, as Python does.
RUNS_SCRIPTS = "check/command/forks/interpreter.py"
YAML = {"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"}
# Connection.recv unpickles, recv_bytes does not. A socket's gives bytes; its type is named there.
PIPES = {"recv"}
SOCKETS = "socket.socket"


def unpickling(text: str) -> Iterator[str]:
    """Return each place in the source `text` that can run what it reads, as line and reason."""
    for node in ast.walk(ast.parse(text)):
        for name in _imported(node):
            if name.partition(".")[0] in MODULES:
                yield f"{node.lineno}: imports {name}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and (reason := _call(node)):
            yield f"{node.lineno}: {reason}"


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def _call(node: ast.Call) -> str | None:
    if isinstance(node.func, ast.Name):
        return f"calls {node.func.id}" if node.func.id in CALLS else None
    if not isinstance(node.func, ast.Attribute):
        return None
    name = node.func.attr
    if name not in PIPES | YAML | {safe for _, safe in SAFE_WITH}:  # seconds, for all calls
        return None
    owner = ast.unparse(node.func.value)
    if name in PIPES and owner != SOCKETS:
        return f"calls {owner}.{name}"
    if owner == "yaml" and name in YAML:
        return f"calls yaml.{name}"
    if (owner, name) not in SAFE_WITH:
        return None
    keyword, value = SAFE_WITH[owner, name]
    given = {one.arg: ast.unparse(one.value) for one in node.keywords}
    return None if given.get(keyword) == str(value) else f"calls {owner}.{name}, not {keyword}"


def test_nothing_is_unpickled() -> None:
    """No file of the package unpickles."""
    paths = sorted(SOURCE.rglob("*.py"))
    assert len(paths) > 50
    found = [
        f"{path.relative_to(SOURCE)}:{place}"
        for path in paths
        for place in unpickling(path.read_text("utf-8"))
        if path != SOURCE / RUNS_SCRIPTS or not place.endswith(("compile", "exec"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import os, marshal as m",
        "def f():\n    import dill",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "pipe.recv()",
        "self._pipe.recv()",
        "yaml.load(text, Loader)",
        "eval(text)",
    ],
)
def test_what_would_be_found(text: str) -> None:
    """Each way to unpickle is found."""
    assert list(unpickling(text))


@pytest.mark.parametrize(
    "text",
    ["torch.load(path, weights_only=True)", "pipe.recv_bytes()", "re.compile('x')", "import json"],
)
def test_what_would_not(text: str) -> None:
    """The safe alternatives are not reported."""
    assert list(unpickling(text)) == []
