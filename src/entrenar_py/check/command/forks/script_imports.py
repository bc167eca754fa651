"""What a script imports, and whether the order of a set may matter to it, read from its text.

This file needs only the standard library: `warm_parent.py` loads it in the Python of the command.
No module is executed. Besides the script, the modules are read that it imports and that are not
installed: those of its folder, and those of packages that are installed in place.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FILES_MAX = 300
BYTES_MAX = 2**21
OWN = "entrenar_py"  # it orders nothing by a hash
# A set among their arguments is read in no order, or sorted first.
_WITHOUT_ORDER = ("sorted", "len", "min", "max", "any", "all", "isinstance", "sum")
_BY_HASH = ("set", "frozenset", "hash")


@dataclass(frozen=True)
class Imported:
    """What a script needs of its interpreter.

    - `installed`: the modules of installed packages that it imports, each with the names that it
      takes from it, in their order.
    - `by_hash`: a place at which an order may follow from a hash, which differs from interpreter
      to interpreter; "" if there is none.
    """

    installed: tuple[tuple[str, tuple[str, ...]], ...]
    by_hash: str


def read(script: Path, folder: Path) -> Imported:
    """Return what `script` needs, if it is run in `folder`.

    Raises ValueError if a file can't be read as Python, or if there are too many.
    """
    installed: dict[str, dict[str, None]] = {}
    roots = [script.parent, folder]
    files, seen, by_hash = deque([script]), {script}, ""
    while files:
        file = files.popleft()
        tree = _parsed(file)
        by_hash = by_hash or next((f"{file}:{line}" for line in _hashing(tree)), "")
        for module, names, level in _imports(tree):
            own = _own_files(module, names, level, file, roots)
            if not own and not level:
                root = _root(module)
                if root is None:
                    installed.setdefault(module, {}).update(dict.fromkeys(names))
                elif module.partition(".")[0] != OWN:
                    own = _own_files(module, names, level, file, [root])
            new = [one for one in own if one not in seen]
            seen.update(new)
            files.extend(new)
        if len(seen) > FILES_MAX:
            raise ValueError(f"{script} imports more than {FILES_MAX} files that aren't installed")
    return Imported(tuple((module, tuple(names)) for module, names in installed.items()), by_hash)


def _parsed(file: Path) -> ast.Module:
    try:
        if file.stat().st_size > BYTES_MAX:
            raise ValueError(f"{file} is longer than {BYTES_MAX} bytes")
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{file} can't be read ({error})") from error


def _imports(tree: ast.Module) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Yield module, names and level of each import, those in functions among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, (), 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", tuple(alias.name for alias in node.names), node.level


def _own_files(
    module: str, names: Sequence[str], level: int, file: Path, roots: Sequence[Path]
) -> list[Path]:
    """Return the files below `roots` that an import in `file` executes."""
    parts = module.split(".") if module else []
    bases = [file.parents[level - 1]] if level else roots
    found = []
    for base in bases:
        here = []
        for end in range(1, len(parts) + 1):
            here += _at(base.joinpath(*parts[:end]))
        if here or level:
            for name in names:
                here += _at(base.joinpath(*parts, name))
            found += here
    return found


def _at(place: Path) -> list[Path]:
    """Return the file of the module or package at `place`, if there is one."""
    files = (place / "__init__.py", place.with_name(place.name + ".py"))
    return [file for file in files if file.is_file()][:1]


def _root(module: str) -> Path | None:
    """Return the folder that holds a package which is not installed; None for all others."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin)
    if any(origin.is_relative_to(place) for place in _installed_in()):
        return None
    return origin.parent.parent if origin.name == "__init__.py" else origin.parent


def _installed_in() -> list[str]:
    """Return the folders of installed packages."""
    paths = sysconfig.get_paths()
    places = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return [*places, *(one for one in sys.path if one.endswith(("-packages", ".zip")))]


def _hashing(tree: ast.Module) -> Iterator[int]:
    """Yield the lines at which an order may follow from a hash."""
    harmless = {id(node) for node in _without_order(tree)}
    for node in ast.walk(tree):
        hashes = isinstance(node, (ast.Set, ast.SetComp)) or (
            isinstance(node, ast.Call) and _name(node) in _BY_HASH
        )
        if hashes and id(node) not in harmless:
            yield node.lineno  # type: ignore[attr-defined]


def _without_order(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the expressions of which no order is asked."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from node.comparators
        elif isinstance(node, ast.Call) and _name(node) in _WITHOUT_ORDER:
            yield from node.args
        elif isinstance(node, ast.Set) and _is_single(node.elts):
            yield node  # such as the class of the layers to shard
        elif isinstance(node, ast.FunctionDef):
            yield from _looked_up_in(node)


def _looked_up_in(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the values of local names that stand only to the right of `in` and its like."""
    harmless, loads = set[int](), list[ast.Name]()
    for node in ast.walk(function):
        if isinstance(node, ast.Compare):
            harmless.update(map(id, node.comparators))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            loads.append(node)
    others = {name.id for name in loads if id(name) not in harmless}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and all(
            isinstance(target, ast.Name) and target.id not in others for target in node.targets
        ):
            yield node.value


def _is_single(elements: Sequence[ast.expr]) -> bool:
    return len(elements) == 1 and not isinstance(elements[0], ast.Starred)


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""
