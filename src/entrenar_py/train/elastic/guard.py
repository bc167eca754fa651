"""A thread that ends exchanges if the process's main thread can't, since it waits for the GPU.

A driver that loads a kernel, and a script that synchronises with a GPU, wait for all that is queued
there. An exchange with a rank that has ended or is frozen never ends by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from entrenar_py.train.elastic.group import NcclGroup
from entrenar_py.train.elastic.membership import Ending

_POLL_S = 0.1
_GRACE_S = 1.0  # for the main thread to notice the end of its generation
_ANSWER_S = 1.0  # for exchanges to be over


class Guard:
    """Watches over the exchanges of a generation that `group` connects, until it is closed.

    `deadline_s` returns how long they may take.
    """

    def __init__(self, group: NcclGroup, ending: Ending, deadline_s: Callable[[], float]) -> None:
        self._group, self._ending, self._deadline_s = group, ending, deadline_s
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
            if self._ending.interrupted:
                if not self._closed.wait(_GRACE_S):
                    with suppress(RuntimeError):  # without a store nobody can commit
                        self._ending.void()
                    self._group.cut()
                return
            seen, deadline_s = self._seen, self._deadline_s()
            if time.monotonic() - seen <= deadline_s:
                continue
            if self._is_idle():
                self.see()  # the script computes something that takes long
            elif self._seen == seen and not self._closed.is_set():
                with suppress(RuntimeError):
                    self._ending.interrupt(
                        f"an exchange between ranks took longer than {deadline_s:g} s, and "
                        "a rank waits for its GPU"
                    )

    def _is_idle(self) -> bool:
        """Return whether all exchanges are over, or will be in a moment."""
        waiting = threading.Thread(target=self._group.wait, daemon=True)
        waiting.start()
        waiting.join(_ANSWER_S)
        return not waiting.is_alive()
