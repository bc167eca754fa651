"""The run's metrics in files: JSON lines, and event files for TensorBoard."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

from entrenar_py.shared import package_data
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping, printing
from entrenar_py.train.service.run_events import Happening, Noted, Scored, StepAveraged, StepMade

# The options for a run's metrics, the same for all commands that train.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--halt-on-spike": {
        "action": "store_true",
        "help": "halt before a step if its gradient norm is over ten times the running median; "
        "without it such a step is only reported, on the screen and in the ledger",
    },
    "--tensorboard": {
        "metavar": "DIR",
        "type": Path,
        "help": "also write the figures of the run to a folder that TensorBoard draws",
    },
}
_NAMES = {StepMade: "step", StepAveraged: "step", Scored: "evaluation"}


def kind_of(happening: Happening) -> str:
    """Return `what` in the metrics' line of an event."""
    return happening.what if isinstance(happening, Noted) else _NAMES[type(happening)]


# keys that only layer pipelines have, (margin) pairs, and (rows) runs of fine-tuning
_OF_SOME = ("passes_us", "idle_share", "margin", "rows")


class Metrics:
    """A listener that appends JSON lines to the file at `path`.

    Each line is an object with `time` (seconds since 1970), `what` (`step`, `evaluation`, or a
    note's name), and the event's fields. Raises UsageError if the file can't be opened. If it can't
    be written later, one warning is printed and the run continues without it. A new file that stays
    empty is removed at the end.
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
        if last not in (b"", b"\n"):  # the previous writer died in the middle of a line
            self._write("\n")

    def __call__(self, happening: Happening) -> None:
        """Write the line of one event."""
        what = kind_of(happening)
        record = {"time": round(time.time(), 3), "what": what, **asdict(happening)}
        for key in _OF_SOME:
            if record.get(key) in (None, {}):
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
            self._warn(error)
            self._close()

    def close(self) -> None:
        """Close the file."""
        if (error := self._close()) is not None:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        problem = f"can't be written any more ({error.strerror})"
        printing.warn(f"entrenar: metrics {self._path}: {problem}; the run goes on")

    def _close(self) -> OSError | None:
        """Close the file; return the error, as of a quota that is found to be exceeded then."""
        if self._file is None:
            return None
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as error:
            return error
        if self._is_new and self._path.is_file() and not self._path.stat().st_size:
            self._path.unlink()
        return None


FLUSH_EVERY_S = 10


class EventFiles:
    """A listener that writes TensorBoard's event files to the folder at `path`, by step count.

    A resumed run begins a new file, which hides later steps of the previous file. If the folder
    can't be written later, one warning is printed and the run continues.
    """

    def __init__(self, path: Path) -> None:
        """Raise UsageError if the package is missing or the folder can't be created."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            advice = package_data.extra_advice("tensorboard")
            raise UsageError(f"--tensorboard needs tensorboard ({error}); {advice}") from error
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"can't be made ({error.strerror}); give another folder"
            raise UsageError(f"--tensorboard {path}: {problem}") from error
        self._path, self._new_writer = path, SummaryWriter
        self._writer: Any = None
        self._is_broken = False

    def __call__(self, happening: Happening) -> None:
        """Write the metrics of one event."""
        if isinstance(happening, Noted) or self._is_broken:
            return
        num_steps = happening.step if isinstance(happening, Scored) else happening.step + 1
        try:
            if self._writer is None:
                self._writer = self._new_writer(
                    str(self._path), purge_step=num_steps, flush_secs=FLUSH_EVERY_S
                )
            for name, value in _figures(happening):
                self._writer.add_scalar(name, value, num_steps)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write everything that is still buffered."""
        if self._writer is None or self._is_broken:
            return
        try:
            self._writer.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._is_broken = True
        problem = f"can't be written any more ({error.strerror or error})"
        printing.warn(f"entrenar: --tensorboard {self._path}: {problem}; the run goes on")


def _figures(happening: StepMade | Scored) -> Iterator[tuple[str, float]]:
    """Yield the name and value of each known metric."""
    if isinstance(happening, Scored):
        figures = {
            "validation/loss": happening.loss,
            "validation/perplexity": happening.perplexity,
            "validation/accuracy": happening.accuracy,
            "validation/margin": happening.margin,
        }
        for scores in happening.classes:
            label = escaping.line(scores.label)
            figures |= {
                f"validation/recall/{label}": scores.recall,
                f"validation/precision/{label}": scores.precision,
                f"validation/f1/{label}": scores.f1,
            }
    else:
        figures = {
            "train/loss": happening.loss,
            "train/learning_rate": happening.learning_rate,
            "train/gradient_norm": happening.grad_norm,
            "pace/steps_per_s": happening.steps_per_s,
            "pace/tokens_per_s": happening.tokens_per_s,
            "memory/host_bytes": happening.memory_bytes,
            "memory/device_bytes": happening.device_bytes,
        }
        waits = happening.waits_ms.items()
        figures |= {f"wait_ms/worker {rank}": waited for rank, waited in waits}
    yield from ((name, value) for name, value in figures.items() if value is not None)
