"""A thread that ends exchanges if the process's main thread can't, since it waits for the GPU.

A driver that loads a kernel, and a script that synchronises with a GPU, wait for all that is queued
there. An exchange with a rank that has ended or is frozen never ends by itself.
"""

from __future__ import annotations

import threading
import time

from entrenar_py.train.elastic.group import Group
from entrenar_py.train.elastic.membership import Membership

_POLL_S = 0.1
_GRACE_S = 1.0  # for the main thread to notice the end of its generation
_ANSWER_S = 1.0  # of a driver to a question that waits for nothing


class Guard:
    """Watches over the exchanges of a generation that `group` connects, until it is closed."""

    def __init__(self, group: Group, members: Membership, deadline_s: float) -> None:
        self._group, self._members, self._deadline_s = group, members, deadline_s
        self._closed = threading.Event()
        self.see()
        threading.Thread(target=self._run, name="entrenar-elastic-guard", daemon=True).start()

    def see(self) -> None:
        """Note that the main thread goes on."""
        self._seen = time.monotonic()

    def close(self) -> None:
        """Stop. The main thread has noticed the generation's end."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_POLL_S):
            if self._members.interrupted:
                if not self._closed.wait(_GRACE_S):
                    self._group.cut()
                return
            if time.monotonic() - self._seen <= self._deadline_s:
                continue
            if self._is_idle():
                self.see()  # the script computes something that takes long
            elif not self._closed.is_set():
                self._members.interrupt(
                    f"an exchange between ranks took longer than {self._deadline_s:g} s, and a "
                    "rank waits for its GPU"
                )

    def _is_idle(self) -> bool:
        """Return whether all exchanges are over. A driver that doesn't answer waits for one."""
        answers: list[bool] = []
        asking = threading.Thread(target=lambda: answers.append(self._group.is_idle), daemon=True)
        asking.start()
        asking.join(_ANSWER_S)
        return answers == [True]
