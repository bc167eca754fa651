"""Measurements of a run: memory, gradient norms and their spikes, and step times."""

from __future__ import annotations

import itertools
import math
import resource
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from entrenar_py.shared import trace
from entrenar_py.shared.errors import CheckpointError
from entrenar_py.train.service.run_events import Last

_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss, in bytes


class Memory(NamedTuple):
    """Peaks in bytes: of resident memory, and of torch's memory on GPUs (None without a GPU)."""

    host_bytes: int
    device_bytes: int | None


def memory_peak() -> Memory:
    """Return the peaks of this process. Neither loads torch nor initializes a GPU."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT_BYTES
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return Memory(resident, None)
    devices = range(torch.cuda.device_count())
    return Memory(resident, sum(torch.cuda.max_memory_reserved(device) for device in devices))


def total(peaks: Iterable[Memory]) -> Memory:
    """Return the sum of the peaks of several processes, even if they were at different times."""
    held = list(peaks)
    devices = [peak.device_bytes for peak in held if peak.device_bytes is not None]
    return Memory(sum(peak.host_bytes for peak in held), sum(devices) if devices else None)


NORMS_KEY = "grad_norms"  # in the progress of a checkpoint; absent in earlier builds
FACTOR = 10.0
STEPS_KEPT = 200
STEPS_LEAST = 20  # with fewer norms the median is unreliable: the first gradients vary a lot


class GradientNorms:
    """The L2 norms of the last STEPS_KEPT steps, before clipping."""

    def __init__(self, norms: Iterable[float] = ()) -> None:
        self._norms = deque(norms, maxlen=STEPS_KEPT)

    def add(self, norm: float) -> None:
        """Add the norm of an applied step."""
        self._norms.append(norm)

    def exceeded(self, norm: float) -> float | None:
        """Return the median if `norm` is more than FACTOR times as large; otherwise None.

        Returns None, too, if fewer than STEPS_LEAST steps are known, or if the median is 0.
        """
        if len(self._norms) < STEPS_LEAST:
            return None
        median = statistics.median(self._norms)
        return median if 0 < FACTOR * median < norm else None

    def spike(self, step: int, norm: float) -> trace.Spike | None:
        """Return a Spike if `norm` makes `step` one; None if it is not a spike."""
        median = self.exceeded(norm)
        if median is None:
            return None
        return trace.Spike(step=step, grad_norm=norm, median=median, num_steps=len(self._norms))

    def to_record(self) -> list[float]:
        """Return the entry for a checkpoint, as JSON values."""
        return list(self._norms)


def of_checkpoint(progress: Mapping[str, Any], path: Path) -> GradientNorms:
    """Return the norms in `progress`, which the checkpoint at `path` has; empty without an entry.

    Raises CheckpointError if the entry is malformed.
    """
    noted = progress.get(NORMS_KEY, [])
    if not (isinstance(noted, list) and len(noted) <= STEPS_KEPT and all(map(_is_norm, noted))):
        raise CheckpointError(
            f"checkpoint {path}: {NORMS_KEY} is not a list of up to {STEPS_KEPT} norms; use an "
            "earlier checkpoint"
        )
    return GradientNorms(noted)


def _is_norm(value: object) -> bool:
    return type(value) is float and math.isfinite(value) and value >= 0


def say(spike: trace.Spike) -> str:
    """Return a phrase that says how far a spike is above the median of the previous steps."""
    norm, median = spike.grad_norm, spike.median
    return (
        f"step {spike.step}: gradient norm {norm:.4g} is {norm / median:.0f} times {median:.4g}, "
        f"the median of the last {spike.num_steps} steps"
    )


def say_made(spike: trace.Spike, clip_norm: float | None) -> str:
    """Return a note that a spike's step was applied, clipped to `clip_norm` unless that is None."""
    return f"{say(spike)}; {'not clipped' if clip_norm is None else f'clipped to {clip_norm:g}'}"


def say_halted(spike: trace.Spike) -> str:
    """Return the reason of a run that halts before the step of a spike."""
    return f"{say(spike)}: training halted before any update (--halt-on-spike)"


STEPS_AVERAGED = 20


class Times(NamedTuple):
    """The times of one step, as in `StepMade`; None for a time that was not measured."""

    step_ms: float
    exchange_ms: float | None
    reduce_ms: float | None
    steps_per_s: float | None
    tokens_per_s: float | None


class Stopwatch:
    """Measures the steps of a run with `clock`, which returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        # Times at which steps were applied, and their numbers of tokens.
        self._made: deque[tuple[float, int | None]] = deque(maxlen=STEPS_AVERAGED + 1)
        self._delivered: dict[int, float] = {}  # rank -> time of its last delivery
        self._computed: dict[int, float] = {}  # rank -> time when its last shards were computed
        self._exchange_s: float | None = None

    def begin(self) -> None:
        """Note that a step begins or restarts."""
        self._began = self._clock()
        self._delivered.clear()
        self._computed.clear()
        self._exchange_s = None

    def computed(self, rank: int) -> None:
        """Note that `rank` has computed shards and will deliver them."""
        self._computed[rank] = self._clock()

    def exchanged(self) -> None:
        """Note that all workers hold the average. Only the first call in a step counts."""
        if self._computed and self._exchange_s is None:
            self._exchange_s = self._clock() - max(self._computed.values())

    def delivered(self, rank: int) -> None:
        """Note that `rank` has delivered shards."""
        self._delivered[rank] = self._clock()

    def made(self, *, reduce_s: float, num_tokens: int | None = None) -> Times:
        """Return the times of the step just applied, of `num_tokens`.

        `reduce_s` is the time for adding and averaging, in seconds.
        """
        now = self._clock()
        self._made.append((now, num_tokens))
        passed = now - self._made[0][0]
        tokens = [number for _, number in itertools.islice(self._made, 1, None)]
        known = [number for number in tokens if number is not None]
        return Times(
            step_ms=1e3 * (now - self._began),
            exchange_ms=None if self._exchange_s is None else 1e3 * self._exchange_s,
            reduce_ms=1e3 * reduce_s if reduce_s else None,
            steps_per_s=len(tokens) / passed if passed > 0 else None,
            tokens_per_s=sum(known) / passed if passed > 0 and known == tokens else None,
        )

    def last(self) -> Last | None:
        """Return the worker that delivered last in this step, or None if fewer than two did."""
        if len(self._delivered) < 2:
            return None
        rank = max(self._delivered, key=self._delivered.__getitem__)
        behind = self._delivered[rank] - statistics.median(self._delivered.values())
        return Last(rank=rank, behind_ms=1e3 * behind)

    def waits_ms(self, ranks: Iterable[int]) -> dict[int, float]:
        """Return how long each of `ranks` waited in this step until all shards were computed.

        A rank without a shard waited since the step began. The result is empty if no shard was
        computed.
        """
        last = max(self._computed.values(), default=None)
        if last is None:
            return {}
        return {rank: 1e3 * (last - self._computed.get(rank, self._began)) for rank in ranks}
