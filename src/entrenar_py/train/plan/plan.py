"""The plan of a run: each strategy on the available devices, the best choice, and what would fit.

A plan is computed from shapes alone: no weight is read. If all devices are CUDA GPUs, the plan
chooses the strategy of torch's collectives that is fastest on the wire. For all other devices it
chooses the reference trainer, which gives the same bits on any devices. A run that does not fit is
refused before it begins. The refusal lists changes that would make the run fit; changes that affect
learning the least are tried first.

Source: distributed-training-v1, F-HET-002: each worker fits the device that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from entrenar_py.shared import scenario, wording
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model import precision
from entrenar_py.train.model.settings import BY_SHARDS, CANONICAL, Settings, limits_of
from entrenar_py.train.plan import costs, devices
from entrenar_py.train.plan.costs import NOTHING, Batch, Load, Memory, Traffic
from entrenar_py.train.plan.devices import Device, seconds, size
from entrenar_py.train.plan.shape import FLOAT_BYTES, Shape

SCHEMA = "entrenar-plan/1"
BY_PROTOCOL = ("star", "mesh")  # run by this package's coordinator; the others by torchrun
_ALONE = (*BY_PROTOCOL, *BY_SHARDS)  # one worker computes a shard; elsewhere all do so together
COMPARED = ("mesh",)  # shown but never advised: `entrenar finetune` trains over a star


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A worker's device, and what it computes; memory is estimated when it is first needed.

    `sharing` is the number of workers on the device.
    """

    device: Device
    sharing: int
    strategy: str
    shape: Shape
    load: Load

    @cached_property
    def memory(self) -> Memory:
        """The memory that it needs. Raises UsageError if that can't be estimated."""
        return costs.memory_of(self.strategy, self.shape, self.load)

    @cached_property
    def recomputed(self) -> Memory:
        """The memory that it needs if blocks are recomputed."""
        return costs.memory_of(self.strategy, self.shape, replace(self.load, recompute=True))

    def needs(self, *, recompute: bool) -> Memory:
        """Return the memory that it needs with or without recomputed blocks."""
        return self.recomputed if recompute else self.memory

    def fits(self, *, recompute: bool) -> bool | None:
        """Return whether all workers of the device fit on it; None if its memory is not known."""
        if self.device.memory is None:
            return None
        return self.sharing * self.needs(recompute=recompute).needed <= self.device.memory


@dataclass(frozen=True, kw_only=True)
class Option:
    """A strategy on all devices. `problem` says why it can't run at all; "" if it can."""

    strategy: str
    problem: str
    workers: tuple[Worker, ...] = ()
    traffic: Traffic = NOTHING
    seconds: float = 0.0

    def fits(self, *, recompute: bool) -> bool:
        """Return whether the strategy can run and no worker is known not to fit."""
        return not self.problem and all(
            one.fits(recompute=recompute) is not False for one in self.workers
        )

    def peak(self, *, recompute: bool) -> int:
        """Return the peak of the worker that needs the most, in bytes."""
        return max((one.needs(recompute=recompute).peak for one in self.workers), default=0)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The input of a plan: a model's shape, how its steps are split, and the devices.

    `longest` is the number of tokens of the longest row. `bandwidth`, in bytes per second, is used
    for links of devices that state none. `turns` are indices of devices: worker r computes on
    `turns[r % len(turns)]`. If `turns` is empty, workers are spread evenly over the devices.
    """

    settings: Settings
    shape: Shape
    devices: tuple[Device, ...]
    longest: int
    bandwidth: float
    turns: tuple[int, ...] = ()

    def place(self, rank: int) -> int:
        """Return the index of the device of worker `rank`."""
        turns = self.turns or range(len(self.devices))
        return turns[rank % len(turns)]

    @property
    def length(self) -> int:
        """The number of tokens of a sequence: more than `longest` if rows are packed."""
        data = self.settings.data
        return data.max_tokens if data.packing else self.longest

    @property
    def num_workers(self) -> int:
        """The number of workers: at least one for each device."""
        return max(self.settings.num_workers, len(self.devices))

    @property
    def rows(self) -> int:
        """The number of rows of a micro-batch, which is a logical shard.

        Packed rows need fewer sequences: all sequences but one are more than half full.
        """
        training = self.settings.training
        rows = -(-training.batch_size // training.num_shards)
        if not self.settings.data.packing:
            return rows
        return min(rows, 1 + 2 * rows * self.longest // self.length)

    @property
    def link(self) -> float:
        """The bandwidth of the slowest link, in bytes per second."""
        return min(one.bandwidth or self.bandwidth for one in self.devices)

    @property
    def recompute(self) -> bool:
        """True if the configuration requests that blocks are recomputed."""
        return self.settings.recompute == "blocks"


def of(
    settings: Settings,
    devices: Sequence[Device],
    *,
    longest: int | None,
    bandwidth: float,
    turns: Sequence[int] = (),
) -> Run:
    """Return the run of `settings` on `devices`; workers are assigned to them by `turns`.

    `longest` is the number of tokens of the longest row; None means data.max_tokens.
    """
    most = settings.data.max_tokens
    return Run(
        settings=settings,
        shape=Shape(settings),
        devices=tuple(devices),
        longest=most if longest is None else min(longest, most),
        bandwidth=bandwidth,
        turns=tuple(turns),
    )


def rehearse(run: Run, strategy: str) -> None:
    """Raise UsageError if the memory of the run's model can't be estimated.

    Does nothing if no device reports its memory.
    """
    if any(one.memory is not None for one in run.devices):
        option(run, strategy).peak(recompute=run.recompute)


def options(run: Run) -> list[Option]:
    """Return all strategies on the run's devices, including those that can't run or don't fit."""
    return [option(run, strategy) for strategy in costs.STRATEGIES]


def option(run: Run, strategy: str) -> Option:
    """Return one strategy on the run's devices. Its `workers` are empty if it can't run."""
    problem = _problem(run, strategy)
    if problem:
        return Option(strategy=strategy, problem=problem)
    training = run.settings.training
    moved = costs.traffic_of(
        strategy,
        run.shape,
        Batch(
            rows=run.rows,
            length=run.length,
            num_shards=training.num_shards,
            num_workers=run.num_workers,
            product_bytes=precision.of_products(run.settings).itemsize,
            recompute=run.recompute,
        ),
    )
    return Option(
        strategy=strategy,
        problem="",
        workers=tuple(_worker(run, strategy, rank) for rank in range(run.num_workers)),
        traffic=moved,
        seconds=moved.seconds(run.link),
    )


def _worker(run: Run, strategy: str, rank: int) -> Worker:
    number = run.place(rank)
    device = run.devices[number]
    shards = run.settings.training.num_shards
    load = Load(
        rows=run.rows,
        length=run.length,
        shards=-(-shards // run.num_workers) if strategy in _ALONE else shards,
        num_workers=run.num_workers,
        kind=device.kind,
        recompute=False,
    )
    return Worker(
        device=device,
        sharing=sum(run.place(other) == number for other in range(run.num_workers)),
        strategy=strategy,
        shape=run.shape,
        load=load,
    )


def _problem(run: Run, strategy: str) -> str:
    """Return why a strategy can't run on the devices; "" if it can."""
    size, shards = run.num_workers, run.settings.training.num_shards
    if strategy in _ALONE and size > shards:
        return f"{size} workers and {shards} shards: use training.num_shards >= {size}"
    if strategy in BY_PROTOCOL:
        return ""
    if size == 1:
        return "it needs two devices or more"
    if len({one.kind for one in run.devices}) > 1:
        return "its devices must be of one kind"
    if run.devices[0].kind == "wgpu":
        return "torch's collectives don't support wgpu"
    if limits := limits_of(run.settings, strategy):
        return f"with {limits[0].setting}, {limits[0].advice}"
    if strategy in CANONICAL and shards & (shards - 1):
        return f"{shards} shards are no even tree: use training.num_shards: 1, 2, 4, 8 ..."
    if strategy == "ddp_canonical" and size & (size - 1) and not run.settings.elastic:
        return f"{size} ranks can't share a tree evenly: 2, 4, 8 ... can"
    if strategy in ("tensor_parallel", "sequence_parallel"):
        return run.shape.cuts_into(size)
    if strategy == "pipeline_parallel" and size > run.shape.num_blocks:
        return f"{run.shape.num_blocks} blocks can't be cut into {size} stages"
    if strategy == "pipeline_parallel" and size > shards:
        return f"{shards} shards leave stages idle: use training.num_shards >= {size}"
    return ""


def memory_or_infinite(device: Device) -> float:
    """Return a device's memory in bytes, infinity if it reports none."""
    return math.inf if device.memory is None else device.memory


def to_record(
    run: Run, tried: Sequence[Option], chosen: Option | None, reason: str
) -> dict[str, Any]:
    """Return a plan in a form that JSON can hold. Sizes are in bytes."""
    counts = run.shape.counts()
    return {
        "schema": SCHEMA,
        "model": {
            "type": run.shape.config.model_type,
            "parameters": run.shape.num_parameters,
            "trained": counts.trained,
            "gradient_bytes": FLOAT_BYTES * counts.trained,
            "blocks": run.shape.num_blocks,
        },
        "micro_batch": {"rows": run.rows, "tokens": run.length},
        "workers": run.num_workers,
        "bandwidth_bytes_per_s": run.link,
        "recompute": run.recompute,
        "options": [_option_record(one) for one in tried],
        "strategy": None if chosen is None else chosen.strategy,
        "why": reason,
    }


def _option_record(option: Option) -> dict[str, Any]:
    return {
        "strategy": option.strategy,
        "problem": option.problem or None,
        "fits": option.fits(recompute=False),
        "fits_recomputed": option.fits(recompute=True),
        "sent_bytes": option.traffic.sent,
        "received_bytes": option.traffic.received,
        "busiest_link_bytes": option.traffic.busiest,
        "seconds": option.seconds,
        "workers": [
            {
                "device": one.device.name,
                "kind": one.device.kind,
                "memory_bytes": one.device.memory,
                "workers_there": one.sharing,
                "needs": vars(one.memory),
                "needs_recomputed": vars(one.recomputed),
            }
            for one in option.workers
        ],
    }


_SHORTEST = 64  # tokens: shorter rows are not advised


def choose(run: Run, tried: Sequence[Option]) -> Option | None:
    """Return the strategy to use, None if none fits.

    If all devices are CUDA GPUs, this is a strategy of torch's collectives, if one fits; otherwise
    it is the reference trainer, since its bits do not depend on the devices. Of several strategies
    that fit, the one that is fastest on the wire is returned.
    """
    fitting = [option for option in _advised(tried) if option.fits(recompute=run.recompute)]
    by_protocol = [option for option in fitting if option.strategy in BY_PROTOCOL]
    others = [option for option in fitting if option.strategy not in BY_PROTOCOL]
    are_gpus = all(option.kind == "cuda" for option in run.devices)
    pool = others if are_gpus and others else by_protocol or others
    return min(pool, key=lambda option: option.seconds, default=None)


def _advised(found: Sequence[Option]) -> list[Option]:
    return [one for one in found if one.strategy not in COMPARED]


def reason(run: Run, tried: Sequence[Option], chosen: Option | None) -> str:
    """Return sentences that explain the choice; if nothing fits, they say what would."""
    tried = _advised(tried)
    if chosen is None:
        return _none_fits(run, tried)
    return f"{_reason(run, chosen)} {_others(run, tried, chosen)}"


def _reason(run: Run, chosen: Option) -> str:
    worker = max(chosen.workers, key=lambda one: one.sharing * one.memory.needed)
    needed = worker.needs(recompute=run.recompute).needed * worker.sharing
    limit = worker.device.memory
    room = f"{size(limit)} of {worker.device.name}" if limit else f"{worker.device.name}"
    workers = f"{worker.sharing} workers need" if worker.sharing > 1 else "a worker needs"
    if run.num_workers == 1:
        return f"One worker exchanges nothing: it needs {size(needed)} of the {room}."
    return (
        f"With {chosen.strategy} {workers} {size(needed)} of the {room}, and a step moves "
        f"{size(chosen.traffic.sent)} from a worker, {seconds(chosen.seconds)} on the wire."
    )


def _others(run: Run, tried: Sequence[Option], chosen: Option) -> str:
    full = [
        option
        for option in tried
        if not option.problem and not option.fits(recompute=run.recompute)
    ]
    if full:
        least = min(full, key=lambda option: option.peak(recompute=run.recompute))
        names = wording.listed([option.strategy for option in full], most=len(full))
        return (
            f"There is no room for {names}: the smallest of them peaks at "
            f"{size(least.peak(recompute=run.recompute))}."
        )
    able = [option for option in tried if not option.problem]
    faster = [option.strategy for option in able if option.seconds < chosen.seconds]
    if faster and chosen.strategy in BY_PROTOCOL:
        are = "is" if len(faster) == 1 else "are"
        return (
            f"{wording.listed(faster, most=len(faster))} {are} faster on the wire; weights of "
            f"{chosen.strategy} have the same bits however many workers take part."
        )
    return "Every strategy that can run here fits."


def _none_fits(run: Run, tried: Sequence[Option]) -> str:
    able = [option for option in tried if not option.problem]
    if not able:
        return "No strategy can run here: " + "; ".join(
            f"{option.strategy}: {option.problem}" for option in tried
        )
    least = min(able, key=lambda option: option.peak(recompute=run.recompute))
    worst = max(
        (option for option in least.workers if not option.fits(recompute=run.recompute)),
        key=lambda option: (
            option.sharing * option.memory.needed - memory_or_infinite(option.device)
        ),
    )
    needed = worst.sharing * worst.needs(recompute=run.recompute).needed
    what = remedies(run, least.strategy)
    changes = "; ".join(what) if what else "nothing that the configuration can change"
    return (
        f"Nothing fits: {least.strategy}, which needs least, takes {size(needed)} on "
        f"{worst.device.name}, which has {size(worst.device.memory or 0)}. What would fit: "
        f"{changes}."
    )


def remedies(run: Run, strategy: str) -> list[str]:
    """Return changes of the configuration that make `strategy` fit, with the resulting peaks."""
    texts = list[str]()
    for text, changed in _changes(run):
        if any(text.startswith(one.rpartition(" (")[0]) for one in texts):
            continue  # a smaller change is enough
        tried = option(changed, strategy)
        if tried.fits(recompute=changed.recompute):
            texts.append(f"{text} ({size(tried.peak(recompute=changed.recompute))})")
    return texts


def _changes(run: Run) -> Iterator[tuple[str, Run]]:
    """Yield possible changes one at a time, and after each the combination of all changes so far.

    Changes that affect learning the least come first.
    """
    texts, together = list[str](), run
    for text, change in _steps(run):
        yield text, change(run)
        texts.append(text)
        together = change(together)
        if len(texts) > 1:
            yield " and ".join(texts), together


def _steps(run: Run) -> Iterator[tuple[str, Callable[[Run], Run]]]:
    settings = run.settings
    if not run.recompute and settings.compile is not True:
        yield "recompute: blocks", lambda one: _with(one, recompute="blocks")
    if run.rows > 1:
        most = settings.training.batch_size
        finest = replace(settings.training, num_shards=most)
        yield f"training.num_shards: {most}", lambda one: _with(one, training=finest)
    if settings.num_workers > len(run.devices):
        fewer = len(run.devices)
        yield f"workers: {fewer}", lambda one: _with(one, workers=fewer)
    if run.length > _SHORTEST:
        half = max(_SHORTEST, run.length // 2)
        data = replace(settings.data, max_tokens=half)
        yield (
            f"data.max_tokens: {half}",
            lambda one: replace(_with(one, data=data), longest=half),
        )
    if settings.precision == "float32" and not settings.lora.modules_to_save:
        yield "precision: bfloat16", lambda one: _with(one, precision="bfloat16")
    if settings.method == "full":
        yield "method: lora", lambda one: _with(one, method="lora")
    if settings.method == "lora":
        yield "method: qlora", lambda one: _with(one, method="qlora")


def _with(run: Run, **changes: object) -> Run:
    settings = replace(run.settings, **changes)  # type: ignore[arg-type]
    other = {"method", "precision"} & changes.keys()
    shape = Shape(settings) if other else run.shape
    return replace(run, settings=settings, shape=shape)


RULE = "F-HET-002"


def require_memory(run: Run, strategy: str = "star") -> None:
    """Raise UsageError if a device has too little memory for its workers.

    The coordinator of a star also holds the model. Its memory is counted on the CPU.
    """
    for worker, needed, extra in _short(run, strategy):
        workers = "a worker needs" if worker.sharing == 1 else f"{worker.sharing} workers need"
        more = f" and the coordinator {size(extra)}" if extra else ""
        raise UsageError(
            f"{RULE}: {workers} {size(needed)}{more}, but {worker.device.name} has "
            f"{size(worker.device.memory or 0)}; "
            f"{_advice(run, strategy, has_coordinator=strategy == 'star')}; "
            "`entrenar plan` shows all of it"
        )


def has_memory(run: Run, strategy: str = "star") -> bool:
    """Return whether `require_memory` accepts the run; finding advice takes much longer."""
    return not any(_short(run, strategy))


def _short(run: Run, strategy: str) -> Iterator[tuple[Worker, int, int]]:
    """Yield workers that don't fit, with the bytes of all workers there and of a coordinator."""
    if not any(one.memory is not None for one in run.devices):
        return
    chosen, has_coordinator = option(run, strategy), strategy == "star"
    for worker in () if chosen.problem else chosen.workers:
        extra = _coordinator(run.shape) if has_coordinator and worker.device.kind == "cpu" else 0
        needed = worker.sharing * worker.needs(recompute=run.recompute).needed
        if worker.device.memory is not None and needed + extra > worker.device.memory:
            yield worker, needed, extra


def _advice(run: Run, strategy: str, *, has_coordinator: bool) -> str:
    room = [_less(one, run.shape) if has_coordinator else one for one in run.devices]
    fitting = remedies(replace(run, devices=tuple(room)), strategy)
    if not fitting:
        return "nothing that the configuration can change would fit"
    return f"what would fit, with a worker's peak: {', or '.join(fitting)}"


def of_backends(names: Sequence[str], described: Sequence[str]) -> list[Device]:
    """Return the devices that backends with these names open, without duplicates.

    If the configuration describes devices, the next described device of a backend's kind is used.
    Raises UsageError if there is none.
    """
    if not described:
        return [devices.of_backend(name) for name in dict.fromkeys(names)]
    left, taken = devices.described(described), list[Device]()
    for name in dict.fromkeys(names):
        kind = scenario.backend_kind(name)
        alike = [one for one in left if one.kind == kind]
        if not alike:
            raise UsageError(
                f"devices: none is described for backend {name}; describe one of kind {kind}, or "
                "leave devices out"
            )
        taken.append(alike[0])
        left.remove(alike[0])
    return taken


def _less(device: Device, shape: Shape) -> Device:
    if device.memory is None or device.kind != "cpu":
        return device
    return replace(device, memory=max(device.memory - _coordinator(shape), 0))


def _coordinator(shape: Shape) -> int:
    return costs.coordinator_bytes(shape.counts())
