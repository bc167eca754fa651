"""Events that a coordinator sends its listeners during a run.

The terminal, the metrics file and TensorBoard are independent listeners. An event is a frozen
record, never a reference to the run, so a listener can keep it, and a slow listener can't see a
later state.
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
    """`workers` applied `step`, with mean loss `loss` (NaN if the coordinator doesn't know it).

    `step_ms` is the time since the step began or restarted. `exchange_ms` is the part from the last
    computed shard until all workers hold the average. `reduce_ms` is the part in which the
    coordinator adds and averages (None in a mesh, where workers do that). `steps_per_s` is over the
    last few steps; None after the first step. `bytes_in` and `bytes_out` are the coordinator's
    traffic since the previous step. `last` is None if fewer than two workers delivered. `waits_ms`
    says how long each rank waited for the other ranks' shards. `grad_norm` is the L2 norm of the
    gradient before clipping. `tokens_per_s` is over the last few steps, too. `backends` has the
    backend of each worker. `memory_bytes` is the peak memory of the run's processes on the
    coordinator's machine, `device_bytes` the peak of torch's memory on its GPUs. In a layer
    pipeline, `passes_us` has the times of each rank's passes (`train.wire.messages.Summed`), and
    `idle_share` is the fraction of time in which stages waited. Unknown values are None or empty.
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

    `correct` of `total` predictions were right (None if unknown). `digests` has the BLAKE3 digest
    of each averaged part of the gradient.
    """

    num_samples: int
    correct: int | None
    total: int | None
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassScored:
    """Scores of one class, from 0 to 1; None if the class has no rows, or no predictions."""

    label: str
    recall: float | None
    precision: float | None
    f1: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The scores of the model after `step` steps, on rows that it isn't trained on.

    `loss` is the mean over `weight` tokens, or over `weight` rows if the rows have classes or are
    pairs. `perplexity` is None for rows with classes and pairs, `accuracy` for all other rows. The
    accuracy of pairs is the share in which the chosen side has the higher reward, and `margin`,
    None for other rows, the mean difference of both rewards. `confusion[i][j]` is the number of
    rows of class i that were classified as class j. `rows` is the digest of the rows.
    """

    step: int
    loss: float
    weight: int
    perplexity: float | None
    accuracy: float | None
    classes: tuple[ClassScored, ...]
    confusion: tuple[tuple[int, ...], ...]
    margin: float | None = None
    rows: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Any other event: its name (`what`), the current step, and its description (`text`)."""

    what: str
    step: int
    text: str


Happening: TypeAlias = StepMade | Scored | Noted
Listener = Callable[[Happening], None]
