"""End a process after its last step, from within the script and on all ranks alike."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

TRIES = 3  # a script that catches SystemExit as often is ended without its consent
PATIENCE_S = 10.0  # for the script's own `finally` and exit handlers; collectives may wait for ever


class Ending:
    """Ends this process once it `is_due`, with exit code 0.

    `SystemExit` lets the script unwind: context managers close files and process groups, exit
    handlers end a loader's workers. The process ends without them if they take too long.
    """

    def __init__(self) -> None:
        self.is_due = False
        self._tries = 0
        self._pid = os.getpid()
        # Early, so that it runs after the exit handlers of everything that was imported since. The
        # interpreter itself isn't taken down: gloo's threads sometimes abort it then.
        atexit.register(self.at_exit)

    def leave(self) -> NoReturn:
        """End the process; called where the script begins a step that shall not be made."""
        self._tries += 1
        if self._tries == 1:
            watchdog = threading.Timer(PATIENCE_S, self._end)
            watchdog.daemon = True
            watchdog.start()
        if self._tries > TRIES or threading.current_thread() is not threading.main_thread():
            self._end()
        raise SystemExit(0)

    def at_exit(self) -> None:
        """End at once if the script was made to leave."""
        if self._tries and os.getpid() == self._pid:
            self._end()

    def _end(self) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)
