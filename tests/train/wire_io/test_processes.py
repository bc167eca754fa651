"""Worker processes are reused, replaced and ended, and none is left behind."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests
from entrenar_py.shared.errors import SystemFailure
from entrenar_py.systems import preloaded
from entrenar_py.train.wire_io.processes import Crew, Hand, Job
from tests.train.wire_io import jobs

TOP = Path(next(iter(tests.__path__))).parent
LONG_S = 20.0


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    """Return a crew for one test; its processes can import this folder's modules."""
    monkeypatch.syspath_prepend(TOP)
    made = Crew(jobs.main, preload=preloaded.of_ranks())
    yield made
    made.dismiss()


def _pid(hand: Hand) -> int:
    assert hand.answer is not None
    return int(hand.answer)


def _ended(pid: int) -> bool:
    """Return whether a process has ended, or ends within LONG_S."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    ended = bool(poll.poll(LONG_S * 1000))
    os.close(watched)
    return ended


def test_processes_are_apart_and_answer(crew: Crew) -> None:
    """Jobs given together run in different processes, none of them this one."""
    hands = [crew.give(b"pid") for _ in range(3)]
    crew.gather(LONG_S)
    pids = {_pid(hand) for hand in hands}
    assert pids == {hand.pid for hand in hands}
    assert len(pids | {os.getpid()}) == 4


def test_idle_processes_are_used_again(crew: Crew) -> None:
    """The next jobs start no new process, and have new answers."""
    first = [crew.give(b"pid"), crew.give(b"pid")]
    crew.gather(LONG_S)
    again = [crew.give(b"note"), crew.give(b"pid"), crew.give(b"pid")]
    assert again[:2] == first
    assert [hand.answer for hand in again] == [None] * 3
    crew.gather(LONG_S)
    assert len({_pid(hand) for hand in again}) == 3


def test_notes_come_before_the_answer(crew: Crew) -> None:
    """Notes of a working process are read in order, and are not its answer."""
    hand = crew.give(b"note")
    assert [hand.heard(), hand.heard()] == [b"one", b"two"]
    assert hand.answer is None
    assert hand.heard() is None
    assert _pid(hand) == hand.pid


@pytest.mark.parametrize("word", [b"die", b"leave"])
def test_a_process_that_is_gone_is_replaced(crew: Crew, word: bytes) -> None:
    """A killed process has no answer; the next job gets another process."""
    gone = crew.give(word)
    crew.gather(LONG_S)
    assert gone.answer is None
    assert _ended(gone.pid)
    other = crew.give(b"pid")
    crew.gather(LONG_S)
    assert _pid(other) != gone.pid


def test_one_that_dies_idle_is_replaced(crew: Crew) -> None:
    """No job is given to a dead process."""
    idle = crew.give(b"pid")
    crew.gather(LONG_S)
    os.kill(idle.pid, signal.SIGKILL)
    idle.process.join()
    other = crew.give(b"pid")
    crew.gather(LONG_S)
    assert _pid(other) != idle.pid


def test_who_does_not_answer_is_killed(crew: Crew) -> None:
    """Even if it is stopped; the others' answers are still taken."""
    frozen, well = crew.give(b"freeze"), crew.give(b"pid")
    assert not frozen.pipe.poll(0)
    assert well.pipe.poll(LONG_S)
    crew.gather(0.05)
    assert frozen.answer is None
    assert _ended(frozen.pid)
    assert _pid(well) == well.pid
    assert crew.give(b"pid") is well


def test_an_answer_that_nobody_hears() -> None:
    """A worker that is done when the run has ended ends in silence."""
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        job = Job(theirs)
        ours.close()
        job.note(b"one")
        job.answer(b"two")
        assert job.next() is None


def test_a_fork_server_that_ended_is_told(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal to the whole group of processes ends it, and the next start finds a closed pipe."""

    class Unborn:
        def __init__(self, **_: object) -> None:
            pass

        def start(self) -> None:
            raise EOFError("unexpected EOF")

    with monkeypatch.context() as patched:
        patched.setattr(crew._context, "Process", Unborn)
        with pytest.raises(SystemFailure, match=r"their fork server ended .*start it again"):
            crew.give(b"pid")
    assert crew.give(b"pid").pid


def test_dismissal_ends_everyone(crew: Crew) -> None:
    """Idle, busy and stopped processes are ended; the next job starts anew."""
    idle = crew.give(b"pid")
    crew.gather(LONG_S)
    busy = crew.give(b"note")
    assert busy is idle
    other = crew.give(b"pid")
    pids = [busy.pid, other.pid]
    crew.dismiss()
    assert [hand.process.is_alive() for hand in (busy, other)] == [False, False]
    assert all(map(_ended, pids))
    new = crew.give(b"pid")
    crew.gather(LONG_S)
    assert _pid(new) not in pids


def test_dismissal_ends_the_frozen(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not end by itself is killed."""
    monkeypatch.setattr("entrenar_py.train.wire_io.processes.ENDING_S", 0.05)
    frozen = crew.give(b"freeze")
    crew.dismiss()
    assert not frozen.process.is_alive()
    assert _ended(frozen.pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_group_while_modules_are_loaded(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As a terminal sends it, or a service manager: it is for the process that began.

    Meanwhile no file has a name that a killed process would leave.
    """
    command = [sys.executable, "-m", "tests.train.wire_io.signalled_crew"]
    with subprocess.Popen(
        command,
        cwd=TOP,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loads\n"
        os.killpg(process.pid, number)
        assert process.stdout.read().splitlines() == ["told", "answered", "left:"]


def test_what_is_loaded_ahead_ends_with_its_process(tmp_path: Path) -> None:
    """The fork server loads beside the process that began it, and not on for a run that ended."""
    (tmp_path / "endless.py").write_text(
        "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n", encoding="utf-8"
    )
    code = (
        "import sys\nfrom entrenar_py.train.wire_io import processes\n"
        "processes.load_ahead(['endless'])\nsys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.communicate()
    assert process.returncode == 0
    assert _ended(pid)
