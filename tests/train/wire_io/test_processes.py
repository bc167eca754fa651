"""Work in a thread, and in worker processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tests
from entrenar_py.shared.errors import SystemFailure
from entrenar_py.systems import preload
from entrenar_py.train.wire_io.processes import Crew, Hand, Job, Task, Thread
from tests.train.wire_io import jobs
from tests.train.wire_io.fakes import go, until


def test_work_is_done_elsewhere_and_told_here() -> None:
    """In the order in which it was given."""

    async def story() -> None:
        here, told, thread = threading.get_ident(), list[tuple[int, bool]](), Thread()

        def told_here(number: int) -> None:
            told.append((number, threading.get_ident() == here))

        for number in range(3):

            def work(number: int = number) -> int:
                assert threading.get_ident() != here
                return number

            thread.run(work, told_here)
        await until(lambda: len(told) == 3)
        assert told == [(0, True), (1, True), (2, True)]

    go(story())


def test_forget_waits_for_what_is_in_work() -> None:
    """Then no work runs, none is reported, and waiting work is not begun."""

    async def story() -> None:
        begun, go_on = threading.Event(), threading.Event()
        done, told, thread = list[str](), list[str](), Thread()

        def slow() -> str:
            begun.set()
            assert go_on.wait(10)
            done.append("slow")
            return "slow"

        thread.run(slow, told.append)
        thread.run(lambda: done.append("waiting"), lambda _: told.append("waiting"))
        assert begun.wait(10)
        threading.Timer(0.05, go_on.set).start()
        thread.forget()
        assert done == ["slow"]
        thread.run(lambda: "new", told.append)
        await until(lambda: bool(told))
        assert (done, told) == (["slow"], ["new"])

    go(story())


def test_what_work_raises_is_raised_in_the_loop() -> None:
    """The loop's exception handler gets it."""

    async def story() -> None:
        raised = asyncio.get_running_loop().create_future()

        def broke(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            raised.set_result(context["exception"])

        asyncio.get_running_loop().set_exception_handler(broke)
        Thread().run(lambda: 1 // 0, lambda _: None)
        assert isinstance(await raised, ZeroDivisionError)

    go(story())


def test_a_stopped_task_knows_it() -> None:
    """Work that checks `stopped` ends soon."""

    async def story() -> None:
        with ThreadPoolExecutor(1) as executor:
            running, told = threading.Event(), list[None]()

            def work(task: Task[None]) -> None:
                running.set()
                while not task.stopped:
                    threading.Event().wait(0.001)

            task = Task(executor, work, told.append)
            assert running.wait(10)
            task.stop()
            await asyncio.sleep(0)
            assert told == []

    go(story())


TOP = Path(next(iter(tests.__path__))).parent
LONG_S = 20.0


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    """Return a crew for one test; its processes can import this folder's modules."""
    monkeypatch.syspath_prepend(TOP)
    made = Crew(jobs.main, preload=preload.of_ranks())
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
