"""The text of a script, searched for what a run may not reach, or what no hook can hear."""

from __future__ import annotations

import ast
import functools
import math
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from entrenar_py.check.observing import call_sites

_TEXT_BYTES_MAX = 2**22
_FACTOR_MAX = 64  # of a product or power that a script divides by: larger ones are no counts
# Calls that select rows by random numbers, so that one may come again before all others came ...
SELECTS = re.compile(
    r"\b(randint|random_integers|randrange|integers|choices?|multinomial)\s*\(|\bsample\([^()]*,"
)
# ... and what goes through rows in a random order, each once.
_ORDERS = re.compile(r"\b(randperm|shuffle|permutation|permuted|\w*Sampler|set_epoch)\b")
_BY_EPOCH = re.compile(  # what begins, or is done, at some epochs; no loop through all of them
    r"^(?!\s*while\b).*?(\b\w*epoch\w*\s*(?:[<>]=?|[=!]=|%)\s*[\w.]"
    r"|[\w.)\]]\s*(?:[<>]=?|[=!]=)\s*\w*epoch\w*\b)"
)
# What may bring rows into a random order, in any way.
_SHUFFLES = re.compile(
    r"(randperm|permutation|permuted|shuffl\w*\s*(?:\(|=(?!\s*False))|set_epoch|choices?\s*\("
    r"|multinomial|RandomSampler|DistributedSampler(?!\([^()]*shuffle=False)|\bsample\s*\("
    r"|\brand\s*\(|random\s*\(\s*\))"
)

# What a line imports it does not call: the statement, over several lines in brackets.
_IMPORT = re.compile(r"^[ \t]*(?:from\s+\S+\s+)?import\b(?:\s*\([^)]*\)|(?:\\\n|[^\n;])*)", re.M)


def texts() -> tuple[dict[str, str], dict[str, str]]:
    """Return by file the text of the script's modules, and of the library that calls the step.

    A machine may start each Python with modules of its own, so a module is the script's only if it
    lies where the script does, or where it runs.
    """
    loaded = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    calling = {*_calling()}
    files = filter(call_sites.is_own, {*filter(None, loaded), *calling})
    own = {file for file in files if file in calling or _is_near(file)}
    return _read(own), _read(calling - own)


@functools.cache
def parsed(text: str) -> ast.Module | None:
    """Return a text as Python reads it; None for a template, or what is for another Python."""
    try:
        with warnings.catch_warnings():  # Python has told of them already
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def first(
    pattern: re.Pattern[str], texts: Mapping[str, str], without: frozenset[str] = frozenset()
) -> str:
    """Return the first line that fits, as `train.py:12`; "" if there is none.

    Calls of functions `without` don't count, but for those of a base class. Nor do names that are
    only imported.
    """
    for file, text in texts.items():
        called = _IMPORT.sub(lambda match: "\n" * match[0].count("\n"), text)
        for number, line in enumerate(called.splitlines(), start=1):
            match = pattern.search(line.partition("#")[0])
            if match is None or line.lstrip().startswith("def "):
                continue
            if match[1] not in without or "super()" in line:
                return f"{Path(file).name}:{number}"
    return ""


def selecting_line() -> str:
    """Return the first line of the script that may select its rows by random numbers.

    Return "" if there is none, or if the script orders anything at random: it may be its rows.
    """
    own, _ = texts()
    return "" if first(_ORDERS, own) else first(SELECTS, own)


def line_by_epoch() -> str:
    """Return the first line of the script that compares the number of an epoch, "" if none does."""
    own, _ = texts()
    return first(_BY_EPOCH, own)


def shuffles() -> bool:
    """Return whether any line of the script may bring rows into a random order."""
    own, _ = texts()
    return not own or bool(first(_SHUFFLES, own))


def divides_by(number: float) -> bool:
    """Return whether the script may divide by `number` as by a number of its own.

    It may be in the text as it is (`/ 4`), as a square or another power (`/ T**2`), or as a
    multiple (`/ (2 * variance)`).
    """
    is_count = 0 < number < math.inf
    return is_count and any(_may_be(divisor, number) for divisor in _divisors())


@functools.cache
def _divisors() -> tuple[ast.expr, ...]:
    """Return what the script divides by, but for plain names."""
    own, _ = texts()
    divisors: list[ast.expr] = []
    for tree in filter(None, map(parsed, own.values())):
        divisors += filter(None, map(_divisor, ast.walk(tree)))
    return tuple(one for one in divisors if isinstance(one, ast.BinOp | ast.Constant))


def _divisor(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.right
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return node.value
    if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute):
        return node.args[-1] if node.func.attr in ("div", "div_", "true_divide") else None
    return None


def _may_be(divisor: ast.expr, number: float) -> bool:
    known = _value(divisor)
    if known is not None or not isinstance(divisor, ast.BinOp):
        return known == number
    left, right = _value(divisor.left), _value(divisor.right)
    if isinstance(divisor.op, ast.Pow) and right is not None and right > 1:
        return math.isclose(round(number ** (1 / right)) ** right, number)
    factor = right if left is None else left
    return isinstance(divisor.op, ast.Mult) and bool(factor) and number % (factor or 1) == 0


def _value(node: ast.expr) -> float | None:
    """Return the value of a number, or of a product or power of numbers."""
    if isinstance(node, ast.Constant):
        return float(node.value) if isinstance(node.value, int | float) else None
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult | ast.Pow):
        return None
    left, right = _value(node.left), _value(node.right)
    if left is None or right is None or max(left, right) > _FACTOR_MAX:
        return None
    return left * right if isinstance(node.op, ast.Mult) else left**right


def _is_near(file: str) -> bool:
    """Return whether a file is in the folder of the script, or in the one where it runs."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [Path.cwd(), *([] if script is None else [Path(script).absolute().parent])]
    return any(Path(file).absolute().is_relative_to(folder) for folder in folders)


def _calling() -> Iterator[str]:
    """Yield the files of the functions that run now, without Python's own, torch's and ours."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}" not in file and not call_sites.is_ours(file):
            yield file
        frame = frame.f_back  # type: ignore[assignment]


def _read(files: Iterable[str]) -> dict[str, str]:
    texts = {}
    for file in sorted(files):
        path = Path(file)
        if path.suffix == ".py" and path.is_file() and path.stat().st_size <= _TEXT_BYTES_MAX:
            texts[file] = path.read_text(encoding="utf-8", errors="replace")
    return texts
