"""The run's metrics: a file of JSON lines, one for each step and one for each note."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from io import FileIO
from pathlib import Path

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping, printing
from entrenar_py.train.service.run_events import Happening, Noted, Scored, StepAveraged, StepMade

_NAMES = {StepMade: "step", StepAveraged: "step", Scored: "evaluation"}

_OF_PIPELINES = ("passes_us", "idle_share")  # keys that other runs' lines don't have


class Metrics:
    """Appends to the file at `path`; UsageError if it can't be opened.

    Each line is an object with `time` (seconds since 1970), `what` (`step`, `evaluation`, or a
    note's name), and the event's fields. If the file can't be written any more, one warning is
    printed and the run goes on without it. A file created here that stays empty is removed at the
    end.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._is_new = path, not path.exists()
        try:
            self._file: FileIO | None = FileIO(path, "a+")
            size = self._file.seek(0, 2)
            self._file.seek(max(size - 1, 0))
            last = self._file.read(1) if size else b""
        except OSError as error:
            problem = f"can't be written ({error.strerror}); give another path"
            raise UsageError(f"metrics {path}: {problem}") from error
        if last not in (b"", b"\n"):  # the last writer died in the middle of a line
            self._write("\n")

    def __call__(self, happening: Happening) -> None:
        """Write the line of one event."""
        what = {} if isinstance(happening, Noted) else {"what": _NAMES[type(happening)]}
        record = {"time": round(time.time(), 3), **what, **asdict(happening)}
        for key in _OF_PIPELINES:
            if not record.get(key):
                record.pop(key, None)
        if not isinstance(happening, Noted) and not math.isfinite(happening.loss):
            record["loss"] = None  # JSON has no NaN
        self._write(escaping.dump_json(record) + "\n")

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        left = memoryview(text.encode())
        try:
            while left.nbytes:
                left = left[self._file.write(left) :]
        except OSError as error:
            problem = f"can't be written any more ({error.strerror})"
            printing.warn(f"entrenar: metrics {self._path}: {problem}; the run goes on")
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        if self._is_new and self._path.is_file() and not self._path.stat().st_size:
            self._path.unlink()
