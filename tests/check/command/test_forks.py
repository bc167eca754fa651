"""Forked launchers and ranks: as new interpreters as far as a script can see, or not forked."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import sys
import types
from argparse import Namespace
from collections.abc import Iterator
from multiprocessing import process
from pathlib import Path

import pytest
import torch

from entrenar_py.check.command import launch, run_plan, warm
from entrenar_py.check.command.forks import imports, interpreter
from entrenar_py.check.command.launch import Ended
from entrenar_py.check.project import commands
from entrenar_py.shared.errors import UsageError

# Started like torchrun, and starts ranks like it; torch is not imported.
LAUNCHER = """#!{python}
# A script as pip makes it has: from torch.distributed.run import main
import os, subprocess, sys
told = dict(os.environ, WORLD_SIZE="2")
told.setdefault("OMP_NUM_THREADS", "1")
told.update(word.split("=") for word in sys.argv[2:] if word[0].isupper())
words = [word for word in sys.argv[2:] if not word[0].isupper()]
ranks = [
    subprocess.Popen([sys.executable, "-u", *words], env=dict(told, RANK=str(rank)),
                     start_new_session=True)
    for rank in range(2)
]
codes = [rank.wait() for rank in ranks]
print("codes", *codes)
sys.exit(any(codes))
"""

PROBE = """
import gc, json, os, random, signal, sys, threading

facts = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "flags": repr(sys.flags),
    "executable": sys.executable,
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "main": {name: repr(value) for name, value in globals().items() if name != "facts"},
    "is main": sys.modules["__main__"].__dict__ is globals(),
    "spec": getattr(__spec__, "name", None),
    "handlers": {str(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
    "blocked": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "leads": [os.getpid() == os.getsid(0), os.getpid() == os.getpgid(0)],
    "threads": [t.name for t in threading.enumerate()],
    "files": sorted(os.readlink(f"/proc/self/fd/{n}") for n in range(3, 64)
                    if os.path.exists(f"/proc/self/fd/{n}")),
    "streams": [repr(s) + str(s.line_buffering) + str(s.write_through)
                for s in (sys.stdin, sys.stdout, sys.stderr)],
    "read": sys.stdin.read(),
    "gc": [gc.isenabled(), gc.get_threshold()],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace(), len(sys.meta_path)],
    "last": hasattr(sys, "last_value"),
}
if "numpy" in sys.argv:
    import numpy
    facts["numpy"] = str(numpy.random.get_state()[0])
with open(os.environ["ENTRENAR_TRACE_DIR"] + f"/facts{os.environ['RANK']}.json", "w") as file:
    json.dump(facts, file)
"""


class Folder:
    """A folder with a launcher, for scripts that are run by forks, or as they are."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_runs = path, 0
        self.launcher = path / "bin" / "torchrun"
        self.launcher.parent.mkdir()
        self.launcher.write_text(LAUNCHER.format(python=sys.executable))
        self.launcher.chmod(0o755)
        self.parents: warm.Parents | None = None

    def has(self, name: str, text: str) -> Path:
        (self.path / name).parent.mkdir(exist_ok=True)
        (self.path / name).write_text(text)
        return self.path / name

    def run(self, *words: str, forked: bool, deadline_s: float = 60.0) -> Ended:
        """Return the end of a run, whose records are in a folder of its own."""
        if self.parents is None:
            script = next((w for w in words if w.endswith(".py")), "probe.py")
            self.parents = warm.Parents(self.path / script, first=("numpy.random",))
        self.num_runs += 1
        return launch.launch(
            [str(self.launcher), "--nproc_per_node=2", *words],
            folder=self.path / f"run{self.num_runs}",
            variables={"PWD": str(self.path)},
            deadline_s=deadline_s,
            cwd=self.path,
            parents=self.parents if forked else None,
        )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """Return a folder with a launcher."""
    made = Folder(tmp_path)
    yield made
    if made.parents is not None:
        made.parents.close()


def facts(ended: Ended, rank: int) -> dict[str, object]:
    """Return what a rank of PROBE has seen."""
    text = (ended.output.parent / f"facts{rank}.json").read_text()
    text = re.sub(r"0x[0-9a-f]+", "ADDRESS", text.replace(str(ended.output.parent), "FOLDER"))
    seen: dict[str, object] = json.loads(text)
    return seen


def printed(ended: Ended) -> list[str]:
    """Return the characters that were printed: two ranks print at the same time."""
    return sorted("".join(ended.tail))


@pytest.mark.parametrize(
    "words", [("probe.py", "--x", "1"), ("inner/../probe.py",), ("-m", "inner.probe", "a", "b")]
)
def test_a_forked_rank_is_like_a_new_interpreter(words: tuple[str, ...], folder: Folder) -> None:
    """A script sees the same process: its arguments, environment, files, signals and modules."""
    folder.has("probe.py", PROBE)
    folder.has("inner/probe.py", PROBE)
    new, forked = folder.run(*words, forked=False), folder.run(*words, forked=True)
    assert (new.code, forked.code) == (0, 0), (new.tail, forked.tail)
    assert folder.parents is not None
    assert folder.parents.told() == "forked"
    for rank in range(2):
        assert facts(forked, rank) == facts(new, rank)
    assert forked.tail == new.tail


ERRORS = {
    "an error": "def f():\n    raise ValueError('of mine')\nf()",
    "an error in a syntax": "x = (",
    "a text": "raise SystemExit('a text')",
    "a code": "import sys; sys.exit(7)",
    "a signal": "import os; os.kill(os.getpid(), 9)",
    "a hook": "import sys; sys.excepthook = lambda *e: print('hook', e[0])\nraise KeyError(1)",
    "files that are open": (
        "import atexit, os\n"
        "class Last:\n    def __del__(self): print('taken down')\n"
        "last = Last(); last.itself = last\n"
        "file = open(os.environ['ENTRENAR_TRACE_DIR'] + '/' + os.environ['RANK'], 'w')\n"
        "file.write('whole')\n"
        "atexit.register(print, 'at exit')"
    ),
    "a finalizer that uses a global": (
        "import os\n"
        "class Last:\n    def __del__(self): print(os.path.basename('of/a global'))\n"
        "last = Last()"
    ),
    "a thread": "import threading as t; t.Timer(0.1, print, ['of a thread']).start()",
}


def test_a_forked_rank_ends_like_a_new_interpreter(folder: Folder) -> None:
    """What is printed, written and returned at the end of a script is the same."""
    names = folder.has("names.json", json.dumps(ERRORS))
    script = folder.has(
        "ends.py",
        f"import json\ntext = json.load(open({str(names)!r}))[__import__('sys').argv[1]]\n"
        "exec(compile(text, 'mine', 'exec'))\n",
    )
    for name in ERRORS:
        new = folder.run(script.name, name, forked=False)
        forked = folder.run(script.name, name, forked=True)
        assert printed(forked) == printed(new), name
        assert (forked.code, forked.num_left) == (new.code, new.num_left), name
        for ended in (new, forked):
            if name == "files that are open":
                assert (ended.output.parent / "1").read_text() == "whole"


def test_many_modules_are_taken_down_with_few_collections(folder: Folder) -> None:
    """A rank's end takes no longer with each module that its script has imported."""
    script = folder.has(
        "many.py",
        "import atexit, gc, os, sys, types\n"
        "sys.modules.update((f'of_mine_{n}', types.ModuleType('of_mine')) for n in range(200))\n"
        "def seen(phase, info, write=os.write):\n"
        "    if phase == 'start' and info['generation'] == 2: write(1, b'collected\\n')\n"
        "atexit.register(gc.callbacks.append, seen)\n",
    )
    collections = folder.run(script.name, forked=True).tail.count("collected")
    assert 0 < collections <= 2 * 3  # three for each rank


def test_forked_ranks_draw_numbers_of_their_own(folder: Folder) -> None:
    """Random numbers that nobody has seeded differ between ranks and between runs."""
    # In one write: the ranks share a pipe, and print() writes words and line ends one by one.
    line = "f'drew {random.random()} {numpy.random.random()}\\n'"
    draws = f"import os, random, numpy\nos.write(1, {line}.encode())"
    script = folder.has("draws.py", draws)
    lines = [*folder.run(script.name, forked=True).tail, *folder.run(script.name, forked=True).tail]
    drawn = [number for line in lines if line.startswith("drew") for number in line.split()[1:]]
    assert len(drawn) == len({*drawn}) == 8


def test_forked_ranks_have_a_generator_of_torch_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that has imported torch has seeded its generator; a fork gets another seed."""
    monkeypatch.setattr(process, "current_process", lambda: types.SimpleNamespace())
    with torch.random.fork_rng():
        before = torch.random.initial_seed()
        interpreter.forget_draws()
        assert torch.random.initial_seed() != before


INSTALLED = {
    "by_rank": "import os; RANK = os.environ.get('RANK')",
    "with_thread": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "with_variable": "import os; os.environ.setdefault('SET_BY_IMPORT', 'yes')",
}


def test_packages_that_can_not_be_imported_ahead(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that looks at its rank or starts a thread is left to the ranks, others are not."""
    packages = folder.path / "of-packages"
    monkeypatch.setenv("PYTHONPATH", str(packages))
    for name, text in INSTALLED.items():
        folder.has(f"{packages.name}/{name}.py", text)
    script = folder.has(
        "train.py",
        "import os, threading, sys\n"
        "ahead = [name for name in ('by_rank', 'with_thread', 'with_variable')"
        " if name in sys.modules]\n"
        "import by_rank, with_thread, with_variable\n"
        "print(ahead, by_rank.RANK == os.environ['RANK'], threading.active_count(),"
        " os.environ['SET_BY_IMPORT'])\n",
    )
    ended = folder.run(script.name, forked=True)
    assert [*ended.tail] == ["['with_variable'] True 2 yes"] * 2 + ["codes 0 0"]


@pytest.mark.parametrize(
    ("words", "why"),
    [(("TZ=UTC",), "TZ has a different value for ranks"), (("-X", "dev"), "ranks are started by")],
)
def test_ranks_that_would_differ_are_not_forked(
    words: tuple[str, ...], why: str, folder: Folder
) -> None:
    """A rank whose start a fork can't repeat is started as the launcher says, and it is told."""
    folder.has("probe.py", PROBE)
    new = folder.run(*words, "probe.py", forked=False)
    forked = folder.run(*words, "probe.py", forked=True)
    assert (new.code, forked.code) == (0, 0), forked.tail
    assert facts(forked, 1) == facts(new, 1)
    assert folder.parents is not None
    assert why in folder.parents.told()


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ON_CPUS = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}


@pytest.mark.parametrize(
    ("words", "is_unbuffered", "environment"),
    [
        ("torchrun --nproc_per_node=2 train.py", True, ONE_THREAD),
        ("torchrun --nproc_per_node=1 train.py", True, {}),
        ("accelerate launch --num_processes=1 train.py", False, {}),
        ("accelerate launch --cpu --num_processes=1 train.py", False, ON_CPUS),
        ("accelerate launch --num_processes 2 train.py", False, ONE_THREAD),
        ("accelerate launch --multi_gpu --num_processes=2 train.py", True, ONE_THREAD),
    ],
)
def test_how_launchers_start_ranks(
    words: str,
    is_unbuffered: bool,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without GPUs accelerate starts one process itself, which is not unbuffered."""
    monkeypatch.setattr(warm, "GPUS", tmp_path / "none")
    program, *rest = words.split()
    main = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}
    (tmp_path / program).write_text(f"#!{sys.executable}\nfrom {main[program]} import main\n")
    (tmp_path / program).chmod(0o755)
    python = warm.interpreter([f"./{program}", *rest], tmp_path)
    assert python.is_unbuffered == is_unbuffered
    assert python.environment({"RANK": "3", "ACCELERATE_USE_CPU": "1"}) == environment


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("probe.py", "x = 1\nfor name in {'a', 'b'}:\n    x = name\n", "the order of a set"),
        ("own.py", "print(hash('a'))", r"the order of a set may matter at .*own.py:1"),
        ("own.py", "x = (", "own.py can't be read"),
        ("random.py", "", "random in .* has the name of an installed module"),
    ],
)
def test_scripts_whose_ranks_are_not_forked(name: str, text: str, why: str, folder: Folder) -> None:
    """A script in which the order of a set may count, or a module hides another, isn't forked."""
    folder.has("probe.py", "import os\nif os.environ.get('NEVER'):\n    import own\n")
    folder.has(name, text)
    assert folder.run("probe.py", forked=True).code == 0
    assert folder.parents is not None
    told = folder.parents.told()
    assert re.search(why, told), told


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("x in {'a'}", False),
        ("sorted({1, 2})", False),
        ("len(set(x))", False),
        ("wrap({Block})", False),
        ("wrap({*blocks})", True),
        ("for y in set(x): pass", True),
        (
            "def f():\n    ids = {id(p) for p in x}\n    return [p for p in x if id(p) in ids]",
            False,
        ),
        ("def f():\n    ids = {id(p) for p in x}\n    return [p for p in ids if p in ids]", True),
        ("ids = {id(p) for p in x}\ny = 1 in ids", True),
        ("names = frozenset(x)", True),
        ("{y for y in x}", True),
        ("x.set(1)", False),
    ],
)
def test_where_the_order_of_a_set_counts(text: str, counts: bool, tmp_path: Path) -> None:
    """A set counts unless it is only looked up, read in an order, or of one element."""
    script = tmp_path / "train.py"
    script.write_text(text)
    assert bool(imports.read_script(script, tmp_path).by_hash) == counts


def test_what_a_script_imports(tmp_path: Path) -> None:
    """Installed packages are found in the script and its own modules, which are not executed."""
    (tmp_path / "own").mkdir()
    for name, text in {
        "train.py": "import own.model, os, torch.nn\nraise SystemExit",
        "own/__init__.py": "from . import data",
        "own/model.py": "from numpy import linalg, fft",
        "own/data.py": "def f():\n    import yaml",
    }.items():
        (tmp_path / name).write_text(text)
    read = imports.read_script(tmp_path / "train.py", tmp_path)
    named = {"torch.nn": (), "numpy": ("linalg", "fft"), "yaml": ()}
    assert {**dict(read.installed), "os": ()} == {**named, "os": ()}


def test_a_hanging_rank_is_ended(folder: Folder) -> None:
    """At the deadline all processes of a run are ended, and the next run is forked as before."""
    script = folder.has("hangs.py", "import sys, time\ntime.sleep(float(sys.argv[1]))")
    ended = folder.run(script.name, "600", forked=True, deadline_s=1.0)
    assert ended.code is None
    assert folder.run(script.name, "0", forked=True).code == 0


def test_what_a_rank_leaves_behind_is_ended(folder: Folder) -> None:
    """A daemon of a forked rank is found and counted."""
    text = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], env={},"
        " start_new_session=True, stdout=-3, stderr=-3)\n"
    )
    ended = folder.run(folder.has("leaves.py", text).name, forked=True)
    assert (ended.code, ended.num_left) == (0, 2)


def test_the_parent_ends_with_the_harness(folder: Folder) -> None:
    """If the harness is killed, the process that forks ends, too, and its runs with it."""
    script = folder.has(
        "hangs.py", f"import time; open({str(folder.path / 'on')!r}, 'w').close()\ntime.sleep(600)"
    )
    pids = folder.path / "pids"
    harness = os.fork()
    if harness == 0:
        folder.parents = warm.Parents(script, first=())
        command = [str(folder.launcher), "--nproc_per_node=2", script.name]
        folder.parents.prepare(command, os.environ, folder.path)
        (parent,) = folder.parents._parents.values()
        pids.write_text(str(parent._process.pid))
        folder.run(script.name, forked=True)
        os._exit(0)
    while not (folder.path / "on").exists():
        pass
    watched = [os.pidfd_open(int(pids.read_text()))]
    os.kill(harness, signal.SIGKILL)
    os.waitpid(harness, 0)
    for file in watched:
        assert select.select([file], [], [], 30.0)[0]
        os.close(file)


@pytest.mark.parametrize("auto", [False, True])
def test_the_process_that_is_started_first_forks_the_runs(
    auto: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a script with the line, too: runs have the environment in which it imported torch."""
    started: list[object] = []
    monkeypatch.setattr(warm, "_Parent", lambda *given: started.append(given))
    script = tmp_path / "train.py"
    script.write_text("")
    command = [*(sys.executable, "-m", "torch.distributed.run"), "--nproc_per_node={world_size}"]
    command.append(str(script))
    parents = warm.of(
        Namespace(launcher="auto", command=command, command_folder=None, auto=auto, world_size=())
    )
    plan = run_plan.Plan(command=tuple(command), needs=(), folder=tmp_path, auto=auto)
    words = [word.replace("{world_size}", "2") for word in command]
    usual = commands.usual_variables(command)
    parents.prepare(words, {**usual, **os.environ, **plan.observing()}, None)
    assert len(started) == 1


def forbidden(pid: int) -> int:
    """Refuse the call, as gVisor or a filter of system calls does."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("missing", [True, False], ids=["in this Python", "in this kernel"])
def test_without_pidfds_nothing_is_forked(
    missing: bool, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is launched as it is, and only once."""
    if missing:
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", forbidden)
    script = folder.has("once.py", f"open({str(folder.path / 'seen')!r}, 'a').write('x')")
    ended = folder.run(script.name, forked=True)
    assert (ended.code, ended.is_forked) == (0, False)
    assert (folder.path / "seen").read_text() == "xx", "one letter for each of two ranks"
    assert folder.parents is not None
    assert folder.parents.told() == "as-is (this Python or this kernel has no pidfd_open)"


def test_a_launch_that_has_begun_is_not_begun_again(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its warden can't be watched, the launch is refused, and its processes are ended."""
    open_pidfd = os.pidfd_open
    monkeypatch.setattr(
        os, "pidfd_open", lambda p: open_pidfd(p) if p == os.getpid() else forbidden(p)
    )
    monkeypatch.setattr(launch, "_start_subreaper", None)
    script = folder.has("never.py", "import time; time.sleep(600)")
    with pytest.raises(UsageError, match="can't be started"):
        folder.run(script.name, forked=True)
