"""What one run did, event by event; nothing of how that is stored.

Trainer-agnostic: the reference trainer, a torch script and a real cluster fill the same events.
A field that a trainer does not reveal is None (or empty), and a judge that needs it says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from entrenar_py.trace.tensors import Tensors

_NONE: Tensors = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened. `kind` names it in the file: its class, in small letters."""

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Event):
    """Worker `rank` has its state: at the beginning, after joining, or after a resume.

    `step` is the next step to be done. `trainable` and `frozen` name parameters in order;
    `decayed` those with weight decay. `progress` is the position that a checkpoint must restore
    (epoch, offset, schedule step).
    """

    step: int
    rank: int
    weights: Tensors
    optimizer: Tensors = field(default_factory=lambda: _NONE)
    buffers: Tensors = field(default_factory=lambda: _NONE)
    trainable: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    decayed: tuple[str, ...] | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    resumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(Event):
    """Worker `rank` computed the loss and gradient of the samples `ids` (in this order).

    `shard` is the logical shard, or the micro-batch index of the rank where a trainer has no
    logical shards. `loss_sum` is the sum of the per-sample (or per-token) losses, if it is known,
    and `weight` their count. `draws` names the random stream (digest of the first numbers that
    dropout drew).
    `gradient` is the sum over the samples, up to a factor common to all shards, where revealed.
    `finite`: loss and gradient hold no NaN or Inf.
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
    gradient: Tensors = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(Event):
    """Worker `rank` made optimizer step `step`; what it holds afterwards.

    `loss` is the mean it reports over `weight` samples (or tokens); None if it reports none.
    `gradient` is the averaged gradient before clipping, `grad_norm` its L2 norm, `applied_norm` the
    norm after clipping. `learning_rate` is the one used in this step, `rates` those of tensors
    that have another one. `finite`: no NaN or Inf in the new weights.
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
    gradient: Tensors = field(default_factory=lambda: _NONE)
    grad_norm: float | None = None
    applied_norm: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)

    def rate_of(self, name: str) -> float:
        """The learning rate of a tensor."""
        return self.rates.get(name, self.learning_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronised(Event):
    """Worker `rank` was brought together with the others after `step`: it goes on from `weights`.

    Of workers that step alone for a while. `optimizer` is the state of the outer optimizer, which
    all have in common; an Update of theirs has the inner one's. `collectives` is how many
    it was brought together by, `collectives_alone` how many it called while it stepped alone.
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
    """A planned fault really took place."""

    fault: Mapping[str, Any]
    step: int | None = None
    rank: int | None = None
    shard: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit(Event):
    """Each of `ranks` computed logical `shard` of `step`, and what they got was compared.

    `alike` is for each the number of the first one who got the same bits. `culprit` is who got
    something else than two others, first in `element` of `tensor`; its copy was thrown away. With
    one rank alone nothing was compared, unless that is `disputed`: these disagreed before, and may
    be gone. The Shard event is that of a rank whose copy counts.
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
    """The scenario's mutant really took part: a function that it replaces was called."""

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
    """A checkpoint was written by `rank` before step `step`, holding this."""

    step: int
    rank: int
    weights: Tensors
    optimizer: Tensors = field(default_factory=lambda: _NONE)
    buffers: Tensors = field(default_factory=lambda: _NONE)
    progress: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap(Event):
    """This ledger goes on from a checkpoint before `step`, and lacks what led there.

    `lines` and `digest` are how long the ledger was that the checkpoint names, and the digest of
    its last line then; None if it names none. `reason` says why that one is not gone on with.
    """

    step: int
    lines: int | None = None
    digest: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Event):
    """The gradients that `backend` really produced: (name, shape, dtype) in order.

    `backend` "model" is what the model declares.
    """

    backend: str
    entries: tuple[tuple[str, tuple[int, ...], str], ...]
    rank: int | None = None
    device: str = ""
    software: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Event):
    """The backend chain tried `backend`: served, or failed with `reason`."""

    backend: str
    served: bool
    reason: str = ""
    device: str = ""
    software: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Product(Event):
    """One matrix product on a backend, compared with the CPU and with float64.

    `shape` is (m, k, n); `error_cpu` and `error_f64` are largest absolute differences, `bound` the
    largest that float32 rounding allows against float64 (absolute, for these operands).
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
    """Peak memory of worker `rank`, in bytes, its budget, and the estimate made before.

    Resident memory on `cpu`, else that of the device; `reported_bytes` is the size of its memory,
    None where it tells none.
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
    """How many bytes of parameters worker `rank` holds, in pieces and copies, of a model's
    `whole_bytes`: `num_parts` ranks are to hold a copy together.
    """

    rank: int
    num_parts: int
    held_bytes: int
    whole_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried(Event):
    """A message went through the wire's codec in `pieces`: digests of it as `sent` and as `got`.

    `got` is None if nothing came out. `allocated_bytes` is the most that reading it took.
    """

    message: str
    payload_bytes: int
    pieces: int
    sent: str
    got: str | None
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Event):
    """Damaged or malformed bytes were read: the `error` that it gave; None if they were accepted.

    `claimed_bytes` is how much they said would follow, `allocated_bytes` what was set aside.
    """

    case: str
    error: str | None
    claimed_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(Event):
    """Somebody asked to join: whether they were `entitled`, whether they were let in."""

    case: str
    entitled: bool
    let_in: bool
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced(Event):
    """The average that worker `rank` holds in step `step`, beside that of the known terms.

    `roundings` is how far it is off from the mean in float64 at `element`, where that is most: in
    units of 2^-24 of the mean of the terms' absolute values; inf where it is not finite. `error` is
    the largest difference in any element, as it is; None where that was not recorded.
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

    `direction` is "sent" or "got", `peer` whom with: the "coordinator", or a "worker". `bytes` is
    all that the socket was given, or gave, for them; `payload_bytes` is part of it.
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
    """The run is over: `completed`, `halted` (on purpose) or `failed` (`reason` says how)."""

    status: str
    reason: str = ""


E = TypeVar("E", bound=Event)
