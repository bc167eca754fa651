"""The architecture: floors, two wings without imports between them, no cycles, short files."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import entrenar_py
from entrenar_py.check.clauses import CHECKS
from entrenar_py.shared.trace import traits
from entrenar_py.systems import SYSTEMS

SOURCE = Path(entrenar_py.__file__).parent
LINES_MAX = 700
WALL_CLOCKS = (
    *("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.strftime"),
    *("datetime.now", "datetime.utcnow", "datetime.today", "date.today"),
)

# The room of a module is the first part of its name. Each room has a floor.
FLOORS = {
    "codec": 0,
    "errors": 0,
    "extras": 0,
    "hook_calls": 0,
    "process": 0,
    "untrusted": 0,
    "backends": 1,
    "canonical": 1,
    "protocol": 2,
    "training": 2,
    "drivers": 3,
    "": 4,  # entrenar_py itself: the version, and what a training script calls
    "contract": 4,
    "distill": 4,
    "faults": 4,
    "mutants": 4,
    "observing": 4,
    "outer": 4,
    "rank_files": 4,
    "scenario": 4,
    "shipped": 4,
    "trace": 4,
    "tuning": 4,
    "verdict": 4,
    "watch": 4,
    "wording": 0,
    "systems": 5,
    "checks": 5,
    "integrations": 5,
    "command": 6,
    "harness": 6,
    "kill_matrix": 6,
    "options": 6,
    "reports": 6,
    "cli": 7,
    "doctor": 7,
    "finetune": 7,
    "pipeline": 5,
    "planning": 7,
    "project": 7,
    "pytest_plugin": 7,
    "service": 7,
}


@cache
def modules() -> dict[str, Path]:
    """Return dotted name below the package -> file."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = list(path.relative_to(SOURCE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if parts[:1] not in (["contracts"], ["falsification"]):
            found[".".join(parts)] = path
    return found


@cache
def imports(path: Path, *, everywhere: bool) -> set[str]:
    """Return the package's modules that a file imports, with `everywhere` in functions, too."""
    tree, known = ast.parse(path.read_text(encoding="utf-8")), modules()
    found = set()
    for node in ast.walk(tree) if everywhere else _module_level(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if not name.startswith("entrenar_py"):
                continue
            below = name.removeprefix("entrenar_py").removeprefix(".")
            while below not in known:
                below = below.rpartition(".")[0]
            found.add(below)
    return found


def _module_level(tree: ast.Module) -> list[ast.stmt]:
    """Yield the statements that run at import, without those under TYPE_CHECKING."""
    return [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]


def room(module: str) -> str:
    """Return the room of a module: its first part."""
    return module.partition(".")[0]


def test_every_module_has_a_floor() -> None:
    """Every module has a floor, so that a new room is placed deliberately."""
    assert {room(module) for module in modules()} == set(FLOORS)


def test_a_floor_imports_only_floors_below_it() -> None:
    """No module imports from a higher floor, not even inside a function."""
    known = modules()
    for module, path in known.items():
        for imported in imports(path, everywhere=True):
            if room(imported) != room(module):
                above = FLOORS[room(imported)] > FLOORS[room(module)]
                assert not above, f"{module} imports {imported}"


def test_the_two_wings_never_meet() -> None:
    """Systems import no checks and contracts; checks import no systems, torch or sockets."""
    known = modules()
    for module, path in known.items():
        rooms = {room(name) for name in imports(path, everywhere=True)}
        if room(module) == "systems":
            assert not rooms & {"checks", "contract"}, module
        if room(module) == "checks":
            assert not rooms & {"systems", "backends", "training"}, module
            text = path.read_text(encoding="utf-8")
            assert not any(f"import {name}" in text for name in ("torch", "socket", "wgpu")), module
        if room(module) == "service":
            assert not rooms & {"checks", "harness", "reports", "mutants"}, module


def test_wgpu_has_one_door() -> None:
    """Only the door imports wgpu-py: it loads Triton before, and tries an adapter in a child."""
    for module, path in modules().items():
        text = path.read_text(encoding="utf-8")
        if re.search(r"^ *(import|from) wgpu\b|import_module\(.wgpu", text, flags=re.MULTILINE):
            assert module == "backends.adapters"


def test_rank_files_are_read_without_torch() -> None:
    """Reading ranks' files imports no torch, so stored runs are judged quickly and anywhere."""
    known = modules()
    for module, path in known.items():
        if room(module) == "rank_files":
            rooms = {room(name) for name in imports(path, everywhere=True)}
            assert not rooms & {"observing", "watch", "training", "backends", "canonical"}, module
            text = path.read_text(encoding="utf-8")
            assert not any(f"{word} torch" in text for word in ("import", "from")), module


# Modules that read JSON without bounds: only what another process of the same run has written to
# a pipe or the environment, or a text that the module's own room has made.
OF_OWN_PROCESSES = {
    "command.forks.messages",
    "command.forks.parent",
    "finetune.local",
    "finetune.worker_process",
    "observing.auto",
    "observing.auto.seeding",
    "observing.planned_faults",
    "observing.planned_rates",
    "reports.drawn_runs",
    "systems.finetuned.by_ranks",
    "systems.probes.memory",
    "systems.single.textbook_replica",
    "systems.star.processes",
    "systems.star.worker_process",
    "systems.torch.ranks",
    "untrusted.json_text",
}


def test_json_of_others_is_read_within_bounds() -> None:
    """Depth, values and numbers are bounded at one place, so no reader can forget one of them."""
    parsers = re.compile(r"\bjson\.(loads?|JSONDecoder)\b(?=\()")
    found = {
        module.removeprefix("entrenar_py.")
        for module, path in modules().items()
        if parsers.search(path.read_text(encoding="utf-8"))
    }
    assert found == OF_OWN_PROCESSES


def texts(path: Path, *, outside: str = "") -> Iterator[str]:
    """Yield the texts in a file, except docstrings and texts in functions named `outside...`."""
    left: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        if (
            isinstance(node, ast.FunctionDef)
            and outside
            and node.name.strip("_").startswith(outside)
        ):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        left.extend(ast.iter_child_nodes(node))


def test_no_name_crosses_the_wings() -> None:
    """Checks know runs by their traits, and name systems in plans only.

    Commands know checks by their needs.
    """
    # Words that are the name of a check too, or of a topology.
    words = {*CHECKS, *traits.CHOICES["topology"]}
    for module, path in modules().items():
        if room(module) == "checks" and not module.endswith(".plans"):
            assert not {*texts(path, outside="plan")} & (SYSTEMS.keys() - words), module
        if room(module) == "command":
            assert not {*texts(path)} & CHECKS.keys(), module


def test_options_are_what_was_asked() -> None:
    """No option of a system has a trait's name, except one that the trait of its runs follows.

    No check reads a trait from options.
    """
    names = {field.name for field in dataclasses.fields(traits.Traits)}
    for name, system in SYSTEMS.items():
        followed = {"updates", *(("schedule",) if name == "pipeline_parallel" else ())}
        assert not names & {*system.options} - followed, name
    for module, path in modules().items():
        if room(module) in ("checks", "command", "rank_files"):
            found = re.findall(r'options(?:\.get\(|\[)"(\w+)"', path.read_text(encoding="utf-8"))
            assert not names & {*found}, module


def test_no_import_cycles() -> None:
    """Module-level imports form a tree that can be sorted (a package and its parts count once)."""
    known = modules()
    graph = {module: imports(path, everywhere=False) - {module} for module, path in known.items()}
    for module, imported in graph.items():
        packages = {name for name in imported if module.startswith(f"{name}.") or name == ""}
        graph[module] = imported - packages
    TopologicalSorter(graph).prepare()


def package(module: str) -> str:
    """Return the package that contains a module; for a package, the package itself."""
    is_package = modules()[module].name == "__init__.py"
    return module if is_package else module.rpartition(".")[0] or module


def test_no_cycles_between_packages() -> None:
    """No package imports, at import or later, a package that imports it."""
    known = modules()
    reached: dict[str, set[str]] = {}
    for module, path in known.items():
        found = {package(name) for name in imports(path, everywhere=True)}
        reached.setdefault(package(module), set()).update(found)
    for _ in reached:  # the transitive closure
        for found in reached.values():
            found |= {far for near in found for far in reached.get(near, ())}
    tangled = {
        (one, other)
        for one in reached
        for other in reached[one]
        if one < other and one in reached.get(other, ()) and not other.startswith(f"{one}.")
    }
    assert not tangled - {pair for pair in tangled if "" in pair}


def test_no_decision_follows_the_wall_clock() -> None:
    """A wall clock jumps. It is read for what people read, in a few places; waits are monotonic."""
    of_metrics = {"service.metrics": {"time.time"}}  # a line's time
    of_locks = {"service.file_locks": {"time.strftime"}}  # since when a lock is held, for a message
    of_days = {"tuning.prepared": {"datetime.now"}}  # what a chat template with a clock is told
    read: dict[str, set[str]] = {}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL_CLOCKS:
                read.setdefault(module, set()).add(ast.unparse(node))
    assert read == of_metrics | of_locks | of_days


def test_files_are_one_room() -> None:
    """No source file is longer than 700 lines, and each opens with a docstring."""
    for path in modules().values():
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= LINES_MAX, path
        assert ast.get_docstring(ast.parse(text)), path
