"""The events of one run. The module `ledger` defines how they are stored.

Events do not depend on the trainer: the reference trainer, a torch script and a real cluster record
the same events. A field is None or empty if a trainer does not reveal it; a judge that needs the
field then reports that it is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from entrenar_py.shared.trace.tensors import Tensors

_NONE: Tensors = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a run. `kind`, its name in the file, is the class name in lower case."""

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Event):
    """Worker `rank` starts from this state: at the beginning of a run, after joining, or resumed.

    - `step`: the next step.
    - `local`: buffers that depend on the worker's own samples.
    - `trainable`, `frozen`: the names of parameters, in order.
    - `decayed`: the names of parameters with weight decay, or None if unknown.
    - `progress`: the position that a checkpoint must restore (epoch, offset, schedule step).
    - `shapes`: the shapes of whole parameters, as far as they are known.
    - `extra`: state besides the model, with names `holder/tensor`. It has averages of the model,
      under the names of its parameters, and frozen modules.
    """

    step: int
    rank: int
    weights: Tensors
    optimizer: Tensors = field(default_factory=lambda: _NONE)
    buffers: Tensors = field(default_factory=lambda: _NONE)
    local: Tensors = field(default_factory=lambda: _NONE)
    trainable: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    decayed: tuple[str, ...] | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    resumed: bool = False
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    extra: Tensors = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(Event):
    """Worker `rank` computed the loss and gradient of the samples `ids`, in this order.

    - `shard`: the logical shard, or the rank's micro-batch index if the trainer has no shards.
    - `loss_sum`: the sum of the losses of all samples or tokens, or None if unknown.
    - `weight`: the number of these samples or tokens.
    - `finite`: true if loss and gradient hold no NaN or Inf.
    - `draws`: a digest of the first random numbers that dropout drew, which identifies the stream.
    - `contents`: for each of `ids`, a few numbers computed from the model's input. Samples with
      equal contents have equal numbers, up to rounding.
    - `gradient`: the sum over the samples, up to a factor common to all shards; empty if not
      revealed.
    - `unknown`: the reason why the samples are not known, if `ids` is empty because of that.
    - `made`: whether the script itself generated the model's input (for example by sampling), from
      samples that it had loaded before.
    - `slope`: the derivative of the value on which `backward` was called with respect to the mean
      loss; None if unknown.
    - `evaluating`: whether the model was in evaluation mode, with dropout off.
    - `evaluated`: whether a forward pass without gradient was made in evaluation mode since the
      rank's previous micro-batch.
    - `swapped`: whether a forward pass without gradient since then was made with other weights than
      the rank's last step left.
    - `terms`: the sums and means that make up the value on which `backward` was called, as the
      autograd graph shows them. Each has its number of elements (0: unknown), the factor of each
      element, and the numbers that it was divided by, in order.
    """

    step: int
    epoch: int
    rank: int
    shard: int
    ids: tuple[int, ...]
    loss_sum: float | None
    weight: float
    finite: bool
    draws: str | None = None
    contents: tuple[tuple[float, ...], ...] = ()
    gradient: Tensors = field(default_factory=lambda: _NONE)
    unknown: str = ""
    made: bool = False
    slope: float | None = None
    evaluating: bool = False
    evaluated: bool = False
    swapped: bool = False
    terms: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection(Event):
    """Worker `rank` draws its samples only from `ids`, a part of the data set."""

    rank: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(Event):
    """Worker `rank` took optimizer step `step`. The event has the worker's state after the step.

    - `loss`: the mean over `weight` samples (or tokens) that the worker reports, or None.
    - `gradient`: the averaged gradient before clipping; `grad_norm` is its L2 norm.
    - `applied_norm`: the L2 norm after clipping.
    - `learning_rate`: the rate of this step; `rates` has the rates of tensors that differ from it.
    - `finite`: true if the new weights hold no NaN or Inf.

    Only for a user's trainer:

    - `local`: buffers that depend on the worker's own samples.
    - `kept`: the tensors with a gradient that was not cleared after an earlier step, each with the
      first step that its gradient still contains.
    - `summed`: for each tensor, the indices of the worker's shards that its gradient contains. A
      tensor is left out if these are all shards of the step with a gradient for it. If ranks share
      a model, () stands for a rank with unknown shards.
    - `edited`: the weights, just before this step, that something other than the optimizer changed
      after the previous update.
    - `schedule`: the position of the learning-rate schedule.
    - `metric`: the best value so far that the worker passed to a schedule that follows a metric
      (`ReduceLROnPlateau`).
    - `extra`: state besides the model, as in Start. If a script updates its average of the weights
      after the step, this is the average after the previous step.
    - `unclipped`: the gradient that the script passed to torch's `clip_grad_norm_`.

    Only for a sharpness-aware script, which moves the weights along the gradient of one pass and
    computes a second gradient at the new weights:

    - `climbed`: the tensors that were not yet moved back when the optimizer stepped.
    - `mixed`: the tensors with a first gradient that was not cleared before the second one.
    """

    step: int
    rank: int
    loss: float | None
    weight: float
    learning_rate: float
    finite: bool
    weights: Tensors
    optimizer: Tensors = field(default_factory=lambda: _NONE)
    buffers: Tensors = field(default_factory=lambda: _NONE)
    local: Tensors = field(default_factory=lambda: _NONE)
    gradient: Tensors = field(default_factory=lambda: _NONE)
    grad_norm: float | None = None
    applied_norm: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)
    summed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    edited: Tensors = field(default_factory=lambda: _NONE)
    schedule: int | None = None
    extra: Tensors = field(default_factory=lambda: _NONE)
    unclipped: Tensors = field(default_factory=lambda: _NONE)
    climbed: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()
    metric: float | None = None

    def rate_of(self, name: str) -> float:
        """Return the learning rate of the tensor `name` in this step."""
        return self.rates.get(name, self.learning_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronised(Event):
    """Worker `rank` synchronised with the others after `step`, and continues from `weights`.

    Only workers that take some steps alone record it. `optimizer` is the state of the outer
    optimizer, which all workers share; the state of the inner optimizer is in Update. `collectives`
    is the number of collective calls of the synchronisation, `collectives_alone` that of the
    worker's local steps before it.
    """

    step: int
    rank: int
    weights: Tensors
    optimizer: Tensors = field(default_factory=lambda: _NONE)
    buffers: Tensors = field(default_factory=lambda: _NONE)
    collectives: int | None = None
    collectives_alone: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership(Event):
    """Worker `rank` joined or left at step `step`; `change` says which."""

    step: int
    rank: int
    change: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected(Event):
    """A planted fault took effect in `tensor`, which is set even if the fault names no tensor."""

    fault: Mapping[str, Any]
    step: int | None = None
    rank: int | None = None
    shard: int | None = None
    tensor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit(Event):
    """Each of `ranks` computed logical shard `shard` of `step`, and the copies were compared.

    - `alike`: for each copy, the index of the first copy with the same bits.
    - `culprit`: the rank with a copy that differs from two equal ones, first in `element` of
      `tensor`; the copy was discarded.
    - `disputed`: the ranks that ever disagreed with another, even if they have left.

    The copy of a single rank is used, unless the rank is in `disputed`. The Shard event comes from
    a rank with a used copy.
    """

    step: int
    shard: int
    ranks: tuple[int, ...]
    alike: tuple[int, ...]
    culprit: int | None = None
    tensor: str | None = None
    element: int | None = None
    disputed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted(Event):
    """The scenario's mutant took part: a function that it replaces was called."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt(Event):
    """Training stopped on purpose at step `step`, before any update of that step.

    `rank`, `shard`, `tensor` and `ids` say where the cause is; `reason` is the message.
    """

    step: int
    reason: str
    rank: int | None = None
    shard: int | None = None
    tensor: str | None = None
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Event):
    """Worker `rank` wrote a checkpoint with this state before step `step`."""

    step: int
    rank: int
    weights: Tensors
    optimizer: Tensors = field(default_factory=lambda: _NONE)
    buffers: Tensors = field(default_factory=lambda: _NONE)
    progress: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Event):
    """The names, shapes and dtypes of the gradients that `backend` produced, in order.

    `backend` is "model" for the gradients that the model declares.
    """

    backend: str
    entries: tuple[tuple[str, tuple[int, ...], str], ...]
    rank: int | None = None
    device: str = ""
    software: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Event):
    """The fallback chain tried `backend`.

    It worked if `served`, else `reason` says why it failed.
    """

    backend: str
    served: bool
    reason: str = ""
    device: str = ""
    software: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Product(Event):
    """One matrix product on a backend, compared with the CPU and with float64.

    - `shape`: (m, k, n).
    - `error_cpu`: the largest absolute difference from the CPU.
    - `error_f64`: the absolute difference from float64 at `element`, where it is largest relative
      to its rounding bound. `bound` is that bound.
    - `stated`: true if the contract gives an absolute tolerance for this shape and range of values.
    """

    backend: str
    device: str
    software: bool
    shape: tuple[int, int, int]
    result_shape: tuple[int, ...]
    layout: str
    magnitude: float
    finite: bool
    error_cpu: float
    error_f64: float
    bound: float
    stated: bool
    digest: str
    element: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Event):
    """The peak memory of worker `rank` in bytes, its budget, and the estimate made before the run.

    On `cpu` the peak is resident memory, otherwise device memory. `reported_bytes` is the device's
    memory size, or None if it reports none.
    """

    rank: int
    backend: str
    peak_bytes: int
    baseline_bytes: int
    estimate_bytes: int
    budget_bytes: int
    reported_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Event):
    """Worker `rank` starts with `held_bytes` of parameters, as pieces or whole tensors.

    `num_parts` ranks together should hold all parameters, `whole_bytes` in size, exactly once.
    """

    rank: int
    num_parts: int
    held_bytes: int
    whole_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried(Event):
    """A message was encoded, then decoded from `pieces` pieces.

    `sent` and `got` are the digests of the message before and after; `got` is None if nothing was
    decoded. `allocated_bytes` is the peak of memory during decoding.
    """

    message: str
    payload_bytes: int
    pieces: int
    sent: str
    got: str | None
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Event):
    """Damaged or malformed bytes were read. `error` is the exception, None if they were accepted.

    `claimed_bytes` is the length that the bytes announced, `allocated_bytes` the memory that
    reading allocated.
    """

    case: str
    error: str | None
    claimed_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(Event):
    """A peer asked to join.

    `entitled` says whether it may join, `let_in` whether it was admitted.
    """

    case: str
    entitled: bool
    let_in: bool
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced(Event):
    """The average that worker `rank` holds in step `step`, compared with the mean of known terms.

    `roundings` is the largest deviation from the float64 mean, at `element`, in units of 2^-24
    times the mean of the terms' absolute values; inf if the average is not finite. `error` is the
    largest absolute deviation of any element, or None if it was not recorded.
    """

    step: int
    rank: int
    num_elements: int
    roundings: float
    element: int
    error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic(Event):
    """All messages of one kind that `rank` (None: the coordinator) exchanged in the run.

    `direction` is "sent" or "got". `peer` is the other side: "coordinator" or "worker". `bytes`
    counts all bytes of these messages on the socket, including `payload_bytes`.
    """

    rank: int | None
    peer: str
    direction: str
    message: str
    messages: int
    payload_bytes: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Event):
    """The run ended: `completed`, `halted` (on purpose) or `failed` (see `reason`)."""

    status: str
    reason: str = ""


E = TypeVar("E", bound=Event)
