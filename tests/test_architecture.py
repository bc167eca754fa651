"""The architecture: five wings, two products that never meet, no cycles, short files."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import entrenar_py
from entrenar_py.check.clauses import CHECKS
from entrenar_py.shared.systems import SYSTEMS
from entrenar_py.shared.trace import traits

SOURCE = Path(entrenar_py.__file__).parent
LINES_MAX = 700
WALL_CLOCKS = (
    *("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.strftime"),
    *("datetime.now", "datetime.utcnow", "datetime.today", "date.today"),
)
CLOCK_NAMES = re.compile(rf"\.({'|'.join(name.rpartition('.')[2] for name in WALL_CLOCKS)})\b")

# What each wing may import. Doors, the modules beside the wings, may import all.
WINGS: dict[str, frozenset[str]] = {
    "shared": frozenset(),
    "compute": frozenset({"shared"}),
    "train": frozenset({"shared", "compute"}),
    "check": frozenset({"shared", "compute"}),
    "systems": frozenset({"shared", "compute", "train", "check"}),
}
DOORS = {"", "entrenar", "finetune", "integrations", "pytest_plugin", "supervise", "trace"}
# Rooms that judge traces. They know nothing of torch, sockets and devices.
JUDGES = ("check.clauses", "check.causes", "check.evidence")
# The rooms of the checker that run systems. They import the table of `systems`, nothing below it.
RUNNERS = ("check.harness",)
# What systems use of the checker: what a user's process observes, and the files that it writes.
OBSERVERS = ("check.observing", "check.rank_files")


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


@dataclass(frozen=True)
class Source:
    """What the tests ask of a file: it is parsed once, as this takes longer than all they ask."""

    docstring: str | None
    imports: frozenset[str]  # at import
    imports_everywhere: frozenset[str]
    wall_clocks: frozenset[str]


@cache
def source(path: Path) -> Source:
    """Return what a file says and imports, and the wall clocks that it reads."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    # The formatter leaves no space behind a dot. Few files have one of the names: these are walked.
    attributes = [
        ast.unparse(node)
        for node in (ast.walk(tree) if CLOCK_NAMES.search(text) else ())
        if isinstance(node, ast.Attribute)
    ]
    return Source(
        docstring=ast.get_docstring(tree),
        imports=_imported(_module_level(tree)),
        imports_everywhere=_imported(_statements(tree)),
        wall_clocks=frozenset(attributes) & {*WALL_CLOCKS},
    )


def imports(path: Path, *, everywhere: bool) -> frozenset[str]:
    """Return the package's modules that a file imports, with `everywhere` in functions, too."""
    found = source(path)
    return found.imports_everywhere if everywhere else found.imports


def _imported(nodes: Iterable[ast.AST]) -> frozenset[str]:
    known = modules()
    found = set()
    for node in nodes:
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
    return frozenset(found)


def _module_level(tree: ast.Module) -> list[ast.stmt]:
    """Yield the statements that run at import, without those under TYPE_CHECKING."""
    return [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all statements of a file, those in functions, too; no expression contains one."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            left.extend(getattr(node, block, ()))


def wing(module: str) -> str:
    """Return the wing of a module, or the door: its first part."""
    return module.partition(".")[0]


def room(module: str) -> str:
    """Return the room of a module: the wing and what is below it, as `check.clauses`."""
    return ".".join(module.split(".")[:2])


def reached(start: str, graph: Mapping[str, frozenset[str]]) -> set[str]:
    """Return the modules that importing `start` imports, packages on the way included."""
    found: set[str] = set()
    left = [start]
    while left:
        module = left.pop()
        parts = module.split(".")
        for name in (".".join(parts[: n + 1]) for n in range(len(parts))):
            if name not in found:
                found.add(name)
                left.extend(graph.get(name, ()))
    return found


def test_every_module_is_in_a_wing_or_a_door() -> None:
    """Every module is in a wing or a door, so that a new room is placed deliberately."""
    assert {wing(module) for module in modules()} == {*WINGS, *DOORS}


def test_a_wing_imports_only_the_wings_below_it() -> None:
    """No module imports from a wing that its own may not, not even inside a function."""
    for module, path in modules().items():
        if wing(module) in DOORS:
            continue
        for imported in imports(path, everywhere=True) - {""}:  # "": the version
            allowed = {wing(module), *WINGS[wing(module)]}
            allowed |= {"systems"} if room(module) in RUNNERS else set()
            assert wing(imported) in allowed, f"{module} imports {imported}"
            if wing(module) == "check":
                assert not imported.startswith("systems."), f"{module} imports {imported}"
            if wing(module) == "systems" and wing(imported) == "check":
                assert room(imported) in OBSERVERS, f"{module} imports {imported}"


def test_the_two_products_never_meet() -> None:
    """No chain of imports leads from the checker to the trainer, or from the trainer to it.

    What a function imports counts for the trainer. The checker runs systems by their names.
    """
    known = modules()
    graph = {module: imports(path, everywhere=False) - {""} for module, path in known.items()}
    whole = {module: imports(path, everywhere=True) - {""} for module, path in known.items()}
    for module in known:
        if wing(module) == "check":
            assert not {one for one in reached(module, graph) if wing(one) == "train"}, module
        if wing(module) == "train":
            assert not {one for one in reached(module, whole) if wing(one) == "check"}, module


def test_judges_know_no_devices() -> None:
    """Clauses, causes and evidence import no systems, backends, torch or sockets."""
    for module, path in modules().items():
        if room(module) in JUDGES:
            wings = {wing(name) for name in imports(path, everywhere=True)}
            assert not wings & {"systems", "compute"}, module
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"\bimport (torch|socket|wgpu)\b", text), module


def test_wgpu_has_one_door() -> None:
    """Only the door imports wgpu-py: it loads Triton before, and tries an adapter in a child."""
    for module, path in modules().items():
        text = path.read_text(encoding="utf-8")
        if re.search(r"^ *(import|from) wgpu\b|import_module\(.wgpu", text, flags=re.MULTILINE):
            assert module == "compute.adapters"


def test_rank_files_are_read_without_torch() -> None:
    """Reading ranks' files imports no torch, so stored runs are judged quickly and anywhere."""
    known = modules()
    for module, path in known.items():
        if room(module) == "check.rank_files":
            found = imports(path, everywhere=True)
            assert not {room(name) for name in found} & {"check.observing", "check.watch"}, module
            assert "compute" not in {wing(name) for name in found}, module
            text = path.read_text(encoding="utf-8")
            assert not any(f"{word} torch" in text for word in ("import", "from")), module


# Modules that read JSON without bounds: only what another process of the same run has written to
# a pipe or the environment, or a text that the module's own room has made.
OF_OWN_PROCESSES = {
    "check.command.forks.processes",
    "check.command.forks.parent",
    "train.finetune.local",
    "check.observing.auto",
    "check.observing.auto.beginning",
    "check.observing.planned_faults",
    "check.reports.html",
    "systems.finetuned.by_ranks",
    "systems.probes.memory",
    "systems.textbook",
    "systems.star.processes",
    "systems.star.worker_process",
    "systems.torch.ranks",
    "shared.untrusted.json_text",
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
        if room(module) in JUDGES and not module.endswith(".plans"):
            assert not {*texts(path, outside="plan")} & (SYSTEMS.keys() - words), module
        if room(module) == "check.command":
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
        if room(module) in (*JUDGES, "check.command", "check.rank_files"):
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
    closure: dict[str, set[str]] = {}
    for module, path in known.items():
        found = {package(name) for name in imports(path, everywhere=True)} - {""}  # "": the version
        closure.setdefault(package(module), set()).update(found)
    for _ in closure:
        for found in closure.values():
            found |= {far for near in found for far in closure.get(near, ())}
    tangled = {
        (one, other)
        for one in closure
        for other in closure[one]
        if one < other and one in closure.get(other, ()) and not other.startswith(f"{one}.")
    }
    assert not {pair for pair in tangled if "" not in pair}


def test_no_decision_follows_the_wall_clock() -> None:
    """A wall clock jumps. It is read for what people read, in a few places; waits are monotonic."""
    of_metrics = {"train.service.metrics": {"time.time"}}  # a line's time
    of_locks = {
        "train.service.file_locks": {"time.strftime"}
    }  # since when a lock is held, for a message
    of_days = {
        "train.model.preparation": {"datetime.now"}
    }  # what a chat template with a clock is told
    read: dict[str, set[str]] = {}
    for module, path in modules().items():
        if found := source(path).wall_clocks:
            read[module] = {*found}
    assert read == of_metrics | of_locks | of_days


def test_files_are_one_room() -> None:
    """No source file is longer than 700 lines, and each opens with a docstring."""
    for path in modules().values():
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= LINES_MAX, path
        assert source(path).docstring, path
