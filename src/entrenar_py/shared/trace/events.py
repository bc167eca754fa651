"""The events of one run. How they are stored is defined elsewhere (`ledger`).

Events do not depend on the trainer: the reference trainer, a torch script and a real cluster fill
the same ones. A field that a trainer does not reveal is None or empty, and a judge that needs it
reports that.
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

    `step` is the next step. `trainable` and `frozen` name parameters in order, `decayed` those with
    weight decay. `local` are buffers that follow from the worker's own samples. `progress` is the
    position that a checkpoint must restore (epoch, offset, schedule step). `shapes` has the shapes
    of whole parameters, as far as they are known. `extra` is state next to the model, by
    `holder/tensor`: copies of it (averages), with the names of its parameters, and frozen modules.
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

    `shard` is the logical shard, or the rank's micro-batch index if the trainer has no logical
    shards. `loss_sum` is the sum of the losses of all samples or tokens, if known, and `weight`
    their count. `draws` identifies the random stream: a digest of the first numbers that dropout
    drew. `contents` has a few numbers for each of `ids`, from what the model was given; they are
    equal, up to rounding, if the sample's contents are. `gradient` is the sum over the samples, up
    to a factor common to all shards, if revealed. `finite` is true if loss and gradient hold no NaN
    or Inf. If the samples are not known, `unknown` says why, and `ids` are empty. `made` tells that
    the script made or sampled what its model was given, of samples that it had before. `slope` is
    the derivative of what the backward pass began at, by the mean loss; None if unknown.
    `evaluating` is true if the model was in evaluation mode, with dropout off, and `evaluated` if a
    pass without gradient was made in that mode since the rank's micro-batch before. `terms` are the
    sums and means that the backward pass began at, as the graph shows them: the number of elements
    (0: unknown), how much each of them counts, and the numbers that it was divided by, one after
    the other.
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
    """Worker `rank` trains on the samples `ids` of the data set only, and draws from no others."""

    rank: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(Event):
    """Worker `rank` made optimizer step `step`. Holds the worker's state after it.

    `loss` is the mean that the worker reports over `weight` samples (or tokens), or None.
    `gradient` is the averaged gradient before clipping, `grad_norm` its L2 norm, `applied_norm` the
    norm after clipping. `learning_rate` is that of this step, `rates` has the tensors with other
    rates. `finite` is true if the new weights hold no NaN or Inf.

    Of a user's trainer: `local` are buffers that follow from the worker's own samples. `kept` has
    the tensors with a gradient that was not cleared since it was applied before, with the first
    step that is still in it. `summed` has the numbers of the worker's shards that a tensor's
    gradient holds, if these are not all shards of the step that have a gradient for it; of ranks
    that share a model, () for one with unknown shards. `edited` are the weights right before this
    step that something other than the optimizer has changed since the update before. `schedule` is
    the position of the learning rate's schedule. `extra` is state next to the model, as in Start.
    An average that is moved after the step has the value of the step before.
    `unclipped` is the gradient that the script gave to torch\'s `clip_grad_norm_`. `metric` is the
    best value so far that the worker gave to a schedule which follows it (`ReduceLROnPlateau`).
    Scripts that move weights along the gradient of a pass, and compute another gradient there
    (sharpness-aware): `climbed` are the tensors that were still there when the optimizer stepped,
    `mixed` those with a first gradient that was not cleared before the second one.
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
    """Worker `rank` synchronised with the others after `step`, and goes on from `weights`.

    Recorded where workers make some steps without the others. `optimizer` is the outer optimizer's
    state, which all workers share; the inner one's is in Update. `collectives` counts collective
    calls of the synchronisation, `collectives_alone` those of the worker's steps before it.
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
    """A planted fault took effect; `tensor` is the one that it changed, if it names none itself."""

    fault: Mapping[str, Any]
    step: int | None = None
    rank: int | None = None
    shard: int | None = None
    tensor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit(Event):
    """Each of `ranks` computed logical `shard` of `step`, and the copies were compared.

    `alike` has for each copy the index of the first copy with the same bits. `culprit` is the rank
    that differed from two others, first in `element` of `tensor`; its copy was discarded.
    `disputed` are the ranks that ever disagreed, even if they have left. Copies of only one
    rank count unless it is in `disputed`. The Shard event comes from a rank that counts.
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
    """Training stopped on purpose at step `step`, before any update of it.

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
    """The backend chain tried `backend`. It served, or failed with `reason`."""

    backend: str
    served: bool
    reason: str = ""
    device: str = ""
    software: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Product(Event):
    """One matrix product on a backend, compared with the CPU and with float64.

    `shape` is (m, k, n). `error_cpu` is the largest absolute difference from the CPU, `error_f64`
    that from float64 at `element`, where it is the largest relative to `bound`, its rounding bound.
    `stated` is true at the shape and range for which the contract gives an absolute tolerance.
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

    On `cpu` the peak is resident memory, else device memory. `reported_bytes` is the device's
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

    `num_parts` ranks together should hold `whole_bytes`, the size of all parameters, only once.
    """

    rank: int
    num_parts: int
    held_bytes: int
    whole_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried(Event):
    """A message was encoded, then decoded from `pieces` pieces; `sent` and `got` are its digests.

    `got` is None if nothing was decoded. `allocated_bytes` is the most memory that decoding took.
    """

    message: str
    payload_bytes: int
    pieces: int
    sent: str
    got: str | None
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Event):
    """Damaged or malformed bytes were read and raised `error`, or None if they were accepted.

    `claimed_bytes` is the length that they announced, `allocated_bytes` the memory allocated for
    it.
    """

    case: str
    error: str | None
    claimed_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(Event):
    """A peer asked to join. `entitled` tells whether it may, `let_in` whether it was admitted."""

    case: str
    entitled: bool
    let_in: bool
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced(Event):
    """The average that worker `rank` holds in step `step`, compared with that of the known terms.

    `roundings` is the largest deviation from the float64 mean, found at `element`, in units of
    2^-24 of the mean of the terms' absolute values; inf if the average is not finite. `error` is
    the largest absolute difference of any element, or None if it was not recorded.
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

    `direction` is "sent" or "got", `peer` the other side: "coordinator" or "worker". `bytes` is all
    that went through the socket for them, `payload_bytes` included.
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
