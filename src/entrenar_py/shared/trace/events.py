"""The events of one run. The module `ledger` defines how they are stored.

Events do not depend on the trainer: the reference trainer, a torch script and a real cluster all
record the same ones. A field that a trainer does not reveal is None or empty, and a judge that
needs it reports that.
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
    """Worker `rank` starts from this state: at the beginning, after joining, or after a resume.

    - `step`: the next step.
    - `local`: buffers that depend on the worker's own samples.
    - `trainable`, `frozen`: the names of parameters, in order.
    - `decayed`: the names of parameters with weight decay, or None if unknown.
    - `progress`: the position that a checkpoint must restore (epoch, offset, schedule step).
    - `shapes`: the shapes of whole parameters, as far as they are known.
    - `extra`: state besides the model, by `holder/tensor`: copies of the model (averages), under
      the names of its parameters, and frozen modules.
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
    """Worker `rank` computed the loss and gradient of the samples `ids` (in this order).

    - `shard`: the logical shard, or the rank's micro-batch index if the trainer has no shards.
    - `loss_sum`: the sum of the losses of all samples or tokens, or None if unknown.
    - `weight`: the number of these samples or tokens.
    - `finite`: true if loss and gradient hold no NaN or Inf.
    - `draws`: identifies the random stream: a digest of the first numbers that dropout drew.
    - `contents`: for each of `ids`, a few numbers computed from what the model was given. They are
      equal, up to rounding, if the samples have equal contents.
    - `gradient`: the sum over the samples, up to a factor common to all shards, if revealed.
    - `unknown`: the reason why the samples are not known, if `ids` is empty for that.
    - `made`: whether the script created or sampled what its model was given, from samples that it
      had before.
    - `slope`: the derivative, with respect to the mean loss, of the value at which the backward
      pass began; None if unknown.
    - `evaluating`: whether the model was in evaluation mode, with dropout off.
    - `evaluated`: whether a pass without gradient was made in that mode since the rank's previous
      micro-batch.
    - `terms`: the sums and means at which the backward pass began, as the graph shows them. Each
      has the number of elements (0: unknown), the factor of each of them, and the numbers that it
      was divided by, in order.
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
    terms: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection(Event):
    """Worker `rank` trains only on the samples `ids` of the data set, and draws no others."""

    rank: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(Event):
    """Worker `rank` took optimizer step `step`. Holds the worker's state after it.

    - `loss`: the mean over `weight` samples (or tokens) that the worker reports, or None.
    - `gradient`: the averaged gradient before clipping; `grad_norm` is its L2 norm.
    - `applied_norm`: the L2 norm after clipping.
    - `learning_rate`: the rate of this step; `rates` has the tensors with different rates.
    - `finite`: true if the new weights hold no NaN or Inf.

    Of a user's trainer:

    - `local`: buffers that depend on the worker's own samples.
    - `kept`: the tensors with a gradient that was not cleared after it was applied before, with the
      first step that is still in it.
    - `summed`: the numbers of the worker's shards that a tensor's gradient holds, unless these are
      all shards of the step with a gradient for the tensor. If ranks share a model, () stands for a
      rank with unknown shards.
    - `edited`: the weights, right before this step, that something other than the optimizer has
      changed since the previous update.
    - `schedule`: the position of the learning rate's schedule.
    - `metric`: the best value so far that the worker gave to a schedule that follows a value
      (`ReduceLROnPlateau`).
    - `extra`: state besides the model, as in Start. An average that is updated after the step has
      the value of the previous step.
    - `unclipped`: the gradient that the script gave to torch's `clip_grad_norm_`.

    Of a script that moves the weights along the gradient of one pass, and computes a second
    gradient there (sharpness-aware):

    - `climbed`: the tensors that had not been moved back when the optimizer stepped.
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
        """Return the learning rate of the tensor `name`."""
        return self.rates.get(name, self.learning_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronised(Event):
    """Worker `rank` synchronised with the others after `step`, and continues from `weights`.

    Recorded if workers take some steps without the others. `optimizer` is the state of the outer
    optimizer, which all workers share; the state of the inner one is in Update. `collectives` is
    the number of collective calls of the synchronisation, `collectives_alone` that of the worker's
    steps before it.
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
    """Worker `rank` joined or left (`change`) at step `step`."""

    step: int
    rank: int
    change: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected(Event):
    """A planted fault took effect. It changed `tensor`, which is given if the fault names none."""

    fault: Mapping[str, Any]
    step: int | None = None
    rank: int | None = None
    shard: int | None = None
    tensor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit(Event):
    """Each of `ranks` computed logical `shard` of `step`, and the copies were compared.

    - `alike`: for each copy, the index of the first copy with the same bits.
    - `culprit`: the rank that differed from two others, first in `element` of `tensor`; its copy
      was discarded.
    - `disputed`: the ranks that ever disagreed, even if they have left.

    Copies of a single rank count, unless it is in `disputed`. The Shard event comes from a rank
    that counts.
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

    `rank`, `shard`, `tensor` and `ids` name the culprit; `reason` is the message.
    """

    step: int
    reason: str
    rank: int | None = None
    shard: int | None = None
    tensor: str | None = None
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Event):
    """`rank` wrote a checkpoint with this state before step `step`."""

    step: int
    rank: int
    weights: Tensors
    optimizer: Tensors = field(default_factory=lambda: _NONE)
    buffers: Tensors = field(default_factory=lambda: _NONE)
    progress: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Event):
    """The gradients that `backend` produced: (name, shape, dtype) in order.

    `backend` is "model" for the gradients that the model declares.
    """

    backend: str
    entries: tuple[tuple[str, tuple[int, ...], str], ...]
    rank: int | None = None
    device: str = ""
    software: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Event):
    """The backend chain tried `backend`, which worked (`served`) or failed with `reason`."""

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
    - `error_f64`: the absolute difference from float64 at `element`, where it is the largest one
      relative to `bound`, its rounding bound.
    - `stated`: true at the shape and range for which the contract gives an absolute tolerance.
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
    """Peak memory of worker `rank` in bytes, its budget, and the estimate made beforehand.

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
    """Worker `rank` starts with `held_bytes` of parameters, in pieces and in whole tensors.

    `num_parts` ranks together should hold all parameters, `whole_bytes` in size, exactly once.
    """

    rank: int
    num_parts: int
    held_bytes: int
    whole_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried(Event):
    """A message was encoded, then decoded from `pieces` pieces; `sent` and `got` are its digests.

    `got` is None if nothing was decoded. `allocated_bytes` is the peak of memory in decoding.
    """

    message: str
    payload_bytes: int
    pieces: int
    sent: str
    got: str | None
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Event):
    """Damaged or malformed bytes were read. They raised `error`, or None if they were accepted.

    `claimed_bytes` is the length that they announced, `allocated_bytes` the memory allocated for
    it.
    """

    case: str
    error: str | None
    claimed_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(Event):
    """A peer asked to join. `entitled`: whether it may; `let_in`: whether it was admitted."""

    case: str
    entitled: bool
    let_in: bool
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced(Event):
    """The average that worker `rank` holds in step `step`, compared with that of the known terms.

    `roundings` is the largest deviation from the float64 mean, at `element`, in units of 2^-24
    times the mean of the terms' absolute values; inf if the average is not finite. `error` is the
    largest absolute difference of any element, or None if it was not recorded.
    """

    step: int
    rank: int
    num_elements: int
    roundings: float
    element: int
    error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic(Event):
    """Messages of one kind that `rank` (None: the coordinator) exchanged in the whole run.

    `direction` is "sent" or "got". `peer` is the other side: "coordinator" or "worker". `bytes`
    counts all bytes that went through the socket for them, including `payload_bytes`.
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
    """The run is over: `completed`, `halted` (on purpose) or `failed` (see `reason`)."""

    status: str
    reason: str = ""


E = TypeVar("E", bound=Event)
