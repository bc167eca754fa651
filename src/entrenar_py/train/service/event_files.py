"""Writes a run's figures as event files, which TensorBoard draws."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from entrenar_py.shared import shipped
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping, printing
from entrenar_py.train.service.run_events import Happening, Noted, Scored, StepMade

FLUSH_EVERY_S = 10


class EventFiles:
    """A listener that writes to the folder at `path`, with the number of steps made as its axis.

    A resumed run begins a file of its own, which hides later steps of the one before. If the folder
    can't be written any more, one warning is printed and the run goes on.
    """

    def __init__(self, path: Path) -> None:
        """Raises UsageError without the package, or if the folder can't be made."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                f"--tensorboard needs tensorboard ({error}); {shipped.extra_advice('tensorboard')}"
            ) from error
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"can't be made ({error.strerror}); give another folder"
            raise UsageError(f"--tensorboard {path}: {problem}") from error
        self._path, self._new_writer = path, SummaryWriter
        self._writer: Any = None
        self._is_broken = False

    def __call__(self, happening: Happening) -> None:
        """Write the figures of one event."""
        if isinstance(happening, Noted) or self._is_broken:
            return
        made = happening.step if isinstance(happening, Scored) else happening.step + 1
        try:
            if self._writer is None:
                self._writer = self._new_writer(
                    str(self._path), purge_step=made, flush_secs=FLUSH_EVERY_S
                )
            for name, value in _figures(happening):
                self._writer.add_scalar(name, value, made)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what is not written yet."""
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
    """Yield the name and value of each figure that is known."""
    if isinstance(happening, Scored):
        found = {
            "validation/loss": happening.loss,
            "validation/perplexity": happening.perplexity,
            "validation/accuracy": happening.accuracy,
        }
        for one in happening.classes:
            label = escaping.line(one.label)
            found |= {
                f"validation/recall/{label}": one.recall,
                f"validation/precision/{label}": one.precision,
                f"validation/f1/{label}": one.f1,
            }
    else:
        found = {
            "train/loss": happening.loss,
            "train/learning_rate": happening.learning_rate,
            "train/gradient_norm": happening.grad_norm,
            "pace/steps_per_s": happening.steps_per_s,
            "pace/tokens_per_s": happening.tokens_per_s,
            "memory/host_bytes": happening.memory_bytes,
            "memory/device_bytes": happening.device_bytes,
        }
        waits = happening.waits_ms.items()
        found |= {f"wait_ms/worker {rank}": waited for rank, waited in waits}
    yield from ((name, value) for name, value in found.items() if value is not None)
