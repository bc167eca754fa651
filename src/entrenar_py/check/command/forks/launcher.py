"""The launcher's side: ranks that it starts are forked by another process, at its request."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .messages import receive, send

_STREAMS = (("stdout", 1), ("stderr", 2))


def replace_popen(channel: socket.socket) -> None:
    """Have ranks that this process starts by `subprocess.Popen` forked by the one at `channel`."""
    asking = threading.Lock()

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        """A process; one that `channel` has forked is waited for by its report."""

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
