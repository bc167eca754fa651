"""Imports before any fork: the modules that a script imports, and their side effects.

The script is read, not executed. So are the imported modules that are not installed: those in its
folder, and those of packages that are installed in place. All these files are searched for sets,
since the order of a set may matter. This module needs only the standard library, since it is loaded
in the Python of the command.
"""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES_MAX = 300
BYTES_MAX = 2**21
OWN = "entrenar_py"  # this package orders nothing by a hash
# Functions with results that don't depend on the order of a set.
_WITHOUT_ORDER = ("sorted", "len", "min", "max", "any", "all", "isinstance", "sum")
_BY_HASH = ("set", "frozenset", "hash")


@dataclass(frozen=True)
class Imported:
    """The modules and settings that a script needs from its interpreter.

    - `installed`: the imported modules of installed packages, in order, each with the names that
      are imported from it.
    - `files`: the script, and the files that it imports and that are not installed.
    - `by_hash`: a place (file and line) where an order may follow from a hash, and so differ
      between interpreters; "" if there is none.
    """

    installed: tuple[tuple[str, tuple[str, ...]], ...]
    files: tuple[Path, ...]
    by_hash: str


def read_script(script: Path, folder: Path) -> Imported:
    """Return the imports of `script` if it is run in `folder`.

    Raises ValueError if a file can't be parsed as Python, or if there are too many files.
    """
    installed: dict[str, dict[str, None]] = {}
    roots = [script.parent, folder]
    files, seen, by_hash = deque([script]), {script: None}, ""
    while files:
        file = files.popleft()
        tree = _parsed(file)
        by_hash = by_hash or next((f"{file}:{line}" for line in _hashing(tree)), "")
        for module, names, level in _imports_in(tree):
            own = _own_files(module, names, level, file, roots)
            if not own and not level:
                root = _root(module)
                if root is None:
                    installed.setdefault(module, {}).update(dict.fromkeys(names))
                elif module.partition(".")[0] != OWN:
                    own = _own_files(module, names, level, file, [root])
            new = [one for one in own if one not in seen]
            seen |= dict.fromkeys(new)
            files.extend(new)
        if len(seen) > FILES_MAX:
            raise ValueError(f"{script} imports more than {FILES_MAX} files that aren't installed")
    modules = tuple((module, tuple(names)) for module, names in installed.items())
    return Imported(modules, tuple(seen), by_hash)


def _parsed(file: Path) -> ast.Module:
    try:
        if file.stat().st_size > BYTES_MAX:
            raise ValueError(f"{file} is longer than {BYTES_MAX} bytes")
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{file} can't be read ({error})") from error


def _imports_in(tree: ast.Module) -> Iterator[tuple[str, tuple[str, ...], int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, (), 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", tuple(alias.name for alias in node.names), node.level


def _own_files(
    module: str, names: Sequence[str], level: int, file: Path, roots: Sequence[Path]
) -> list[Path]:
    """Return the files below `roots` that an import of `module` in `file` executes."""
    parts = module.split(".") if module else []
    bases = [file.parents[level - 1]] if level else roots
    files = []
    for base in bases:
        here = []
        for end in range(1, len(parts) + 1):
            here += _at(base.joinpath(*parts[:end]))
        is_namespace = bool(parts) and base.joinpath(*parts).is_dir()  # without an __init__.py
        if here or level or is_namespace:
            for name in names:
                here += _at(base.joinpath(*parts, name))
            files += here
    return files


def _at(place: Path) -> list[Path]:
    files = (place / "__init__.py", place.with_name(place.name + ".py"))
    return [file for file in files if file.is_file()][:1]


def _root(module: str) -> Path | None:
    """Return the folder with the package of `module` if it is installed in place, else None."""
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
    paths = sysconfig.get_paths()
    places = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return [*places, *(one for one in sys.path if one.endswith(("-packages", ".zip")))]


def _hashing(tree: ast.Module) -> Iterator[int]:
    """Yield the lines where an order may follow from a hash, and so differ between interpreters."""
    harmless = {id(node) for node in _without_order(tree)}
    for node in ast.walk(tree):
        hashes = isinstance(node, (ast.Set, ast.SetComp)) or (
            isinstance(node, ast.Call) and _name(node) in _BY_HASH
        )
        if hashes and id(node) not in harmless:
            yield node.lineno  # type: ignore[attr-defined]


def _without_order(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the expressions that are sets, but with an order that does not matter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from node.comparators
        elif isinstance(node, ast.Call) and _name(node) in _WITHOUT_ORDER:
            yield from node.args
        elif isinstance(node, ast.Set) and _is_single(node.elts):
            yield node  # one element, such as the class of the layers to shard
        elif isinstance(node, ast.FunctionDef):
            yield from _looked_up_in(node)


def _looked_up_in(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the values of local variables that are only used as the `s` of `x in s`."""
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


# Imported if they exist. Otherwise the first optimizer of a process would import the second module.
FIRST = (
    *("torch", "torch._dynamo.aot_compile", "torch.distributed.run", "torch.nn.parallel"),
    *("torch.utils.data", "numpy.random"),
    *("entrenar_py.check.observing.observer", "entrenar_py.check.observing.seen_samples"),
    *("entrenar_py.check.observing.auto.beginning", "entrenar_py.check.observing.auto.recorder"),
    *("entrenar_py.check.observing.auto.follower", "entrenar_py.check.observing.torch_calls"),
)
# Variables that differ between ranks or runs.
RANKS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "NODE_RANK", "PWD"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)
PREFIXES = ("TORCHELASTIC_", "ENTRENAR_", "ACCELERATE_", "FSDP_")


class Imports:
    """The modules that were imported before any fork, and the side effects of their imports.

    - `before`: the environment before the imports.
    - `changed`: the variables that imports have set.
    - `names`: the variables that imports have read in Python code.
    - `files`: the descriptors that imports have left open.
    """

    def __init__(self) -> None:
        self.before = dict(os.environ)
        self.names: set[str] = set()
        self.changed: dict[str, str] = {}
        self.files: set[int] = set()

    def make(
        self,
        first: Sequence[str],
        script: Sequence[tuple[str, tuple[str, ...]]],
        without: Sequence[str],
    ) -> str:
        """Import `first`, then what the script imports. Return a package to leave out, or "".

        A package must be left out (the caller starts again `without` it) if its import reads the
        rank, leaves threads running, or begins to use CUDA. Raises ImportError if an import in
        `first` does so.
        """
        gc.disable()  # saves a quarter of the time: each collection would scan all objects
        self._import([(name, ()) for name in first])
        if why := self._why_not():
            raise ImportError(f"torch {why}")
        for module, names in script:
            top = module.partition(".")[0]
            if top not in without:
                self._import([(module, names)])
                if self._why_not():
                    return top
        self.changed = {
            name: text for name, text in os.environ.items() if self.before.get(name) != text
        }
        sys.stdout.flush()
        gc.collect()
        gc.freeze()  # later collections skip these objects, and copy none of their pages
        gc.enable()
        return ""

    def _import(self, modules: Sequence[tuple[str, tuple[str, ...]]]) -> None:
        with _read_noted(self.names):
            for module, names in modules:
                # If a module can't be imported here, the script will meet the same error itself.
                with suppress(Exception):
                    imported = importlib.import_module(module)
                    for name in names:
                        with suppress(Exception):
                            getattr(imported, name)  # packages that import lazily do so here

    def _why_not(self) -> str:
        """Return why no rank can be forked after the latest import, or "" if one can."""
        read = sorted(name for name in self.names if name in RANKS)
        if read:
            return f"reads {read[0]} as it is imported"
        pid = os.fork()  # OpenBLAS ends its threads here, and CUDA notes the fork
        if pid == 0:
            os._exit(int(_has_begun_cuda()))
        _, status = os.waitpid(pid, 0)
        if status:
            return "uses CUDA as it is imported"
        return "has threads" if len(os.listdir("/proc/self/task")) > 1 else ""


def _has_begun_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and getattr(torch._C, "_cuda_isInBadFork", lambda: False)()


@contextmanager
def _read_noted(names: set[str]) -> Iterator[None]:
    """Add to `names` the environment variables that are read in the body."""
    read = os._Environ.__getitem__

    def noted(self: Any, key: Any) -> Any:
        names.add(key)
        return read(self, key)

    os._Environ.__getitem__ = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        os._Environ.__getitem__ = read  # type: ignore[method-assign]
