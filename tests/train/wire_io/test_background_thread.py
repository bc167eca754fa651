"""Work in threads: done in order, reported in the loop, and not reported once forgotten."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from entrenar_py.train.wire_io.processes import Task, Thread
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
