"""The run in numbers: a file of JSON lines, one a step and one for whatever else happened."""

from __future__ import annotations

import time
from dataclasses import asdict
from io import FileIO
from pathlib import Path

from entrenar_py.errors import UsageError
from entrenar_py.service.run_events import Happening, StepMade
from entrenar_py.untrusted import escaping, printing


class Metrics:
    """Writes to `path`, behind what is there; UsageError if it can't be opened.

    A line is an object with `time` (seconds since 1970), `what` (`step`, or a note's name), and the
    fields of what happened. When the file can't be written any more that is said once, and the run
    goes on without it. A file that was made here and stayed empty goes when it is closed.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._is_new = path, not path.exists()
        try:
            self._file: FileIO | None = FileIO(path, "a+")
            size = self._file.seek(0, 2)
            self._file.seek(max(size - 1, 0))
            last = self._file.read(1) if size else b""
        except OSError as error:
            raise UsageError(f"metrics {path}: can't be written ({error.strerror})") from error
        if last not in (b"", b"\n"):  # whoever wrote last died in the middle of it
            self._write("\n")

    def __call__(self, happening: Happening) -> None:
        """Writes one line."""
        what = {"what": "step"} if isinstance(happening, StepMade) else {}
        record = {"time": round(time.time(), 3), **what, **asdict(happening)}
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
        """End the writing."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        if self._is_new and self._path.is_file() and not self._path.stat().st_size:
            self._path.unlink()
