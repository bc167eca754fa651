"""The complete description of one run: equal plans, or equal scenarios, give equal runs.

A TrainingPlan holds every number that a trainer needs, and is the only source of randomness
(`TrainingPlan.rng`). Its random streams have names, which say what is drawn but not which worker
draws it. So the draws don't depend on the number of workers, and a run on one worker is a baseline
for a run on eight. A Scenario is a plan that the harness runs on one of its systems, with faults
and a planted bug, which no trainer reads. Facts that only the run itself shows are in the traits of
its trace.

Both records are frozen, validate themselves, and have a digest. The digest identifies a run in
memory, in the name of its file, and in a saved counterexample. The records only name backends
(`cuda`, `wgpu`, `cpu`, and `wgpu:1` for the second device of a kind). `entrenar_py.compute` opens
them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, Self, cast

from entrenar_py.shared.codec import UNCHECKED, Form, Schema
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.untrusted import json_text

if TYPE_CHECKING:
    import numpy as np

# A machine may have several devices of these kinds: `wgpu:1` is the second.
INDEXED = ("cuda", "wgpu")
BACKENDS = (*INDEXED, "cpu")


def backend_kind(name: str) -> str:
    """Return the kind of backend that `name` selects: `wgpu` for `wgpu` and `wgpu:1`.

    Raises UsageError for an unknown or malformed name.
    """
    kind, colon, index = name.partition(":")
    known = kind in (INDEXED if colon else BACKENDS)
    if not known or (colon and not (index.isascii() and index.isdigit() and len(index) <= 4)):
        raise UsageError(f"backend={name!r}: allowed are {backends_in_words(BACKENDS)}")
    return kind


def backends_in_words(kinds: Iterable[str]) -> str:
    """Return the names that select a backend of one of `kinds`, as text for a message."""
    indexed = [f"{kind}:N" for kind in kinds if kind in INDEXED]
    return ", ".join([*kinds, *indexed])


# Trainers that give the same bits with any number of workers, so that it may change on resuming.
ANY_SIZE = ("parameter_server", "ddp_canonical", "fsdp_canonical")
OBSERVED = "command"  # the system that stands for a user's script with `observe`
# Workloads made from a user's files or script. A scenario alone isn't enough to run them.
OF_USERS = ("finetune", "own")
# Field -> its allowed values. Validation, docs and Hypothesis read this table.
CHOICES: dict[str, tuple[str, ...]] = {
    # finetune: a checkpoint and rows; own: the run of a user's own trainer, stored as a trace
    "workload": ("linear", "mlp", "decoder", "decoder_full", "vectors", *OF_USERS),
    "optimizer": ("sgd", "momentum", "adamw"),
    "schedule": ("constant", "linear", "cosine"),
    "detail": ("digests", "values"),
}


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """One training run, as described to a trainer.

    - `trainer`: how work is shared among workers: `parameter_server`, `mesh`, `ring`, or a strategy
      of torchrun's ranks.
    - `batch_size`: the samples of a global batch, which is split into `num_shards` logical shards.
      A worker owns consecutive shards and computes each in `accumulation` micro-batches.
    - `num_samples`: the size of the data set. Each epoch is a permutation of it. The last batch of
      an epoch may be short; it is neither dropped nor padded.
    - `clip_norm`: the largest L2 norm of the averaged gradient (None: no clipping).
    - `warmup_steps`: steps of linear warm-up, before `schedule` decays over `num_steps`.
    - `width`: the hidden width of `mlp`, and the length of `vectors`.
    - `backends`: assigned to the workers in turn; `auto` is the first backend of the fallback chain
      that works when the run starts.
    - `detail`: "values" records tensors in addition to their digests.
    - `options`: settings of the trainer.

    Raises UsageError if a value is out of range.
    """

    trainer: str
    workload: str
    world_size: int
    seed: int
    num_shards: int = 8
    num_samples: int = 50
    batch_size: int = 16
    num_steps: int = 5
    accumulation: int = 1
    optimizer: str = "sgd"
    learning_rate: float = 0.05
    weight_decay: float = 0.0
    clip_norm: float | None = None
    schedule: str = "constant"
    warmup_steps: int = 0
    dropout: float = 0.0
    width: int = 16
    backends: tuple[str, ...] = ("cpu",)
    detail: str = "digests"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            _whole(name, getattr(self, name), at_least=1)
        for name in ("seed", "warmup_steps"):
            _whole(name, getattr(self, name), at_least=0)
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError.of(name, value, f"allowed are {', '.join(allowed)}")
        self._check_numbers()
        self._check_sizes()
        _require_tuple("backends", self.backends)
        self._check_texts()

    def _check_numbers(self) -> None:
        for name in ("learning_rate", "weight_decay", "dropout"):
            if not _is_finite_and_not_negative(getattr(self, name)):
                raise UsageError.of(name, getattr(self, name), "use a finite number >= 0")
        if self.dropout >= 1:
            raise UsageError.of("dropout", self.dropout, "use a probability below 1")
        norm = self.clip_norm
        if norm is not None and not (_is_finite_and_not_negative(norm) and norm):
            raise UsageError.of("clip_norm", norm, "use a number > 0, or null for none")

    def _check_sizes(self) -> None:
        for name in ("num_shards", "accumulation"):
            if getattr(self, name) > PARTS_MAX:
                raise UsageError.of(name, getattr(self, name), f"use at most {PARTS_MAX}")
        if self.world_size > self.num_samples:
            raise UsageError(
                f"world_size={self.world_size} with num_samples={self.num_samples}: every worker "
                f"needs at least one sample; use world_size<={self.num_samples}",
                field="world_size",
            )
        if self.batch_size > self.num_samples:
            raise UsageError(
                f"batch_size={self.batch_size} with num_samples={self.num_samples}: "
                f"use batch_size<={self.num_samples}",
                field="batch_size",
            )
        if self.world_size > self.num_shards:
            raise UsageError(
                f"world_size={self.world_size} with num_shards={self.num_shards}: every worker "
                f"needs at least one logical shard; use num_shards>={self.world_size}",
                field="world_size",
            )

    def _check_texts(self) -> None:
        if not isinstance(self.trainer, str):
            raise UsageError.of("trainer", self.trainer, "use the name of a trainer")
        if not self.backends or not all(isinstance(name, str) for name in self.backends):
            raise UsageError.of("backends", list(self.backends), "use a list of one name or more")
        if not isinstance(self.options, Mapping):
            raise UsageError.of("options", self.options, "use a mapping")
        try:
            json_text.require_flat(self.options, _OPTIONS_DEPTH)
            json.dumps(dict(self.options), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError.of(
                "options", self.options, f"JSON can't hold them ({error}); use text and numbers"
            ) from error

    def with_(self, **changes: Any) -> Self:
        """Return a copy with the fields in `changes`. Raises UsageError if it is not valid."""
        return replace(self, **changes)

    def backend_of(self, rank: int) -> str:
        """Return the backend name of worker `rank`: workers take `backends` in turn, cyclically."""
        return self.backends[rank % len(self.backends)]

    def rng(self, *stream: str | int) -> np.random.Generator:
        """Return the random generator of the stream `stream`, e.g. `rng("dropout", step, shard)`.

        The numbers depend only on the seed and the stream's name, never on the rank, the world size
        or earlier draws. The generator is Philox, keyed with the BLAKE3 digest of seed and name.
        """
        import numpy as np

        name = json.dumps([self.seed, *stream]).encode()
        key = int.from_bytes(_blake3(name).digest(16), "little")
        return np.random.Generator(np.random.Philox(key=key))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dict that JSON can hold."""
        return _PLAN.dump(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Return the plan that `to_dict` wrote. Raises UsageError that names a wrong key."""
        return cast(Self, _PLAN.load(plan_record(record)))

    @cached_property
    def digest(self) -> str:
        """Return 32 hex digits that identify this plan."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return str(_blake3(text.encode()).hexdigest(16))

    @property
    def run_digest(self) -> str:
        """32 hex digits that identify the run: they stay if it is resumed with more workers."""
        return self.with_(world_size=1).digest if self.trainer in ANY_SIZE else self.digest

    def __hash__(self) -> int:
        return hash(self.digest)


_SIMULATED = "_simulated"  # the suffix of a simulated system's name


@dataclass(frozen=True, kw_only=True)
class Scenario(TrainingPlan):
    """A training plan that the harness runs on `system`, with faults and a planted bug.

    Before each step in `stops` the run is checkpointed, discarded and resumed. `repeat`
    distinguishes two runs of one scenario; nothing in a run depends on it. `mutant` is the name of
    a planted bug. `options` belong to the system (such as the shape of a matrix product).
    `systems.require_possible` refuses a scenario that its system can't run.

    Raises UsageError if a value is out of range.
    """

    trainer: str = field(init=False, repr=False)  # the system's name without `_simulated`
    system: str
    faults: tuple[Fault, ...] = ()
    stops: tuple[int, ...] = ()
    repeat: int = 0
    mutant: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.system, str):
            raise UsageError.of("system", self.system, "use the name of a system")
        object.__setattr__(self, "trainer", self.system.removesuffix(_SIMULATED))
        super().__post_init__()
        _whole("repeat", self.repeat, at_least=0)
        for name in ("faults", "stops"):
            _require_tuple(name, getattr(self, name))
        if not isinstance(self.mutant, str | None):
            raise UsageError.of("mutant", self.mutant, "use the name of a mutant, or null for none")
        for stop in self.stops:
            _whole("stop", stop, at_least=1)
            if stop >= self.num_steps:
                raise UsageError(
                    f"stops={list(self.stops)} with num_steps={self.num_steps}: "
                    f"a stop lies between step 1 and step {self.num_steps - 1}",
                    field="stops",
                )
        for fault in self.faults:
            self._check_fault(fault)

    def _check_fault(self, fault: Fault) -> None:
        if not isinstance(fault, Fault):
            raise UsageError(f"fault {fault!r}: use Fault, or Fault.from_dict for a mapping")
        for name, limit in (
            ("rank", self.world_size),
            ("shard", self.num_shards),
            ("step", self.num_steps),
        ):
            value = getattr(fault, name)
            if value is not None and not 0 <= value < limit:
                raise UsageError(
                    f"fault {fault.kind} {name}={value}: the scenario has {name}s 0 to {limit - 1}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields in the order of reports, as a dict that JSON can hold."""
        record = _SCHEMA.dump(self)
        last = {name: record.pop(name) for name in ("detail", "mutant", "options")}
        return {"system": record.pop("system"), **record, **last}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Return the scenario that `to_dict` wrote. Raises UsageError that names a wrong key."""
        return cast(Self, _SCHEMA.load(record))

    @classmethod
    def of(cls, plan: TrainingPlan) -> Scenario:
        """Return `plan` as a scenario without faults, on the system named like its trainer."""
        if isinstance(plan, Scenario):
            return plan
        record = plan.to_dict()
        return cls.from_dict({"system": record.pop("trainer"), **record})

    __hash__ = TrainingPlan.__hash__  # a dataclass would hash its fields, options too


_OPTIONS_DEPTH = json_text.DEPTH_MAX // 2  # files nest options within other objects
# The largest number of shards of a batch, and of micro-batches of a shard.
PARTS_MAX = 2**16
_POSITIVE = (
    *("world_size", "num_shards", "num_samples", "batch_size", "num_steps"),
    *("accumulation", "width"),
)
_FORMS = {**UNCHECKED, "Mapping[str, Any]": Form(lambda options: options, dict)}
_PLAN = Schema(TrainingPlan, what="plan", forms=_FORMS)
_SCHEMA = Schema(
    Scenario,
    what="scenario",
    forms={**_FORMS, "Fault": Form(Fault.from_dict, Fault.to_dict)},
)
# Fields without effect on a production run that earlier releases wrote, with their values.
_UNUSED: Mapping[str, Any] = {"faults": [], "stops": [], "repeat": 0, "mutant": None}


def plan_record(record: Any) -> Any:
    """Return the record of a plan in this release's form.

    Earlier releases described a production run by a scenario, with more fields.
    """
    if not isinstance(record, Mapping) or "system" not in record:
        return record
    rest = {
        name: value
        for name, value in record.items()
        if name not in _UNUSED or value != _UNUSED[name]
    }
    return {"trainer": rest.pop("system"), **rest}


def _whole(name: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UsageError.of(name, value, f"use a whole number >= {at_least}")


def _require_tuple(name: str, value: Any) -> None:
    if not isinstance(value, tuple):
        raise UsageError.of(name, value, "use a tuple")


def _is_finite_and_not_negative(value: Any) -> bool:
    # Compared without conversion, since an int can be too large for a float.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= sys.float_info.max


_SEQUENCES = ("faults", "stops", "backends")
# Values in a contract's `scenarios` for the fields without a default in Scenario.
DEFAULTS: Mapping[str, Any] = {
    "system": "reference",
    "workload": "linear",
    "world_size": 3,
    "seed": 0,
}


def expand(record: Mapping[str, Any]) -> Iterator[Scenario]:
    """Yield every scenario that one entry of a contract's `scenarios` stands for.

    DEFAULTS supplies the fields that the entry leaves out. A list for a field that takes one value
    means each value in turn (`world_size: [1, 2, 4]`). Several lists mean every combination.
    """
    merged = {**DEFAULTS, **record}
    lists = {
        name: value
        for name, value in merged.items()
        if isinstance(value, list) and name not in _SEQUENCES
    }
    for choice in product(*lists.values()):
        yield Scenario.from_dict({**merged, **dict(zip(lists, choice, strict=True))})


def _blake3(data: bytes) -> Any:
    from blake3 import blake3  # here, since command lines load this module for `--help`

    return blake3(data)
