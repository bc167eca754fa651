"""Plans the stages of a layer pipeline: as a configuration says, or the best possible stages.

Stages are assigned to workers in the order in which the user lists the workers. That order is part
of the user's decision: the first worker sees the tokens, the last one sees the targets, and
neighbours need a link. For `--order best`, `faster_order` tries all orders of a few workers. The
cut of a row of blocks is exact: dynamic programming makes the slowest stage as fast as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from entrenar_py.shared import wording
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model.settings import StagePlan
from entrenar_py.train.plan.devices import size
from entrenar_py.train.plan.stage_costs import Place, StageCosts, Terms, matrix
from entrenar_py.train.plan.stage_workers import StageWorker
from entrenar_py.train.stages.cut import require_end

Costs = NDArray[np.float64]


def best_cut(costs: Sequence[Costs]) -> tuple[range, ...] | None:
    """Return the blocks of each stage with the least maximal cost; None if no cut is finite.

    `costs` has for each stage a float64 [num_blocks + 1, num_blocks + 1]: at [a, b] the cost of
    blocks a to b - 1, infinite if that stage is impossible. Each stage gets at least one block. If
    several cuts have the same maximal cost, one with the minimal sum of costs is returned, which
    gives the shortest step: a step takes the sum once, and the maximal cost for each further shard.
    """
    largest = _ends(costs, np.maximum)
    if largest is None:
        return None
    limit = slowest(costs, largest)
    return _ends([np.where(one <= limit, one, np.inf) for one in costs], np.add)


def slowest(costs: Sequence[Costs], stages: Sequence[range]) -> float:
    """Return the largest cost of `stages`."""
    return max(float(one[own.start, own.stop]) for one, own in zip(costs, stages, strict=True))


def total(costs: Sequence[Costs], stages: Sequence[range]) -> float:
    """Return the sum of the costs of `stages`."""
    return sum(float(one[own.start, own.stop]) for one, own in zip(costs, stages, strict=True))


def _ends(costs: Sequence[Costs], join: np.ufunc) -> tuple[range, ...] | None:
    """Return the stages with the minimal total cost, combined by `join`; None if no cut is finite.

    Dynamic programming over prefixes: without its last stage, the best cut of the first b blocks
    into k stages is a best cut of some a < b blocks into k - 1 stages. That requires a monotone
    `join`, such as maximum and sum.
    """
    size = len(costs[0])
    least = np.full(size, np.inf)  # by the number of blocks so far
    least[0] = 0.0
    begins: list[NDArray[np.intp]] = []
    empty = np.tril(np.ones((size, size), dtype=bool))  # stages without a block
    for one in costs:
        joined = join(least[:, None], np.where(empty, np.inf, one))
        begins.append(joined.argmin(axis=0))
        least = joined.min(axis=0)
    if not np.isfinite(least[-1]):
        return None
    ends = [size - 1]
    for begin in reversed(begins):
        ends.append(int(begin[ends[-1]]))
    return tuple(range(a, b) for a, b in pairwise(reversed(ends)))


ORDERS_OF_MAX = 6  # workers, which have 720 orders


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A stage, the memory of each of its workers, and its traffic in bytes.

    `seconds` is the time of one shard, with computing and sending; if no speed is known, its unit
    is the time of one block. For each shard, `hidden_bytes` go to the next stage and the same
    number comes back; it is 0 in the last stage. In a step, `sent_bytes` go to the coordinator and
    `received_bytes` come from it.
    """

    blocks: range
    workers: tuple[StageWorker, ...]
    backend: str | None
    terms: tuple[Terms, ...]
    seconds: float
    hidden_bytes: int
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, kw_only=True)
class StagesPlan:
    """The plan of all stages. `has_speed` is True if the speed of every worker is known."""

    costs: StageCosts
    stages: tuple[PlannedStage, ...]
    has_speed: bool

    @property
    def bubble(self) -> float:
        """The idle fraction of a step if all stages are equally fast: (P - 1) / (S + P - 1)."""
        ahead = len(self.stages) - 1
        return ahead / (self.costs.num_shards + ahead)

    @property
    def slowest(self) -> float:
        """The time of a shard in the slowest stage, in the unit of `PlannedStage.seconds`."""
        return max(stage.seconds for stage in self.stages)

    @property
    def step_seconds(self) -> float | None:
        """The seconds of a step, None if no speed is known.

        They are the sum of the first shard's time through all stages, of each further shard's time
        in the slowest stage, and of the transfer of gradients and weights, one after the other,
        over the coordinator's link.
        """
        if not self.has_speed:
            return None
        passing = sum(stage.seconds for stage in self.stages)
        passing += (self.costs.num_shards - 1) * self.slowest
        moved = sum(stage.sent_bytes + stage.received_bytes for stage in self.stages)
        return passing + moved / self.costs.run.bandwidth

    def plan(self) -> tuple[StagePlan, ...]:
        """Return the stages in the form that settings have."""
        return tuple(
            StagePlan(
                layers=(stage.blocks.start, stage.blocks.stop),
                worker=tuple(one.name for one in stage.workers if one.name),
                backend=stage.backend,
            )
            for stage in self.stages
        )


def of_settings(costs: StageCosts, workers: Sequence[StageWorker]) -> StagesPlan:
    """Return the stages of the run's settings, planned for the workers that they name.

    A stage that names no worker gets the next worker that no stage names. If `workers` is empty,
    nothing is known about any worker. Raises UsageError if the stages don't end with the model's
    last block, or if they name a worker that is not in `workers`.
    """
    planned = costs.run.settings.stages
    require_end([range(*stage.layers) for stage in planned], costs.num_blocks)
    by_name = {worker.name: worker for worker in workers}
    named = {name for stage in planned for name in stage.worker}
    left = iter([worker for worker in workers if worker.name not in named])
    groups = []
    for index, stage in enumerate(planned):
        names, group = stage.worker, list[StageWorker]()
        for name in names:
            if workers and name not in by_name:
                raise UsageError(
                    f"stages[{index}] worker={name}: the workers are {', '.join(by_name)}; give "
                    "all that stages name",
                    field=f"stages.{index}.worker",
                )
            group.append(by_name.get(name, StageWorker(name=name, kind=stage.backend or "cpu")))
        if not names:
            unknown = StageWorker(name="", kind=stage.backend or "cpu")
            worker = next(left, None if workers else unknown)
            if worker is None:
                raise UsageError(
                    f"stages[{index}]: no worker is left for this stage; give one more"
                )
            group.append(worker)
        for worker in group:
            if stage.backend not in (None, worker.kind):
                raise UsageError(
                    f"stages[{index}] backend={stage.backend}: worker {worker.name} computes on "
                    f"{worker.kind}",
                    field=f"stages.{index}.backend",
                )
        groups.append(tuple(group))
    return _of(costs, [range(*stage.layers) for stage in planned], groups)


def propose(costs: StageCosts, workers: Sequence[StageWorker]) -> StagesPlan:
    """Return stages that fit, one for each of `workers`; the slowest is as fast as possible.

    Workers get stages in their order. Raises UsageError if there are more workers than blocks, or
    if no cut fits. Of the cut that lacks the least memory, the error names the stage that lacks the
    most.
    """
    if len(workers) > costs.num_blocks:
        raise UsageError(
            f"{len(workers)} workers and {costs.num_blocks} blocks: a stage would have no block; "
            f"use {costs.num_blocks} workers or fewer"
        )
    cut = best_cut(_costs(costs, workers))
    if cut is None:
        shares = [
            _shares(costs, worker, stage, len(workers)) for stage, worker in enumerate(workers)
        ]
        cut = best_cut(shares)
        assert cut is not None, "there are as many blocks as workers"
        plan = _of(costs, cut, [(worker,) for worker in workers])
        require_fits(plan, "no cut fits; the one that comes closest has ")
    return _of(costs, cut, [(worker,) for worker in workers])


def faster_order(costs: StageCosts, workers: Sequence[StageWorker]) -> StagesPlan | None:
    """Return the fastest plan over all orders of `workers`; None if none fits.

    The result is also None for one worker, for more than ORDERS_OF_MAX, and for more workers than
    blocks. The dynamic program runs for each order, on matrices that are computed once for each
    worker and place.
    """
    if not 1 < len(workers) <= min(ORDERS_OF_MAX, costs.num_blocks):
        return None
    best: tuple[float, float, tuple[StageWorker, ...], tuple[range, ...]] | None = None
    matrices: dict[tuple[int, StageWorker], Costs] = {}
    for order in dict.fromkeys(permutations(workers)):
        table = _costs(costs, order, matrices)
        cut = best_cut(table)
        if cut is None:
            continue
        value = slowest(table, cut), total(table, cut)
        if best is None or value < best[:2]:
            best = *value, order, cut
    return None if best is None else _of(costs, best[3], [(one,) for one in best[2]])


def require_fits(plan: StagesPlan, before: str = "") -> None:
    """Raise UsageError if a stage lacks memory; the error names the stage that lacks the most."""
    lacking = [
        (terms.needed / worker.memory, index, worker, terms)
        for index, stage in enumerate(plan.stages)
        for worker, terms in zip(stage.workers, stage.terms, strict=True)
        if worker.memory is not None and terms.needed > worker.memory
    ]
    if not lacking:
        return
    _, index, worker, terms = max(lacking, key=lambda one: one[0])
    part = wording.spanned("block", plan.stages[index].blocks)
    raise UsageError(
        f"{before}stage {index} ({worker.name or 'no name'}) with {part}: it needs "
        f"{size(terms.needed)} (weights {size(terms.weights)}, activations {size(terms.kept)}), "
        f"and its worker has {size(worker.memory or 0)}; use more workers or memory, more "
        "training.num_shards (smaller ones), recompute: blocks or precision: bfloat16",
        field=f"stages.{index}" if plan.costs.run.settings.stages else "",
    )


def _of(
    costs: StageCosts, cut: Sequence[range], groups: Sequence[tuple[StageWorker, ...]]
) -> StagesPlan:
    """Return the plan of a cut; `groups` has the workers of each stage."""
    num_stages = len(cut)
    has_speed = all(worker.has_speed for group in groups for worker in group)
    stages = []
    for index, (own, group) in enumerate(zip(cut, groups, strict=True)):
        share = -(-costs.num_shards // len(group))
        backend = None
        if (
            any(worker.name or worker.memory for worker in group)
            and len({o.kind for o in group}) == 1
        ):
            backend = group[0].kind
        if costs.run.settings.stages:
            backend = costs.run.settings.stages[index].backend
        places = [_place(costs, index, num_stages, worker.kind, len(group)) for worker in group]
        gradient = int(costs.trained_bytes(places[0], own.start, own.stop))
        wire = _wire(costs, groups, index) if has_speed else 0.0
        computing = max(
            float(costs.work(place, own.start, own.stop)) / worker.speed(costs.block_work)
            for place, worker in zip(places, group, strict=True)
        )
        stages.append(
            PlannedStage(
                blocks=own,
                workers=group,
                backend=backend,
                terms=tuple(costs.terms(place, own.start, own.stop) for place in places),
                seconds=(computing + wire) * share / costs.num_shards,
                hidden_bytes=costs.hidden_bytes if index < num_stages - 1 else 0,
                sent_bytes=gradient * costs.nodes(len(group)),
                received_bytes=gradient * len(group),
            )
        )
    return StagesPlan(costs=costs, stages=tuple(stages), has_speed=has_speed)


def _place(costs: StageCosts, stage: int, num_stages: int, kind: str, sharing: int) -> Place:
    shards = -(-costs.num_shards // sharing)
    return Place(stage=stage, num_stages=num_stages, kind=kind, shards=shards)


def _costs(
    costs: StageCosts,
    workers: Sequence[StageWorker],
    known: dict[tuple[int, StageWorker], Costs] | None = None,
) -> list[Costs]:
    """Return the seconds of a shard in each stage, infinite where its worker has too little memory.

    `known` caches what depends only on a stage and its worker.
    """
    known, matrices = {} if known is None else known, []
    has_speed = all(worker.has_speed for worker in workers)
    for stage, worker in enumerate(workers):
        if (stage, worker) not in known:
            place = _place(costs, stage, len(workers), worker.kind, 1)
            work = matrix(costs, lambda a, b, place=place: costs.work(place, a, b))  # type: ignore[misc]
            fits = _shares(costs, worker, stage, len(workers)) <= 1
            known[stage, worker] = np.where(fits, work / worker.speed(costs.block_work), np.inf)
        wire = _wire(costs, [(worker,) for worker in workers], stage) if has_speed else 0.0
        matrices.append(known[stage, worker] + wire)
    return matrices


def _shares(costs: StageCosts, worker: StageWorker, stage: int, num_stages: int) -> Costs:
    """Return the fraction of the worker's memory that each stage needs; 0 if that is unknown."""
    place = _place(costs, stage, num_stages, worker.kind, 1)
    if worker.memory is None:
        return matrix(costs, lambda a, b: 0)
    needed = matrix(costs, lambda a, b: costs.terms(place, a, b).needed)
    return needed / worker.memory


def _wire(costs: StageCosts, groups: Sequence[tuple[StageWorker, ...]], stage: int) -> float:
    """Return the seconds in which a stage exchanges one shard's hidden states and gradients.

    A link is as fast as its slower end. Transfers are assumed not to overlap with computation.
    """
    slow = [min(one.bandwidth or costs.run.bandwidth for one in group) for group in groups]
    links = [min(pair) for pair in pairwise(slow)]
    beside = [links[at] for at in (stage - 1, stage) if 0 <= at < len(links)]
    return sum(costs.hidden_bytes / link for link in beside)
