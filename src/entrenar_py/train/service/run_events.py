"""Events that a coordinator sends its listeners during a run.

The terminal, the metrics file and TensorBoard are listeners, and none knows of another. An event is
a frozen record of what happened, never a reference to the run: a listener can keep it, and a slow
one can't see a later state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """The worker that delivered last, and how long after the median delivery."""

    rank: int
    behind_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMade:
    """`workers` made `step`, with mean loss `loss` (NaN if the coordinator is not told it).

    `step_ms` is the time since the step began, or began again. `exchange_ms` is the part from the
    last shard computed until all workers hold the average, `reduce_ms` the part in which the
    coordinator adds and averages (None in a mesh: its workers do that). `steps_per_s` is over the
    last few steps, None after the first. `bytes_in` and `bytes_out` are the coordinator's traffic
    since the step before. `last` is None if fewer than two workers delivered. `waits_ms` says how
    long each rank waited for others to compute their shards. `grad_norm` is the L2 norm of the
    gradient before clipping. `tokens_per_s` is over the last few steps, too. `backends` has the
    backend of each worker. `memory_bytes` is the peak of the run's processes on the coordinator's
    machine, `device_bytes` that of what torch holds on its GPUs. In a layer pipeline `passes_us`
    has the times of each rank's passes (`protocol.messages.Summed`), and `idle_share` is the part
    of the time in which stages waited. What is not known is None, or empty.
    """

    step: int
    num_steps: int
    loss: float
    workers: tuple[int, ...]
    step_ms: float
    exchange_ms: float | None
    reduce_ms: float | None
    steps_per_s: float | None
    bytes_in: int | None
    bytes_out: int | None
    last: Last | None
    waits_ms: Mapping[int, float]
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    backends: Mapping[int, str] = field(default_factory=dict)
    memory_bytes: int | None = None
    device_bytes: int | None = None
    idle_share: float | None = None
    passes_us: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAveraged(StepMade):
    """A step of a coordinator that only averages, over `num_samples` samples.

    `correct` of `total` predictions were right (None if it is not told). `digests` has the BLAKE3
    digest of the average of each part of the gradient.
    """

    num_samples: int
    correct: int | None
    total: int | None
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassScored:
    """Scores of one class, from 0 to 1; None where nothing is of it, or was taken for it."""

    label: str
    recall: float | None
    precision: float | None
    f1: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The model after `step` steps, on rows that it is not trained on.

    `loss` is the mean over `weight` tokens, or over as many rows if these have classes.
    `perplexity` is None for classes, `accuracy` without them. `confusion[i][j]` is the number of
    rows of class i that were taken for class j.
    """

    step: int
    loss: float
    weight: int
    perplexity: float | None
    accuracy: float | None
    classes: tuple[ClassScored, ...]
    confusion: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Any other event: its name (`what`), the current step, and its words (`text`)."""

    what: str
    step: int
    text: str


Happening: TypeAlias = StepMade | Scored | Noted
Listener = Callable[[Happening], None]
