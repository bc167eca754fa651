"""The file that an observed rank writes: its events, and the arrangement of the ranks."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from entrenar_py.check.observing import FOLDER, tensors
from entrenar_py.check.observing.subject import Subject
from entrenar_py.check.rank_files.rank_file import RankFile
from entrenar_py.shared import trace


class Recording:
    """The file of one `life` of a rank (0 is the first); closed when the process ends, or earlier.

    On SIGUSR1 the rank's stack is written to a second file next to it, even while the process waits
    in a call.
    """

    def __init__(self, subject: Subject, header: Mapping[str, Any]) -> None:
        self._subject = subject
        self._constants = tensors.constants(subject.optimizers)
        self._has_rules = False
        self._compression = ""
        self._steps_copies = False
        self._outer: dict[str, Any] = {}
        self._pid = os.getpid()
        self._file = RankFile(
            Path(os.environ[FOLDER]),
            {
                **header,
                "pid": os.getpid(),
                "values": subject.values,
                **tensors.facts(subject.model, subject.optimizers),
            },
        )
        self.life = self._file.life
        self._stack = self._file.stack.open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stack)
        atexit.register(self._leave)

    def write(self, events: Sequence[trace.Event]) -> None:
        """Write `events`, preceded by the layout and the pieces of tensors if these are new."""
        if (news := self._subject.news()) is not None:
            self._file.note("layout", **news)
        self._file.append(events)

    def compressed(self, compression: str, step: int) -> None:
        """Write the dtype in which gradients are sent from `step` on, if it has changed."""
        if compression != self._compression:
            self._compression = compression
            self._file.note("compressed", to=compression, step=step)

    def synchronised(self, rule: Mapping[str, Any]) -> None:
        """Write the rule of the outer step of ranks that train independently, if it has changed."""
        if rule != self._outer:
            self._outer = dict(rule)
            self._file.note("outer", **rule)

    def look_at_optimizers(self, step: int) -> None:
        """Write the optimizers' rules in `step` if they changed, and whether they step copies."""
        if not self._steps_copies and self._subject.is_stepped_as_copies:
            self._steps_copies = True
            self._file.note("copies")
        constants = tensors.constants(self._subject.optimizers)
        if constants != self._constants:
            self._file.note("changed")
        if constants != self._constants or not self._has_rules:
            self._constants, self._has_rules = constants, True
            self._file.append(self._subject.rules(step, constants))

    def note_inner(self) -> None:
        """Write that an optimizer inside the observed one takes the steps."""
        self._file.note("inner")

    def sampling(self, news: Mapping[str, Any]) -> None:
        """Write `news` about how samples are drawn, if there are any."""
        if news:
            self._file.note("sampling", **news)

    def leave_out(self, buffers: Iterable[str]) -> None:
        """Write that these buffers depend on the rank's own samples."""
        self._file.note("local", buffers=sorted(buffers))

    def note_data(self, facts: Mapping[str, Any]) -> None:
        """Write facts about the data that became known after the header was written."""
        self._file.note("data", **facts)

    def note_limit(self, where: str) -> None:
        """Write that the harness ends the run after this step; `where` is "" for the last one."""
        self._file.note("limit", **({"where": where} if where else {}))

    def remove(self) -> None:
        """Close the files and remove them."""
        self.close()
        self._file.path.unlink(missing_ok=True)
        self._file.stack.unlink(missing_ok=True)

    def close(self, problem: str = "") -> None:
        """Write that training has ended, with its error `problem` ("" if none). Close the files."""
        self._file.close(problem)
        faulthandler.unregister(signal.SIGUSR1)
        self._stack.close()
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        # A forked child inherits this handler, but must not write to the record.
        if os.getpid() != self._pid:
            return
        error = getattr(sys, "last_value", None)
        self._file.close("" if error is None else f"{type(error).__name__}: {error}")
