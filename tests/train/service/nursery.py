"""Forks `entrenar` processes from one that has torch loaded, since loading takes seconds.

`start` forks one, with its output in a pipe. Run as a script, this module is the forking process.
It takes a request and its pipe at a time, and answers with the new process id and later the exit
code.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import functools
import gc
import importlib
import importlib.util
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from select import select
from typing import Any, NoReturn, TypeAlias

MESSAGE_BYTES_MAX = 2**16
# What befalls a process (`kill`, `stop`, `reset`, which cuts its connections off, or `clock`, whose
# wall clock jumps back), when (once a message was `sent` or `got`, or `before` it is sent), at
# messages of which name, and the step from which on.
Strike: TypeAlias = tuple[str, str, str, int]
_FINE_TUNING = ("finetune", "distill")  # commands
CHECKPOINT_MODULES = (
    "peft",
    "tests.train.model.conversions",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)  # what a process imports that trains one of the tests'
_OF_FINE_TUNING = (
    "entrenar_py.compute.wgpu",
    "entrenar_py.train.finetune.serving",
    "entrenar_py.train.stages.stage_step",
    *CHECKPOINT_MODULES,
)


class Child:
    """One forked process. `output` is its standard output and error, as a text file."""

    def __init__(self, nursery: Nursery, pid: int, output: int) -> None:
        self._nursery, self.pid = nursery, pid
        self.stdout = os.fdopen(output, encoding="utf-8")

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._nursery.code_of(self.pid, wait_s=0)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code once the process has ended; TimeoutError if that takes longer."""
        code = self._nursery.code_of(self.pid, wait_s=timeout_s)
        if code is None:
            raise TimeoutError(f"process {self.pid} has not ended after {timeout_s} s")
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process has not ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The forking process, which ends with this one."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.train.service.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[3],
            )

    def start(self, arguments: Sequence[str], **told: Any) -> Child:
        """Fork `entrenar` with `arguments`; `told` is what `_become` takes besides."""
        ours, theirs = os.pipe()
        told["arguments"] = [*arguments]
        request = json.dumps(told).encode()
        socket.send_fds(self._socket, [request], [theirs])
        os.close(theirs)
        while "began" not in (said := self._hear()):
            pass
        return Child(self, said["began"], ours)

    def code_of(self, pid: int, *, wait_s: float) -> int | None:
        """Return the exit code of `pid`, or None if it still runs after `wait_s`."""
        while pid not in self._codes:
            if not select([self._socket], [], [], wait_s)[0]:
                return None
            self._hear()
        return self._codes[pid]

    def close(self) -> None:
        """End the forking process."""
        self._socket.close()
        self._process.wait()

    def _hear(self) -> dict[str, Any]:
        heard = self._socket.recv(MESSAGE_BYTES_MAX)
        assert heard, "the process with torch has died"
        said: dict[str, Any] = json.loads(heard)
        if "ended" in said:
            self._codes[said["ended"]] = said["code"]
        return said


def without_gpu(libraries: Sequence[str]) -> tuple[str, ...]:
    """Return those of `libraries` that a process may load whose forks use a GPU.

    peft imports bitsandbytes, which opens the GPU, and no process that is forked then can open it.
    """
    opens = Path("/dev/nvidiactl").exists() and importlib.util.find_spec("bitsandbytes")
    return tuple(name for name in libraries if not opens or name != "peft")


def start(
    arguments: Sequence[str],
    *,
    limit_bytes: int | None,
    cache: str | None = None,
    strikes: Sequence[Strike] = (),
) -> Child:
    """Start `entrenar` with `arguments`; no file that it writes may grow beyond `limit_bytes`.

    It keeps files in the folder `cache`, by default where this process does. It is struck as the
    `strikes` say, once by each, and prints a line for it.
    """
    told = {"limit_bytes": limit_bytes, "cache": cache, "strikes": [*strikes]}
    return _nursery().start(arguments, **told)


@functools.cache
def _nursery() -> Nursery:
    made = Nursery()
    atexit.register(made.close)
    return made


# --- the process ----------------------------------------------------------------------------------


def serve(asked: socket.socket) -> None:
    """Fork on request until the socket is closed."""
    from entrenar_py import entrenar  # noqa: F401
    from entrenar_py.train import cli  # noqa: F401
    from entrenar_py.train.service import coordinator, retraining, worker  # noqa: F401  (bring torch)

    gc.freeze()  # collections in forked processes pass over all modules

    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select([asked, woken], [], [])
        if woken in ready:
            woken.recv(MESSAGE_BYTES_MAX)
            _tell_ended(asked)
        if asked not in ready:
            continue
        request, pipes, _, _ = socket.recv_fds(asked, MESSAGE_BYTES_MAX, 1)
        if not request:
            return
        told = json.loads(request)
        if told["cache"] is not None or told["arguments"][0] in _FINE_TUNING:
            _load_libraries()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for held in (asked, woken, wakes):
                held.close()
            _become(pipes[0], **told)
        os.close(pipes[0])
        asked.send(json.dumps({"began": pid}).encode())


@functools.cache
def _load_libraries() -> None:
    """Import what fine-tuning needs, which takes seconds in each process that doesn't have it."""
    for name in without_gpu(_OF_FINE_TUNING):
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()


def _tell_ended(asked: socket.socket) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            with suppress(OSError):
                asked.send(json.dumps({"ended": ended[0], "code": code}).encode())


def _strike_at(strikes: list[Strike]) -> None:
    """Strike this process at the messages that `start` describes, each time at one of them."""
    from entrenar_py.train.wire import frames

    plain_encode, plain_filled = frames.Encoder.encode, frames.Decoder.filled
    left: list[Strike] = [(how, when, name, step) for how, when, name, step in strikes]

    def look(when: str, message: Any) -> None:
        at, step = (when, type(message).__name__), getattr(message, "step", sys.maxsize)
        one = next((one for one in left if one[1:3] == at and step >= one[3]), None)
        if one is None:
            return
        left.remove(one)
        befall = functools.partial(_befall, *one[:3])
        if when == "sent":  # it is written once this turn of the loop is over
            asyncio.get_running_loop().call_soon(befall)
        else:
            befall()

    def encode(self: Any, message: Any, payload: Any = b"") -> Iterator[Any]:
        look("before", message)
        yield from plain_encode(self, message, payload)
        look("sent", message)

    def filled(self: Any, num_bytes: int) -> Any:
        received = plain_filled(self, num_bytes)
        if received is not None:
            look("got", received.message)
        return received

    frames.Encoder.encode = encode  # type: ignore[method-assign]
    frames.Decoder.filled = filled  # type: ignore[method-assign]


def _befall(how: str, when: str, name: str) -> None:
    os.write(2, f"struck: {how} {when} {name}\n".encode())
    if how == "reset":
        _reset_connections()
    elif how == "clock":  # it jumps back, by a day more each time
        earlier = time.time
        time.time = lambda: earlier() - 86_400.0
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def _reset_connections() -> None:
    """Reset this process's TCP connections: both ends of each get ECONNRESET."""
    disconnected = bytes(16)  # a socket address of the family AF_UNSPEC
    for handle in Path("/proc/self/fd").iterdir():
        try:
            one = socket.socket(fileno=os.dup(int(handle.name)))
        except OSError:  # it is no socket, or the folder's own handle
            continue
        with one:
            is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ctypes.CDLL(None).connect(one.fileno(), disconnected, len(disconnected))


def _fork_fork_servers() -> None:
    """Let the fork server of workers be a fork, too: this process has loaded what it would load."""
    start = util.spawnv_passfds

    def fork(path: bytes, arguments: Sequence[Any], handles: Sequence[int]) -> int:
        command = arguments[-1]
        if not isinstance(command, str) or "forkserver" not in command:  # a resource tracker
            return int(start(path, arguments, handles))
        if pid := os.fork():
            return pid
        try:
            for handle in Path("/proc/self/fd").iterdir():
                if int(handle.name) not in (0, 1, 2, *handles):
                    with suppress(OSError):  # the folder's own handle
                        os.close(int(handle.name))
            exec(command, {})
        finally:
            os._exit(0)

    util.spawnv_passfds = fork  # type: ignore[assignment]


def _become(
    output: int,
    *,
    arguments: list[str],
    limit_bytes: int | None,
    cache: str | None,
    strikes: list[Strike],
) -> NoReturn:
    """Run the command in this forked process, and exit."""
    from entrenar_py import entrenar as cli

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if cache is not None:
        os.environ["XDG_CACHE_HOME"] = cache
    code: int | str | None = 1
    try:
        for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(source, stream)
        os.close(output)
        # Streams of what these were before would seek in them.
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        if strikes:
            _strike_at(strikes)
        _fork_fork_servers()
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
        code = cli.main(arguments)
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:  # noqa: BLE001  (told as Python tells it)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
