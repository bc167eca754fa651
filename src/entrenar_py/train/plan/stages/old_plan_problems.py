"""Finds what the parts of a `hetero_config.json` contradict in each other, once each, by line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from entrenar_py.shared import wording
from entrenar_py.shared.config.fields import Record
from entrenar_py.train.service.address import Address

LOCAL = "local"  # the id of the worker on the coordinator's own machine


@dataclass(frozen=True, kw_only=True)
class OldWorker:
    """A worker, where others reached it, and its device, as `--backend` names it.

    `number` is its id; None if that can't be read, and so for others.
    """

    record: Record
    number: int | None
    hosts: tuple[str, ...]
    port: int | None
    device: str

    @property
    def name(self) -> str:
        """Its name for `entrenar worker --id`."""
        return f"worker-{self.number}"


@dataclass(frozen=True, kw_only=True)
class OldStage:
    """A stage with blocks `layers[0]` to `layers[1] - 1`, of the worker `number`, or of LOCAL."""

    record: Record
    number: int | str | None
    layers: tuple[int, int] | None
    is_last: bool | None

    @property
    def name(self) -> str:
        """The name of its worker for `entrenar worker --id`."""
        return LOCAL if self.number == LOCAL else f"worker-{self.number}"


def tell_hosts(coordinator: Address | None, workers: Sequence[OldWorker]) -> None:
    """Report each port that is used twice on one host."""
    taken = dict[tuple[str, int], str]()
    if coordinator is not None:
        taken[coordinator.host, coordinator.port] = "the coordinator"
    for worker in workers:
        if worker.port is None:
            continue
        places = [(host, worker.port) for host in worker.hosts]
        twice = next((place for place in places if place in taken), None)
        if twice is not None:
            worker.record.error(
                "port", f"port={worker.port} on {twice[0]}: {taken[twice]} has it; use another one"
            )
        taken |= dict.fromkeys(places, worker.record.what)


def tell_ids(workers: Sequence[OldWorker], stages: Sequence[OldStage]) -> None:
    """Report ids of two workers or two stages, and those with a worker or a stage alone.

    Ids of stages are not looked at while those of workers are wrong, and workers without a stage
    not while those of stages are, so that a mistake is told once.
    """
    numbers = [worker.number for worker in workers]
    if None in numbers or not stages:
        return
    for index, worker in enumerate(workers):
        if worker.number in numbers[:index]:
            first = numbers.index(worker.number)
            worker.record.error("id", f"id={worker.number}: workers[{first}] has it, too")
    if len(set(numbers)) == len(numbers) and _tell_stage_ids(numbers, stages):
        named = [stage.number for stage in stages]
        for worker in workers:
            if worker.number not in named:
                worker.record.error(
                    "id",
                    f"id={worker.number}: shard_plan has no stage for it; leave the worker out",
                )


def _tell_stage_ids(numbers: Sequence[int | None], stages: Sequence[OldStage]) -> bool:
    """Report ids of two stages, or of no worker; return whether there is nothing to report."""
    named = [stage.number for stage in stages]
    is_right = None not in named
    for index, stage in enumerate(stages):
        if stage.number is not None and stage.number in named[:index]:
            is_right = False
            stage.record.error(
                "id",
                f"id={stage.number}: shard_plan[{named.index(stage.number)}] has it, too; a worker "
                "has one stage",
            )
        elif stage.number not in (None, LOCAL, *numbers):
            is_right = False
            known = ", ".join(map(str, numbers)) or "none"
            stage.record.error(
                "id", f'id={stage.number}: no worker has it; workers are {known}, and "{LOCAL}"'
            )
    return is_right


def tell_layers(top: Record, stages: Sequence[OldStage], num_blocks: int | None) -> None:
    """Report gaps, overlaps, stages without blocks, and a wrong end or last stage."""
    if not stages:
        top.error("shard_plan", "shard_plan is empty; give a stage for each worker")
        return
    end: int | None = 0  # of the stages before; None if the last one of them is wrong
    is_whole = True
    for stage in stages:
        if stage.layers is None:
            return
        start, stop = stage.layers
        if problem := _of_place(start, stop, start if end is None else end):
            is_whole = False
            stage.record.error("start", f"start={start}, end={stop}: {problem}")
        end = stop if 0 <= start < stop else None
    _tell_last(top, stages)
    if is_whole and num_blocks is not None and end != num_blocks:
        stages[-1].record.error(
            "end",
            f"end={end}: the model has {num_blocks} blocks; `end` is exclusive, so use "
            f"{num_blocks}",
        )


def _tell_last(top: Record, stages: Sequence[OldStage]) -> None:
    """Report a last stage that is missing, not the last, or there twice."""
    marked = [index for index, stage in enumerate(stages) if stage.is_last]
    if any(stage.is_last is None for stage in stages):
        return
    if not marked:
        top.error("shard_plan", 'shard_plan: no stage has "is_last": true; mark the last one')
    for index in marked[1:]:
        stages[index].record.error(
            "is_last", f"is_last: true: shard_plan[{marked[0]}] is the last one, too; mark one"
        )
    if len(marked) == 1 and marked[0] != len(stages) - 1:
        stages[marked[0]].record.error(
            "is_last",
            f"is_last: true: stages come after it; mark shard_plan[{len(stages) - 1}] alone",
        )


def _of_place(start: int, stop: int, end: int) -> str:
    """Return what is wrong with a stage before which there are `end` blocks; "" if nothing is."""
    if start < 0:
        return "blocks are counted from 0"
    if start >= stop:
        return "it has no block; `end` is exclusive, so use start < end"
    if start > end:
        return f"no stage has {wording.spanned('block', range(end, start))}; let it start at {end}"
    if start < end:
        return f"block {start} is in a stage before it, too; let it start at {end}"
    return ""
