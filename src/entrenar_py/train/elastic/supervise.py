"""Starts a rank of elastic training, says when it ends, and starts another in its place.

    torchrun --nproc_per_node=4 -m entrenar_py.supervise [--max-restarts N] train.py ...
    torchrun --nproc_per_node=4 -m entrenar_py.supervise [--max-restarts N] -m MODULE ...

A launcher such as torchrun ends or restarts all ranks when one ends. It starts supervisors instead,
one for each rank. They don't compute and stay when their rank ends. The other ranks go on
(`entrenar_py.elastic`).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import printing

if TYPE_CHECKING:
    from entrenar_py.train.elastic.launcher import Seat

_POLL_S = 0.01
_LOOK_S = 0.5  # between looks whether the rank was excluded, or the run has ended
_USAGE = 2  # the exit status of a script that is used wrongly
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class Process(Protocol):
    """What a supervisor uses of subprocess.Popen."""

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs. -9: SIGKILL ended it."""

    def kill(self) -> None:
        """Send SIGKILL."""


def supervise(
    process: Process,
    seat: Seat,
    *,
    start: Callable[[], Process],
    max_restarts: int,
    say: Callable[[str], None],
) -> int:
    """Keep a process at `seat` until the run ends: `process`, then those that `start` returns.

    Returns the exit status for the launcher. A process that ends with 2 isn't started again: it
    was used wrongly, as by its command line. If the run has not begun, neither will it elsewhere,
    and the status is 2. Otherwise, after `max_restarts`, or if it is convicted or the run is
    stopped, the seat stays empty. The status is then 0 if the others end the run, and 1 if no seat
    is left.
    """
    from entrenar_py.train.elastic.membership import Roll

    roll, name = Roll(seat.store), f"rank {seat.seat}"
    for left in range(max_restarts, -1, -1):
        status = _wait(process, roll, seat.seat)
        if not roll.has("ended"):
            roll.bury(seat.seat, by_itself=status == 0)
        if roll.has("ended"):
            return status if roll.trains(seat.seat, roll.newest()) else 0
        if status == 0 or (status == _USAGE and roll.newest() < 0):
            roll.leave(seat.seat)
            return status
        if status == _USAGE or roll.convicted(seat.seat) or roll.stopped():
            break
        if left:
            say(f"{name} ended with status {status}: starts again, {left - 1} more times")
            process = start()
    why = roll.convicted(seat.seat) or roll.stopped() or "the others go on without it"
    say(f"{name} ended with status {status} and does not start again: {why}")
    roll.leave(seat.seat)
    while not roll.has("ended"):
        if not roll.left(seat.num_seats):
            say("no rank is left")
            return 1
        time.sleep(_LOOK_S)
    return 0


def _wait(process: Process, roll: Any, seat: int) -> int:
    """Return the exit status of `process`. Kill it if the others have excluded it."""
    look = 0.0
    while (status := process.poll()) is None:
        if time.monotonic() > look:
            look = time.monotonic() + _LOOK_S
            if roll.excludes(seat):
                process.kill()
        time.sleep(_POLL_S)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Supervise a script. Its ranks' numbers and store are those of the launcher."""
    parser = argparse.ArgumentParser(
        prog="entrenar_py.supervise",
        description="Start a script that uses entrenar_py.elastic, and start it again if it ends.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=10,
        metavar="N",
        help="how often a rank is started again (default: 10)",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module")
    parser.add_argument("script", help="a Python file; with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args(arguments)
    if options.max_restarts < 0:
        parser.error(f"--max-restarts {options.max_restarts}: must be 0 or more")
    if not options.is_module and not os.path.isfile(options.script):  # noqa: PTH113
        parser.error(f"{options.script}: no such file")
    script = ["-m", options.script] if options.is_module else [options.script]
    # Unbuffered, as torchrun starts ranks: what one prints isn't lost when it is killed.
    return _run([sys.executable, "-u", *script, *options.arguments], options.max_restarts)


def _run(command: list[str], max_restarts: int) -> int:
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        # In a group of its own: torchrun sends a signal to a whole group, and `end` sends it on.
        new = subprocess.Popen(command, preexec_fn=end_with_parent, process_group=0)
        processes.append(new)
        return processes[-1]

    def end(number: int, _: object) -> None:
        """Let the rank end, as the launcher wants. It isn't started again."""
        processes[-1].send_signal(number)
        sys.exit(128 + number)

    first = start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # by nohup
            signal.signal(number, end)

    def say(text: str) -> None:
        printing.warn(f"entrenar_py.supervise: {text}")

    seat: Seat | None = None
    try:
        # torch is imported while the rank imports it, too.
        from entrenar_py.train.elastic.launcher import seat_of_launcher
        from entrenar_py.train.elastic.membership import Roll

        seat = seat_of_launcher()
        status = supervise(first, seat, start=start, max_restarts=max_restarts, say=say)
    except UsageError as error:
        first.kill()
        say(str(error))
        return 2
    except SystemExit:  # a signal of the launcher, which may start all ranks anew
        processes[-1].wait()
        if seat is not None:
            with suppress(RuntimeError):  # unless the store has ended, too
                Roll(seat.store).bury(seat.seat)
        raise
    return 128 - status if status < 0 else status


def end_with_parent() -> None:
    """Let Linux kill this process when its supervisor ends, however that is."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
