"""Facts about a command, read from its words and its script's text without running anything.

The launchers that start a command's workers are recognised by name: torchrun, accelerate, mpirun,
srun and others. A script's options are not found if a library adds them, or if their names are
built at run time.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from entrenar_py.shared.errors import UsageError

_TORCH = ("--nproc_per_node", "--nproc-per-node")
_ACCELERATE = ("--num_processes", "--num-processes")
_MACHINES = ("--nnodes", "--num_machines", "--num-machines", "--nodes")
_MPI = ("-n", "-np", "--np")
# Beginnings of options with which torchrun's ranks meet at a place that the user chose.
_MEETING = ("--standalone", "--rdzv", "--master")
# Options with which accelerate refuses to start one worker.
_OF_SEVERAL = ("--multi_gpu", "--multi-gpu")
# Matches options of Python and torchrun with which a .py file after them is no script.
_NO_SCRIPT = re.compile(r"-|-[A-Za-z]*[cm].*|--no.python", re.DOTALL)
# Launcher -> its options for the number of workers. If none is present, the first is added.
_OPTIONS = {
    "torchrun": _TORCH,
    "torch.distributed.run": _TORCH,
    "torch.distributed.launch": _TORCH,
    "launch": _ACCELERATE,  # accelerate launch
    "accelerate-launch": _ACCELERATE,
    "accelerate.commands.launch": _ACCELERATE,
    "mpirun": ("-np", *_MPI),
    "mpiexec": _MPI,
    "srun": ("-n", "--ntasks", "--ntasks-per-node"),
    "horovodrun": ("-np", "--num-proc"),
    "deepspeed": ("--num_gpus",),
}
NAMES = "torchrun, accelerate launch, mpirun, srun, deepspeed"
_SHELLS = ("sh", "bash", "dash", "ksh", "zsh")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_MODULE = ("-m", "--module")
_WORKERS = "{world_size}"
_WORKERS_MAX = 64
ALONE = (
    "it has no launcher, so one worker is tried, and nothing distributed: put {world_size} where "
    "it takes the number of workers"
)
WITHOUT_LINE = "the script is observed without a line in it (docs/auto.md)"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command that can be started without a shell.

    `changes` has a line for each difference from the typed command. `world_size` is the number of
    workers in the typed command if it is between 3 and 64, else None.
    """

    command: tuple[str, ...]
    changes: tuple[str, ...] = ()
    world_size: int | None = None


def of(typed: Sequence[str]) -> Launch:
    """Return the launch of a typed command, with {world_size} as its launcher's number of workers.

    If the command lacks the option for this number, it is added. A text for a shell is left as it
    is.
    """
    command, changes = split(typed), []
    if sets_variable(command):
        command.insert(0, "env")
        changes.append("env was put in front, since no shell reads the command")
    end, _ = script(command, Path())
    known = launcher(command, end)
    number = None
    if known is not None and not is_for_shell(command) and not any(_WORKERS in w for w in command):
        at, options = known
        number = replace(command, options, _WORKERS, start=at + 1, end=end)
        if number is None:
            separate = options[0].startswith("--")
            added = [f"{options[0]}={_WORKERS}"] if separate else [options[0], _WORKERS]
            changes.append(f"{' '.join(added)} was added to {command[at]}")
            command[at + 1 : at + 1] = added
        else:
            changes.append(f"{_WORKERS} stands for the number of workers, instead of {number}")
    many = number is not None and number.isdecimal() and 2 < int(number) <= _WORKERS_MAX
    return Launch(
        command=tuple(command),
        changes=tuple(changes),
        world_size=int(number) if many and number is not None else None,
    )


def apart(launch: Launch) -> Launch:
    """Return `launch` with a free port for each run, unless torchrun is told where ranks meet.

    torchrun's default is one port for all jobs of a machine. With --standalone it takes a free one.
    """
    command = [*launch.command]
    end, _ = script(command, Path())
    known = None if is_for_shell(command) else launcher(command, end)
    if known is None or known[1] != _TORCH:
        return launch
    at = known[0] + 1
    options = command[at:end]
    if num_nodes(options, len(options)) or any(word.startswith(_MEETING) for word in options):
        return launch
    command.insert(at, _MEETING[0])
    changes = (*launch.changes, f"{_MEETING[0]} was added")
    return dataclasses.replace(launch, command=tuple(command), changes=changes)


def for_workers(command: Sequence[str], world_size: int) -> Sequence[str]:
    """Return `command` without accelerate's --multi_gpu if it is launched for one worker."""
    end, _ = script(command, Path())
    if world_size > 1 or not _is_accelerates(command, end):
        return command
    return [word for at, word in enumerate(command) if at > end or word not in _OF_SEVERAL]


def _is_accelerates(command: Sequence[str], end: int) -> bool:
    known = launcher(command, end)
    return known is not None and known[1] == _ACCELERATE and not is_for_shell(command)


def sized(command: Sequence[str], num_workers: int) -> str:
    """Return what to change in a command that ran with `num_workers`, not with {world_size}."""
    end, _ = script(command, Path())
    is_told = any(_WORKERS in word for word in command[:end])
    if num_workers == 1 and is_told and _is_accelerates(command, end):
        return (
            "accelerate starts one process on a machine without two GPUs, whatever "
            f"{_ACCELERATE[0]} says: use torchrun {_TORCH[0]}={_WORKERS}"
        )
    return f"put {_WORKERS} into the command as the number of workers"


def by_torchrun(command: Sequence[str]) -> str:
    """Return the command that starts a command's Python script by torchrun."""
    end, _ = script(command, Path())
    module = command[end - 1 : end] if end and command[end - 1] in _MODULE else ()
    return shlex.join(("torchrun", f"{_TORCH[0]}=2", *module, *command[end:]))


def require_script(command: Sequence[str], folder: Path) -> None:
    """Raise UsageError if the command plainly starts a Python script that doesn't exist.

    A .py file in any other command may be an argument of a program, or in a container.
    """
    end, path = script(command, folder)
    if path is None or path.exists() or "{" in command[end]:
        return
    words = [*dropwhile(lambda word: word == "env" or _VARIABLE.match(word), command[:end])]
    first = next((length for length in (3, 2, 1) if _starts_python(words[:length])), 0)
    between = words[first:]
    # An existing file among the options would be the script, and the .py file an argument of it.
    is_other = any(_NO_SCRIPT.fullmatch(word) or (folder / word).exists() for word in between)
    if first and not is_other:
        where = "" if Path(command[end]).is_absolute() else f" in {folder}"
        raise UsageError(
            f"{command[end]}: no such file{where}; give the path of the script that trains",
            field="command",
        )


def _starts_python(words: Sequence[str]) -> bool:
    """Return whether `words` are a whole launcher that starts Python scripts, or Python itself."""
    named = [Path(word).name for word in words]
    if len(named) == 3 and named[0].startswith("python") and named[1] == "-m":
        return _OPTIONS.get(named[2]) in (_TORCH, _ACCELERATE)
    is_python = len(named) == 1 and named[0].startswith("python")
    return is_python or named in (["torchrun"], ["accelerate-launch"], ["accelerate", "launch"])


def starts_one(command: Sequence[str]) -> bool:
    """Return whether a command starts a Python script directly, without a number of workers."""
    end, _ = script(command, Path())
    program = next((word for word in command if not _VARIABLE.match(word) and word != "env"), "")
    calls = program.endswith(".py") or Path(program).name.startswith("python")
    has_launcher = launcher(command, end) or any(_WORKERS in word for word in command)
    return calls and end < len(command) and not has_launcher


def usual_variables(command: Sequence[str]) -> dict[str, str]:
    """Return the variables that the launcher sets for several workers, but not for one alone.

    With these variables, one worker computes with the same number of threads as each of several
    workers. Otherwise it would split long sums into a different number of parts.
    """
    return {"OMP_NUM_THREADS": "1"} if is_torchs(command) else {}


def is_torchs(command: Sequence[str]) -> bool:
    """Return whether the command's launcher is torchrun, or accelerate, which is built on it."""
    end, _ = script(command, Path())
    known = None if is_for_shell(command) else launcher(command, end)
    return known is not None and known[1] in (_TORCH, _ACCELERATE)


def require_one_machine(command: Sequence[str]) -> None:
    """Raise UsageError if the launcher would start only the workers of one of several machines."""
    end, _ = script(command, Path())
    known = launcher(command, end)
    if known is None or is_for_shell(command) or known[1] not in (_TORCH, _ACCELERATE):
        return  # mpirun, srun and others start the workers of all machines
    least = (num_nodes(command, end) or "").partition(":")[0]
    if least.isdecimal() and int(least) > 1:
        raise UsageError(
            f"command: its launcher {Path(command[known[0]]).name} starts workers on "
            f"{least} machines, with one call on each, but a check makes one call, on "
            "this machine: leave the number of machines out, or give a command that "
            "starts {world_size} workers on all (docs/multi-node.md)"
        )


def split(command: Sequence[str]) -> list[str]:
    """Return the words of a command. A command given as a single text is split as in a shell."""
    if len(command) == 1 and len(command[0].split()) > 1 and shutil.which(command[0]) is None:
        try:
            return shlex.split(command[0])
        except ValueError:  # an unclosed quote
            pass
    return list(command)


def sets_variable(command: Sequence[str]) -> bool:
    """Return whether the command begins with `NAME=value`, which is allowed in a shell."""
    return _VARIABLE.match(command[0]) is not None


def is_for_shell(command: Sequence[str]) -> bool:
    """Return whether the command passes its whole text to a shell (`sh -c TEXT`)."""
    return Path(command[0]).name in _SHELLS and any(
        re.fullmatch(r"-[a-z]*c", word) for word in command[1:-1]
    )


def script(command: Sequence[str], folder: Path) -> tuple[int, Path | None]:
    """Return the index of the script or module in the command, and the path of its file.

    If the command has none, the index is `len(command)`. The path is None if it is not known.
    """
    for at, word in enumerate(command):
        if word.endswith(".py"):
            return at, folder / word
        if at and command[at - 1] in _MODULE and word not in _OPTIONS:
            base = folder.joinpath(*word.split("."))
            files = (base.with_suffix(".py"), base / "__main__.py")
            return at, next((file for file in files if file.is_file()), None)
    return len(command), None


def launcher(command: Sequence[str], end: int) -> tuple[int, Sequence[str]] | None:
    """Return the index of the launcher nearest to the script at `end`, and its options, or None."""
    for at in reversed(range(end)):
        options = _OPTIONS.get(Path(command[at]).name)
        if options is None or (command[at] == "launch" and _before(command, at) != "accelerate"):
            continue
        return at, options
    return None


def _before(command: Sequence[str], at: int) -> str:
    return Path(command[at - 1]).name if at else ""


def replace(
    command: list[str],
    options: Collection[str],
    text: str,
    *,
    start: int = 0,
    end: int | None = None,
) -> str | None:
    """Replace the first value of any of `options` with `text`. Return the old value, or None."""
    for at in range(start, len(command) if end is None else end):
        name, equals, value = command[at].partition("=")
        short = re.fullmatch(r"(-[a-z])(\d+)", command[at])  # -n2
        if name in options and equals:
            command[at] = f"{name}={text}"
            return value
        if short and short[1] in options:
            command[at] = f"{short[1]}{text}"
            return short[2]
        if name in options and at + 1 < len(command) and not command[at + 1].startswith("--"):
            value, command[at + 1] = command[at + 1], text
            return value
    return None


def num_nodes(command: Sequence[str], end: int) -> str | None:
    """Return the launcher's number of machines as written; None if it is one."""
    told = replace(list(command), _MACHINES, "", end=end)
    return None if told in (None, "1", "1:1") else told


BYTES_MAX = 2**22
_OBSERVES = ("observe", "ObserveCallback")  # functions of entrenar_py and of its integrations

_SAVES = ("save", "save_checkpoint", "save_state")
_LOADS = ("load", "load_checkpoint", "load_state", "load_state_dict")
# Names that show that a script notices values that are not finite: functions, arguments, classes.
_FINITE = ("isfinite", "isnan", "isinf", "error_if_nonfinite", "GradScaler", "TerminateOnNaN")


@dataclass(frozen=True, kw_only=True)
class Script:
    """Facts about a script, read from its text.

    - `options`: the long options that it declares to argparse or click.
    - `is_observed`: whether it calls `entrenar_py.observe`.
    - `saves`, `loads`: whether it saves or loads anything.
    - `minds_nan`: whether it may notice a value that is not finite.
    """

    options: tuple[str, ...]
    is_observed: bool
    saves: bool
    loads: bool
    minds_nan: bool


def read_script(path: Path) -> Script | None:
    """Return the facts about the script at `path`, or None if it can't be read as Python."""
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
        options=tuple(dict.fromkeys(_declared_options(calls))),
        is_observed=observed,
        saves=any(_name(call.func) in _SAVES for call in calls),
        loads=any(_name(call.func) in _LOADS for call in calls),
        minds_nan=any(_said(node) in _FINITE for node in ast.walk(tree)),
    )


def without_a_test_for_nan(path: Path) -> str:
    """Return what a script that never tests for NaN must expect and can add; "" if it may test.

    A script that can't be read counts as one that may test.
    """
    script = read_script(path)
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


def _declared_options(calls: list[ast.Call]) -> Iterator[str]:
    for call in calls:
        if _name(call.func) in ("add_argument", "option"):
            for argument in call.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    for name in argument.value.split("/"):  # click writes --shout/--no-shout
                        if name.startswith("--") and len(name) > 2:
                            yield name


def _said(node: ast.AST) -> str | None:
    if isinstance(node, ast.keyword):
        return node.arg
    return _name(node) if isinstance(node, ast.expr) else None


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
