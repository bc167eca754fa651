"""Commands of every kind: each ends with a clear reason, and no process is left behind."""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from entrenar_py.check.command import launch, placeholders, run_plan
from entrenar_py.check.command.launch import Ended
from entrenar_py.check.rank_files.rank_file import SUFFIX
from entrenar_py.shared import process
from entrenar_py.shared.errors import UsageError
from tests.check.command import scripts, zygote


def launched(code: str, folder: Path, *, deadline_s: float = 30.0) -> Ended:
    """Return how a script ended."""
    return launch.launch(
        [sys.executable, "-c", code], folder=folder, variables={}, deadline_s=deadline_s
    )


def left_of(folder: Path) -> list[int]:
    """Return the processes that still record to `folder`."""
    return [*launch._processes(folder, session=-1, pipe=-1, leash=-1)]


def test_how_it_ended(tmp_path: Path) -> None:
    """The end of a command has its exit code and its last lines."""
    ended = launched("print('a'); print('b', flush=True); raise SystemExit(3)", tmp_path)
    assert (ended.code, ended.how, ended.tail) == (3, "exit code 3", ("a", "b"))
    killed = launched("import os; os.kill(os.getpid(), 9)", tmp_path)
    assert killed.how == "ended by SIGKILL"


def test_many_open_files(tmp_path: Path) -> None:
    """A descriptor that is too large for select.select is waited for like any other."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1024):
            opened.enter_context(Path(os.devnull).open("rb"))
        assert launched("raise SystemExit(3)", tmp_path).code == 3


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    """A command that doesn't exist is refused, and nothing runs."""
    with pytest.raises(UsageError, match="no-such-thing --x: can't be started"):
        launch.launch(["no-such-thing", "--x"], folder=tmp_path, variables={}, deadline_s=1.0)


def test_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that hangs is ended with all its processes, even those that ignore SIGTERM."""
    monkeypatch.setattr(launch, "MERCY_S", 0.5)
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    record = tmp_path / f"00000-000{SUFFIX}"
    record.touch()
    os.utime(record, (time.time() - 50, time.time() - 50))
    ended = launched(code, tmp_path, deadline_s=1.0)
    assert ended.code is None
    assert 50 < ended.quiet_s < 60, "the last record of a rank"
    assert not left_of(tmp_path)


def test_one_that_hangs_when_all_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that hangs after its ranks closed is ended soon, and the run hasn't failed."""
    monkeypatch.setattr(launch, "LEAVING_S", 0.5)
    text = (scripts.EXAMPLES / "ddp.py").read_text()
    script = tmp_path / "ddp.py"
    script.write_text(f"{text}import time\ntime.sleep(600)\n")
    told = scripts.command(script)
    (run,) = scripts.record(told, {"replica_identity"}, tmp_path / "runs").values()
    assert run.trace.end.status == "completed"


def test_a_stop_that_hangs_when_all_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped run that hangs after training is resumed, and equals the uninterrupted run."""
    monkeypatch.setattr(zygote, "LEAVING_S", 0.5)
    text = (scripts.EXAMPLES / "resume.py").read_text()
    script = tmp_path / "resume.py"
    script.write_text(f"{text}import time\ntime.sleep(600)\n")
    traces = scripts.record(
        scripts.command(script),
        {"resume"},
        tmp_path / "runs",
        world_sizes=(1,),
        launch=zygote.launch,
    )
    assert str(scripts.findings(traces, {"resume"})["resume"].verdict) == "held"


def test_children_that_outlive_it(tmp_path: Path) -> None:
    """Processes that outlive the command are ended and counted."""
    code = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
    )
    ended = launched(code, tmp_path)
    assert (ended.code, ended.num_left) == (0, 1)
    assert not left_of(tmp_path)


@pytest.mark.parametrize("known_by", ["its session", "its output"])
def test_children_without_the_environment(
    known_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes without the environment are ended, too, and their output isn't waited for."""
    monkeypatch.setattr(launch, "MERCY_S", 60.0)
    rest = {"its session": "stdout=-3, stderr=-3", "its output": "start_new_session=True"}
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, pathlib\n"
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        f" env={{}}, {rest[known_by]})\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(one.pid))\n"
    )
    ended = launched(code, tmp_path / "run")
    assert (ended.code, ended.num_left) == (0, 1)
    with suppress(ProcessLookupError):  # what was killed is readable once it has ended
        assert select.select([os.pidfd_open(int(pid.read_text()))], [], [], 30.0)[0]


def daemon(pid_file: Path, *, then: str = "") -> str:
    """Return a command that leaves a daemon behind, which has closed its files, and runs on.

    The daemon has another session, no environment and no living parent. The command ends after the
    daemon has written its process id to `pid_file`, and has done `then`.
    """
    told = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"file = open({str(pid_file)!r}, 'w'); file.write(str(os.getpid())); file.close()\n"
        "time.sleep(600)\n"
    )
    return (
        "import os, pathlib, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.closerange(0, 256)\n"
        f"        os.execve(sys.executable, [sys.executable, '-S', '-c', {told!r}], {{}})\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        f"path = pathlib.Path({str(pid_file)!r})\n"
        "while not (path.exists() and path.read_text()):\n    time.sleep(0.01)\n"
        f"{then}\n"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_a_daemon(tmp_path: Path) -> None:
    """A daemon that has left session and environment is found, told to end, killed and reaped."""
    ended = launched(daemon(tmp_path / "pid"), tmp_path / "run")
    assert (ended.code, ended.num_left) == (0, 1)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_a_command_that_stops_what_watches_it(tmp_path: Path) -> None:
    """A subreaper that the command has stopped is continued at the end, and ends the daemon."""
    stop = "os.kill(os.getppid(), 19)"  # SIGSTOP
    ended = launched(daemon(tmp_path / "pid", then=stop), tmp_path / "run", deadline_s=0.5)
    assert ended.code is None
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_the_harness_is_killed(tmp_path: Path) -> None:
    """If the harness is killed by SIGKILL, the command and its daemon end all the same."""
    code = daemon(tmp_path / "pid", then="time.sleep(600)")
    harness = os.fork()
    if harness == 0:
        launched(code, tmp_path / "run", deadline_s=600.0)
        os._exit(0)
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        time.sleep(0.01)
    pids = [int((tmp_path / "pid").read_text()), *left_of(tmp_path / "run")]
    watched = [os.pidfd_open(pid) for pid in pids]
    os.kill(harness, signal.SIGKILL)
    os.waitpid(harness, 0)
    for file in watched:
        assert select.select([file], [], [], 30.0)[0]
        os.close(file)


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """On a full disk a command that prints much goes on, and its last lines are known."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / launch.OUTPUT).symlink_to("/dev/full")
    ended = launched("print('x' * 10**6); print('last')", folder)
    assert (ended.code, ended.tail[-1]) == (0, "last")


def test_an_interrupt(tmp_path: Path) -> None:
    """An interrupt ends the command and all its processes before it is raised."""
    code = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGTERM); time.sleep(600)"
    with process.deferred_interrupts(numbers=(signal.SIGTERM,)), pytest.raises(KeyboardInterrupt):
        launched(code, tmp_path, deadline_s=60.0)
    assert not left_of(tmp_path)


def test_one_that_prints_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning and the last lines of endless output are kept."""
    monkeypatch.setattr(launch, "OUTPUT_BYTES_MAX", 1000)
    ended = launched("print('x' * 10**6); print('last')", tmp_path)
    assert ended.output.stat().st_size == 1000
    assert ended.tail[-1] == "last"
    assert "characters left out" in ended.tail[0]
    assert len("".join(ended.tail)) < 1000


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("", "nothing was recorded: add `obs = entrenar_py.observe"),
        (
            "raise SystemExit(7)",
            "nothing was recorded: exit code 7: .*; check that the script that trains calls",
        ),
        ("import time; time.sleep(600)", "not finished after .* s: no rank had begun"),
        (
            "import os; open(os.environ['ENTRENAR_TRACE_DIR'] + '/00000-000.rank.jsonl', 'w')"
            ".write('nonsense' + chr(10))",
            "exit code 0, and the records of its ranks are damaged: .*rank.jsonl:1: not JSON",
        ),
        (
            "import os, shutil; shutil.rmtree(os.environ['ENTRENAR_TRACE_DIR'])",
            "2-workers, was removed while it ran; exit code 0",
        ),
    ],
)
def test_a_command_that_does_not_train(code: str, reason: str, tmp_path: Path) -> None:
    """A command that doesn't train runs once, and every clause is inconclusive with the reason."""
    # On a machine with much to do, an interpreter takes seconds to start.
    deadline_s = 2.0 if "sleep" in code else scripts.DEADLINE_S
    command = (sys.executable, "-c", code, "{world_size}")
    traces = scripts.record(command, {"parity"}, tmp_path / "runs", deadline_s=deadline_s)
    (run,) = traces.values()
    assert run.trace.end.status == "failed"
    found = scripts.findings(traces, {"parity", "coverage"})
    assert {str(one.verdict) for one in found.values()} == {"inconclusive"}
    for one in found.values():
        assert re.search(reason, one.reason), one.reason


def test_a_rank_that_never_enters_the_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The absent rank is named, with the call that it never made and the place of every rank."""
    monkeypatch.setattr(launch, "LEAVING_S", 5.0)
    text = (scripts.EXAMPLES / "plain_loop.py").read_text()
    late = (
        "    if step == 2:\n"
        f"        open(f'{tmp_path}/{{rank}}.here', 'x').close()\n"
        "        if rank == 1:\n            __import__('time').sleep(600)\n"
    )
    place = "    dist.all_reduce(count)\n"
    assert text.count(place) == 1
    script = tmp_path / "plain_loop.py"
    script.write_text(text.replace(place, late + place))
    told = scripts.command(script)
    # The deadline is not waited for: both are where they hang, and then have LEAVING_S.
    both = [tmp_path / f"{rank}.here" for rank in range(2)]
    traces = scripts.record(
        told,
        {"replica_identity"},
        tmp_path / "runs",
        launch=lambda *given, **named: launch.launch(
            *given, **{**named, "is_over": lambda: all(one.exists() for one in both)}
        ),
    )
    reason = traces[tmp_path / "runs/2-workers.jsonl"].trace.end.reason
    lines = script.read_text().splitlines()
    asleep = lines.index(late.splitlines()[-1]) + 1
    waits = lines.index(place.rstrip()) + 1
    assert "steps made: rank 0 2, rank 1 2" in reason
    assert f"rank 0 in all_reduce ({script}:{waits})" in reason
    assert f"rank 1 in no collective ({script}:{asleep})" in reason
    assert "rank 1 never reached all_reduce" in reason


def test_another_number_of_workers_than_was_asked_for(tmp_path: Path) -> None:
    """A command without {world_size} always runs with the same number of workers."""
    told = [*scripts.command(scripts.EXAMPLES / "ddp.py")]
    told[told.index("{world_size}")] = "1"
    recorded = scripts.record(told, {"replica_identity"}, tmp_path / "runs", launch=zygote.launch)
    (run,) = recorded.values()
    reason = "it was launched for 2 workers and ran with 1: put {world_size} into the command"
    assert reason in run.trace.end.reason


def test_a_value_is_planted_where_a_gradient_is(tmp_path: Path) -> None:
    """A parameter that takes no part gets no gradient: the NaN strikes another tensor."""
    text = (scripts.EXAMPLES / "plain_loop.py").read_text()
    unused = "class Unused(torch.nn.Sequential):\n    def __init__(self, *rest):\n"
    unused += "        super().__init__(*rest)\n"
    unused += "        self._parameters = {'idle': torch.nn.Parameter(torch.ones(1))}\n\n\n"
    text = text.replace("torch.manual_seed(rank)", f"{unused}torch.manual_seed(rank)")
    text = text.replace("model = torch.nn.Sequential(", "model = Unused(")
    text = text.replace(
        "        assert parameter.grad is not None\n",
        "        if parameter.grad is None:\n            continue\n",
    )
    script = tmp_path / "plain_loop.py"
    script.write_text(text)
    traces = scripts.record(
        scripts.command(script), {"finiteness"}, tmp_path / "runs", launch=zygote.launch
    )
    finding = scripts.findings(traces, {"finiteness"})["finiteness"]
    assert str(finding.verdict) == "held"


def test_placeholders() -> None:
    """A misspelt placeholder is refused; other braces are left alone."""
    placeholders.require_known(["a{world_size}b", "{}", "{'x': 1}", "{"])
    with pytest.raises(UsageError, match="did you mean 'world_size'"):
        placeholders.require_known(["--n={worldsize}"])
    placeholders.require_known(["cd ${HOME}; train {world_size}"])  # a shell's own
    with pytest.raises(UsageError, match="did you mean 'steps'"):
        placeholders.require_known(["train {world_size} --steps {stpes}"])
    with pytest.raises(UsageError, match=r"for the text \{epoch\} itself, write \{\{epoch\}\}"):
        placeholders.require_known(["filename={epoch}-{step}"])
    placeholders.require_known(["filename={{epoch}}-{{step}}"])


@pytest.mark.parametrize("changes", [{"seed": 3}, {"num_steps": 4}, {"num_epochs": 3}])
def test_an_option_that_the_command_can_t_hear_of(changes: dict[str, int]) -> None:
    """An option is refused, not ignored, if the command has no placeholder for it."""
    with pytest.raises(UsageError, match="so it would never get the value"):
        run_plan.Plan(command=("train",), needs=(), folder=Path(), **changes)  # type: ignore[arg-type]
    command = ("train", "{seed}", "{steps}", "{epochs}")
    run_plan.Plan(command=command, needs=(), folder=Path(), **changes)  # type: ignore[arg-type]


def test_a_folder_that_is_somebodys(tmp_path: Path) -> None:
    """A folder that no run has made is not removed."""
    (tmp_path / "2-workers").mkdir()
    (tmp_path / "2-workers" / "mine").write_text("x")
    with pytest.raises(UsageError, match="was not made by an earlier run; give another folder"):
        scripts.record((sys.executable, "-c", ""), {"replica_identity"}, tmp_path)
    assert (tmp_path / "2-workers" / "mine").exists()


@pytest.mark.parametrize(
    "program", ["/no/such/prog", "no-such-prog", "", str(Path(__file__).parent)]
)
def test_a_program_that_is_not_there(program: str) -> None:
    """A missing program is reported before anything runs, unless a placeholder names it."""
    with pytest.raises(UsageError, match="can't be started: there is no such program"):
        launch.require_program(program)
    launch.require_program(sys.executable)
    launch.require_program("{workdir}/train")


def test_a_program_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`./train.sh` is the file in the folder where the command runs, not a program on PATH."""
    (tmp_path / "train.sh").touch(0o755)
    launch.require_program("./train.sh", tmp_path)
    monkeypatch.chdir(tmp_path)
    launch.require_program("./train.sh")
