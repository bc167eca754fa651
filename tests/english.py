"""Count what docs/contributing.md forbids in names and sentences; `make lint` fails above zero.

`python -m tests.english [PATH ...]` prints the place of each in these files or folders, or in all
of src. Only what can be counted is: a name that says no type, a phrase that a reader stumbles over.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Names that say nothing of what they hold. They may live for three lines.
NAMES = frozenset({"asked", "found", "given", "held", "made", "one", "told", "why", "wish"})
LINES_MAX = 3
IRREGULAR = frozenset({"begun", "drawn", "frozen", "given", "held", "kept", "made", "seen", "told"})
PHRASES = re.compile(
    r"\b(of which|of whom|whose|whom|who|beside|there is no more|(is|are) there already)\b",
    flags=re.IGNORECASE,
)
Place = tuple[int, str]


def problems(path: Path) -> Iterator[Place]:
    """Yield the line and the problem of each name and each sentence in a file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    if re.fullmatch(r"[a-z]+ed", path.stem) or path.stem in IRREGULAR:
        yield 1, f"module {path.stem}: a module is a noun of the field, not a participle"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _long_lived(node)
    yield from _sentences(text)


def _long_lived(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Iterator[Place]:
    """Yield the names of a function that say nothing and live for more than three lines."""
    lines: dict[str, list[int]] = {}
    bound: dict[str, int] = {}
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if argument.arg in NAMES:
            bound[argument.arg] = argument.lineno
            lines.setdefault(argument.arg, []).append(argument.lineno)
    for node in _own(function):
        if isinstance(node, ast.Name) and node.id in NAMES:
            lines.setdefault(node.id, []).append(node.lineno)
            if isinstance(node.ctx, ast.Store):
                bound.setdefault(node.id, node.lineno)
    for name, line in bound.items():
        if max(lines[name]) - line >= LINES_MAX:
            yield line, f"name {name}: it lives for {max(lines[name]) - line + 1} lines"


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of the functions in it."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _own(node)


def _sentences(text: str) -> Iterator[Place]:
    """Yield the phrases in docstrings, comments and messages that a reader stumbles over."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            for number, line in enumerate(token.string.split("\n")):
                for match in PHRASES.finditer(line):
                    yield token.start[0] + number, f"phrase {match.group(0).lower()!r}"


def files(paths: Iterable[str]) -> list[Path]:
    """Return the Python files at or below the paths, in order."""
    roots = [Path(path) for path in paths] or [ROOT / "src"]
    return sorted(
        file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py"))
    )


def main(paths: list[str]) -> int:
    """Print each problem with its place; return 1 if there is one."""
    count = 0
    for path in files(paths):
        for line, problem in sorted(problems(path)):
            print(f"{path}:{line}: {problem}")
            count += 1
    print(f"{count} problems")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
