"""The plan of a run: every strategy on the devices there are, and the one to take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from entrenar_py.train.model import precision
from entrenar_py.train.model.settings import BY_SHARDS, WHOLE_LAYERS, Settings
from entrenar_py.train.plan import memory, traffic
from entrenar_py.train.plan.devices import Device
from entrenar_py.train.plan.memory import Load, Memory
from entrenar_py.train.plan.shape import FLOAT_BYTES, Shape
from entrenar_py.train.plan.traffic import NOTHING, Batch, Traffic

SCHEMA = "entrenar-plan/1"
BY_PROTOCOL = ("star", "mesh")  # of this package's coordinator; others are torchrun's
_ALONE = (*BY_PROTOCOL, *BY_SHARDS)  # a worker computes some shards, others by all together
COMPARED = ("mesh",)  # shown, and never advised: `entrenar finetune` trains over a star


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A worker's device and its memory, `recomputed` with blocks computed again.

    `sharing` workers are on the device, which has `fits` for all: True, False, or None if it
    reports no size.
    """

    device: Device
    memory: Memory
    recomputed: Memory
    sharing: int

    def fits(self, *, recompute: bool) -> bool | None:
        """Return whether all workers of the device fit there; None if that is not known."""
        if self.device.memory is None:
            return None
        needed = (self.recomputed if recompute else self.memory).needed
        return self.sharing * needed <= self.device.memory


@dataclass(frozen=True, kw_only=True)
class Option:
    """A strategy on all devices. `problem` says why it can't run at all, "" if it can."""

    strategy: str
    problem: str
    workers: tuple[Worker, ...] = ()
    traffic: Traffic = NOTHING
    seconds: float = 0.0

    def fits(self, *, recompute: bool) -> bool:
        """Return whether no worker is known not to fit."""
        return not self.problem and all(
            one.fits(recompute=recompute) is not False for one in self.workers
        )

    def peak(self, *, recompute: bool) -> int:
        """Return the peak of the worker that needs most."""
        memories = (one.recomputed if recompute else one.memory for one in self.workers)
        return max((one.peak for one in memories), default=0)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is planned: a model's shape, how its steps are cut, and the devices.

    `longest` is the number of tokens of the longest row, and `length` that of the sequences that
    are computed, which is more if rows are packed. `bandwidth` in bytes a second is that of links
    for which a device states none. Workers compute on `turns` in turns, which are indices of
    devices: on each device equally often, if none are given.
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
        """Tokens of a sequence."""
        data = self.settings.data
        return data.max_tokens if data.packing else self.longest

    @property
    def num_workers(self) -> int:
        """One for each device at least."""
        return max(self.settings.num_workers, len(self.devices))

    @property
    def rows(self) -> int:
        """Rows of a micro-batch, which is a logical shard.

        Packed rows take fewer sequences: all but one are more than half full.
        """
        training = self.settings.training
        rows = -(-training.batch_size // training.num_shards)
        if not self.settings.data.packing:
            return rows
        return min(rows, 1 + 2 * rows * self.longest // self.length)

    @property
    def link(self) -> float:
        """The bandwidth of the slowest link, in bytes a second."""
        return min(one.bandwidth or self.bandwidth for one in self.devices)

    @property
    def recompute(self) -> bool:
        """Whether the configuration asks for blocks to be computed again."""
        return self.settings.recompute == "blocks"


def of(
    settings: Settings,
    devices: Sequence[Device],
    *,
    longest: int | None,
    bandwidth: float,
    turns: Sequence[int] = (),
) -> Run:
    """Return the run of `settings` on `devices`, on which workers compute in `turns`.

    `longest` is the number of tokens of the longest row; without it rows have data.max_tokens.
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
    """Raise UsageError if the memory of the run's model can't be foreseen."""
    if any(one.memory is not None for one in run.devices):
        option(run, strategy)


def options(run: Run) -> list[Option]:
    """Return every strategy on the run's devices."""
    return [option(run, strategy) for strategy in memory.STRATEGIES]


def option(run: Run, strategy: str) -> Option:
    """Return a strategy on the run's devices."""
    problem = _problem(run, strategy)
    if problem:
        return Option(strategy=strategy, problem=problem)
    training = run.settings.training
    moved = traffic.of(
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
        memory=memory.of(strategy, run.shape, load),
        recomputed=memory.of(strategy, run.shape, replace(load, recompute=True)),
        sharing=sum(run.place(other) == number for other in range(run.num_workers)),
    )


def _problem(run: Run, strategy: str) -> str:
    """Return why a strategy can't run on the devices, "" if it can."""
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
        return "torch's collectives know no wgpu"
    if run.settings.method == "qlora" and strategy not in WHOLE_LAYERS:
        return f"quantised weights can't be cut: use {' or '.join(WHOLE_LAYERS)}"
    if strategy == "ddp_canonical" and size & (size - 1):
        return f"{size} ranks can't share a tree evenly: 2, 4, 8 ... can"
    if strategy in ("tensor_parallel", "sequence_parallel"):
        return run.shape.cuts_into(size)
    if strategy == "pipeline_parallel" and size > run.shape.num_blocks:
        return f"{run.shape.num_blocks} blocks can't be cut into {size} stages"
    if strategy == "pipeline_parallel" and size > shards:
        return f"{shards} shards leave stages idle: use training.num_shards >= {size}"
    return ""


def memory_or_infinite(device: Device) -> float:
    """Return a device's memory, infinite if it reports none."""
    return math.inf if device.memory is None else device.memory


def to_record(run: Run, found: Sequence[Option], chosen: Option | None, why: str) -> dict[str, Any]:
    """Return a plan as JSON can hold it. Sizes are in bytes."""
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
        "options": [_option_record(one) for one in found],
        "strategy": None if chosen is None else chosen.strategy,
        "why": why,
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
