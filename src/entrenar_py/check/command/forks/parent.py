"""The parent of all forks, and the process that represents the command of one launch.

The launcher runs in a fork of the second process, and requests ranks from it through a replaced
`subprocess.Popen`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from . import interpreter, processes
from .imports import PREFIXES, RANKS, Imports, read_script
from .processes import FORWARDED, fork, receive, send, tell

_STREAMS = (("stdout", 1), ("stderr", 2))


def replace_popen(channel: socket.socket) -> None:
    """Replace `subprocess.Popen` in this process: the process at `channel` forks its ranks."""
    asking = threading.Lock()

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        """A process like subprocess.Popen.

        If `channel` forked it, its end is reported on the channel.
        """

        _report: int | None = None

        def __init__(self, args: Any, **settings: Any) -> None:
            if not self._is_forked(args, settings):
                super().__init__(args, **settings)

        def _is_forked(self, args: Any, settings: Mapping[str, Any]) -> bool:
            known = {"env", "stdout", "stderr", "start_new_session"}
            if isinstance(args, str) or not {*settings} <= known or args[0] != sys.executable:
                return False
            environment = settings.get("env")
            message = {
                "words": [os.fspath(word) for word in args],
                "environment": dict(os.environ if environment is None else environment),
                "session": bool(settings.get("start_new_session")),
            }
            report, theirs = os.pipe()
            outputs = [_number(settings.get(name), at) for name, at in _STREAMS]
            with asking:
                send(channel, message, [*outputs, theirs])
                os.close(theirs)
                answer = receive(channel)
            if answer is None or not answer[0]["pid"] or os.read(report, 8) != b"started\n":
                os.close(report)
                return False
            self.args, self.pid, self._report = args, answer[0]["pid"], report
            self.stdin = self.stdout = self.stderr = self.returncode = None
            self._child_created = False
            self._waitpid_lock = threading.Lock()
            return True

        def poll(self) -> int | None:
            if self._report is None:
                return super().poll()
            with suppress(subprocess.TimeoutExpired):
                self.wait(0)
            return self.returncode

        def wait(self, timeout: float | None = None) -> int:
            if self._report is None:
                return super().wait(timeout)
            if self.returncode is None:
                if not select.select([self._report], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                line = os.read(self._report, 32).decode()
                self.returncode = int(line.split()[1]) if line else -signal.SIGKILL
            assert self.returncode is not None, "it was read"
            return self.returncode

    subprocess.Popen = Popen  # type: ignore[assignment, misc]
    for name, module in [*sys.modules.items()]:
        if name.startswith("torch.distributed.elastic") and hasattr(module, "Popen"):
            vars(module)["Popen"] = Popen


def _number(stream: Any, usual: int) -> int:
    if stream is None:
        return usual
    return stream if isinstance(stream, int) else int(stream.fileno())


AUTO = "ENTRENAR_AUTO"
STARTUP = Path(__file__).parents[2] / "observing" / "auto" / "startup" / "sitecustomize.py"
Warden = Callable[[Sequence[str], Callable[[Sequence[str]], Any]], None]


class Parent:
    """Forks a warden for each request that arrives on the socket `control`."""

    def __init__(self, control: socket.socket, imports: Imports, warden: Warden) -> None:
        self._control, self._imports, self._warden = control, imports, warden

    def serve(self) -> NoReturn:
        """Answer requests until the socket is closed, and report how each warden ends."""
        woken = processes.woken_by_children()
        ready = select.poll()
        ready.register(self._control, select.POLLIN)
        ready.register(woken, select.POLLIN)
        reports: dict[int, int] = {}
        while True:
            for file, _ in ready.poll():
                if file == woken:
                    for pid, code in processes.ended(woken):
                        if pid in reports:
                            tell(reports.pop(pid), f"ended {code}\n")
                    continue
                if (request := receive(self._control)) is None:
                    os._exit(0)
                message, (control, status, output, report) = request
                pid = fork(partial(self._guard, message, control, status, output))
                for one in (control, status, output):
                    os.close(one)
                os.write(report, f"started {pid}\n".encode())
                reports[pid] = report

    def _guard(self, message: dict[str, Any], control: int, status: int, output: int) -> None:
        """Act as the warden of one launch."""
        self._control.close()
        processes.settle(self._imports.files, {control, status, output})
        os.setsid()
        processes.set_standard_files(output, output)
        os.close(output)
        os.chdir(message["cwd"])
        # Python itself sets this in the C locale.
        coerced = {k: text for k, text in self._imports.before.items() if k == "LC_CTYPE"}
        interpreter.set_environment({**coerced, **message["environment"]})
        started = partial(self._start, message["words"], status)
        words = [str(control), str(status), *map(str, message["seconds"])]
        self._warden(words, started)

    def _start(self, words: Sequence[str], status: int, _: Sequence[str]) -> Any:
        pid = fork(Command(words, status, self._imports).serve)
        return types.SimpleNamespace(pid=pid, returncode=None)


class Command:
    """The process that represents the command.

    It forks the launcher, and ranks for the launcher.
    """

    def __init__(self, words: Sequence[str], status: int, imports: Imports) -> None:
        self._words, self._status, self._imports = words, status, imports
        self._reports: dict[int, int] = {}

    def serve(self) -> NoReturn:
        """Fork ranks until the launcher has ended, then end with its exit code or signal."""
        processes.settle(self._imports.files, {self._status})
        os.setsid()
        channel, ours = socket.socketpair()
        launcher = fork(partial(self._launch, ours))
        ours.close()
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: processes.kill(launcher, number))
        woken = processes.woken_by_children()
        ready = select.poll()
        ready.register(channel, select.POLLIN)
        ready.register(woken, select.POLLIN)
        while True:
            for file, _ in ready.poll():
                if file == woken:
                    for pid, code in processes.ended(woken):
                        if pid == launcher:
                            processes.end_like(code)
                        if pid in self._reports:
                            tell(self._reports.pop(pid), f"ended {code}\n")
                elif (request := receive(channel)) is None:
                    ready.unregister(channel)
                else:
                    self._answer(channel, *request)

    def _answer(self, channel: socket.socket, message: dict[str, Any], files: list[int]) -> None:
        """Fork a rank, unless a new interpreter would be in a different state."""
        reason = _why_no_fork(message["words"], message["environment"], self._imports)
        pid = 0
        if not reason:
            pid = fork(partial(self._be_rank, message, files))
            self._reports[pid] = files.pop()
        else:
            tell(self._status, f"cold {reason}\n", closes=False)
        for one in files:
            os.close(one)
        send(channel, {"pid": pid})

    def _launch(self, channel: socket.socket) -> None:
        # The replaced `Popen` keeps this channel open.
        processes.settle(self._imports.files, {channel.fileno()})
        replace_popen(channel)
        interpreter.run_as_main(self._words)

    def _be_rank(self, message: dict[str, Any], files: Sequence[int]) -> None:
        """Act as a rank of the script."""
        output, errors, report = files
        processes.settle(self._imports.files, {*files})
        if message["session"]:
            os.setsid()
        os.write(report, b"started\n")
        os.close(report)
        processes.set_standard_files(output, errors)
        for one in (output, errors):
            os.close(one)
        interpreter.set_environment({**message["environment"], **_brought(message, self._imports)})
        interpreter.forget_draws()
        _observe()
        interpreter.run_as_main(message["words"])


def _brought(message: dict[str, Any], imports: Imports) -> dict[str, str]:
    told, before = message["environment"], imports.before
    return {
        name: text for name, text in imports.changed.items() if told.get(name) == before.get(name)
    }


def _why_no_fork(words: Sequence[str], environment: Mapping[str, str], imports: Imports) -> str:
    """Return why a new interpreter would differ from a forked one; "" if it would not."""
    if words[0] != sys.executable:
        return f"ranks run {words[0]}, and the launcher runs {sys.executable}"
    flags, module, rest = interpreter.options_of(words[1:])
    if not rest or flags not in ((), ("-u",)):
        return f"ranks are started by {' '.join(words[:4])}"
    if flags != interpreter.options_of(sys.orig_argv[1:])[0]:
        return "ranks and launcher are started with different -u options"
    for name in sorted({*environment, *imports.before}):
        if environment.get(name) != imports.before.get(name):
            if name not in RANKS and not name.startswith(PREFIXES):
                return f"{name} has a different value for ranks"
            if name in imports.names:
                return f"an import reads {name}"
    if any(not os.path.isabs(one) for one in environment.get("PYTHONPATH", "/").split(os.pathsep)):
        return "PYTHONPATH has a relative path"
    folder = os.getcwd() if module else os.path.dirname(os.path.realpath(rest[0]))
    loaded = {name.partition(".")[0] for name in sys.modules}
    if hidden := sorted(_modules_in(folder) & loaded):
        return f"{hidden[0]} in {folder} has the name of an installed module"
    return ""


def _modules_in(folder: str) -> set[str]:
    """Return the names of the modules in `folder`.

    A subfolder counts if it has an `__init__.py`.
    """
    names = set()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((".py", ".so", ".pyc")):
                names.add(entry.name.partition(".")[0])
            elif os.path.isfile(os.path.join(entry.path, "__init__.py")):
                names.add(entry.name)
    return names


def _observe() -> None:
    """Observe a script without the line `observe`, as `sitecustomize` does in a new interpreter."""
    if os.environ.get(AUTO):
        spec = importlib.util.spec_from_file_location("entrenar_startup", STARTUP)
        assert spec is not None, "it is a Python file"
        assert spec.loader is not None, "it is a Python file"
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def main(warden: Warden) -> None:
    """Import what the settings name, then serve requests. `warden` is `subreaper.main`."""
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    imports = Imports()
    try:
        imported = read_script(Path(settings["script"]), Path(settings["folder"]))
        if imported.by_hash:
            raise ValueError(f"the order of a set may matter at {imported.by_hash}")
        unwanted = imports.make(settings["first"], imported.installed, settings["without"])
    except (ImportError, ValueError) as error:
        send(control, {"cold": str(error)})
        return
    if unwanted:
        settings["without"].append(unwanted)
        os.set_inheritable(control.fileno(), True)
        words = [*sys.orig_argv[:-1], json.dumps(settings)]
        os.execve(sys.executable, words, imports.before)
    imports.files = processes.open_files() - {control.fileno()}
    send(control, {"cold": ""})
    Parent(control, imports, warden).serve()
