"""Launch ranks from one process that has imported torch, which takes seconds.

`launch` replaces `entrenar_py.check.command.launch.launch` for commands that start `forked.py`. Run
as a script, this module is that process. It reads one request a line, and answers it with a process
id and then with how that process ended.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from entrenar_py.check.command.launch import OUTPUT, TAIL_LINES, Ended
from entrenar_py.check.observing import FOLDER

LEAVING_S = 15.0  # processes that hang when they take themselves down do not end at all
LOOK_EVERY_S = 0.2
FORKED_S = 120.0


def launch(
    command: Sequence[str],
    *,
    folder: Path,
    variables: Mapping[str, str],
    deadline_s: float,
    is_over: Callable[[], bool],
    is_called_off: Callable[[], bool] = lambda: False,
    cwd: Path | None = None,
) -> Ended:
    """Run the ranks of a script to their end or their deadline."""
    folder.mkdir(parents=True, exist_ok=True)
    output, started = folder / OUTPUT, time.monotonic()
    zygote = _zygote()
    assert zygote.stdout is not None, "it was asked for"
    told = {**variables, FOLDER: str(folder)}
    here = str(cwd or Path.cwd())
    request = {"arguments": command[1:], "output": str(output), "variables": told, "cwd": here}
    _write(zygote.stdin, request)
    pid = _read(zygote.stdout)["pid"]
    deadline, leaving, in_time = started + deadline_s, False, True
    while not select.select([zygote.stdout], [], [], LOOK_EVERY_S)[0]:
        if not leaving and is_over():
            leaving, deadline = True, min(deadline, time.monotonic() + LEAVING_S)
        if in_time and (time.monotonic() > deadline or is_called_off()):
            in_time = False
            os.killpg(pid, signal.SIGKILL)
    code = _read(zygote.stdout)["code"]
    return Ended(
        code=code if in_time else None,
        seconds=time.monotonic() - started,
        tail=tuple(output.read_text(errors="replace").splitlines()[-TAIL_LINES:]),
        output=output,
        num_left=0,
    )


def forked(script: Path, world_size: int, *arguments: str, folder: Path) -> Ended:
    """Run a script with `forked.py`; its output and records go to `folder`."""
    launcher = Path(__file__).with_name("forked.py")
    return launch(
        [sys.executable, str(launcher), str(world_size), str(script), *arguments],
        folder=folder,
        variables={},
        deadline_s=FORKED_S,
        is_over=lambda: False,
    )


@functools.cache
def _zygote() -> subprocess.Popen[bytes]:
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.check.command.zygote"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # read once, when torch is loaded
    )
    atexit.register(_end, started)
    return started


def _end(zygote: subprocess.Popen[bytes]) -> None:
    """Close the requests, upon which the process ends."""
    zygote.communicate()


def _write(pipe: Any, message: Mapping[str, Any]) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def _read(pipe: Any) -> dict[str, Any]:
    line = pipe.readline()
    assert line, "the process with torch has died"
    message: dict[str, Any] = json.loads(line)
    return message


# --- the process ------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests until there are no more."""
    from tests.check.command import forked  # brings torch

    gc.freeze()  # whatever looks through all objects passes over those that ranks have from here
    for line in sys.stdin.buffer:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(forked.main, request)
        with suppress(OSError):  # it did so itself, or has ended: whoever is first
            os.setpgid(pid, pid)
        _write(sys.stdout.buffer, {"pid": pid})
        _, status = os.waitpid(pid, 0)
        _write(sys.stdout.buffer, {"code": os.waitstatus_to_exitcode(status)})


def _become(main: Callable[[], int], request: Mapping[str, Any]) -> NoReturn:
    """Turn this process into the command; nothing of the process's state is undone."""
    code = 1
    try:
        os.setpgid(0, 0)
        printed = os.open(request["output"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, printed), (2, printed)):
            os.dup2(source, stream)
        os.environ.update(request["variables"])
        os.chdir(request["cwd"])
        sys.argv = list(request["arguments"])
        code = main()
    except Exception:  # noqa: BLE001  (told as Python tells it)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
