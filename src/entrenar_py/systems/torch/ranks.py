"""Runs the trainers over torch.distributed: one process per rank, with torchrun's environment.

A run consists of lives. A life ends at a stop, when a worker joins, and when a worker dies. The
next one starts from the checkpoint with the workers present then. `observe` records each rank, as
it records a user's trainer.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from entrenar_py import systems
from entrenar_py.check.observing import FAULTS, FOLDER
from entrenar_py.check.rank_files import assembly
from entrenar_py.shared import mutants, process, trace, workers
from entrenar_py.shared.errors import BackendUnavailable, SystemFailure
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.patience import Patience
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems import preload
from entrenar_py.systems.torch.steps import NotFinite
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.wire_io.processes import Crew, Hand, Job


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """The division of the work among the ranks of one life (see `run`).

    Each rank has `micro_batches` a step. `group_size` consecutive ranks compute one batch together.
    With `in_stages` they form a pipeline, and each has its own parameters.
    """

    micro_batches: int
    group_size: int = 1
    in_stages: bool = False


def placed_faults(
    scenario: Scenario, fault: Fault, workers: Sequence[int], arranged: Arrangement
) -> list[Fault]:
    """Return `fault` once for each rank that it affects, with the rank's index and micro-batch.

    A fault without rank and shard affects all ranks and is returned unchanged. A logical shard
    becomes the micro-batch at the same place in its rank's part. Ranks that compute a batch
    together may hold copies, so a huge gradient, or a fault at a shard, affects all of them. In
    stages, a step is one micro-batch; the last stage gets faults of the loss, and the stage of the
    tensor (or the first) gets faults of gradients.
    """
    if fault.kind == "join" or (fault.rank is not None and fault.rank not in workers):
        return []
    rank = None if fault.rank is None else workers.index(fault.rank)
    if fault.kind == "leave":
        return [replace(fault, rank=rank)]
    size, micro = arranged.group_size, None
    if fault.shard is not None:
        group, micro = _of_shard(scenario, fault.shard, len(workers) // size, arranged)
    elif rank is not None:
        group = rank // size
    else:
        return [fault]
    members = range(group * size, (group + 1) * size)
    if rank is not None and rank not in members:
        return []
    if arranged.in_stages and size > 1:
        members, micro = _in_stages(fault, members), None
    elif rank is not None and fault.kind != "huge_gradient":
        members = range(rank, rank + 1)
    return [replace(fault, rank=member, shard=micro) for member in members]


def _of_shard(
    scenario: Scenario, shard: int, num_groups: int, arranged: Arrangement
) -> tuple[int, int]:
    """Return the group of ranks that computes logical shard `shard`, and its micro-batch."""
    runs = sharding.runs(range(scenario.num_shards), range(num_groups))
    group, run = next((group, run) for group, run in runs.items() if shard in run)
    return group, (shard - run[0]) * arranged.micro_batches // len(run)


def _in_stages(fault: Fault, members: range) -> range:
    if fault.kind == "non_finite_loss":
        return members[-1:]
    if fault.tensor is None and fault.kind != "huge_gradient":
        return members[:1]
    return members


PATIENCE_S = 120.0
_SILENT = "silent"  # the status of a rank that did not answer
PARTING_S = 5.0  # how long other ranks may continue after one failed: their collectives may hang


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The job of one process: rank `index` of `workers` in life `life` of a run.

    It trains up to step `until`, exclusive. If it `saves`, it writes a checkpoint after every step,
    from which the next life starts.
    """

    scenario: Scenario
    index: int
    workers: tuple[int, ...]
    life: int
    until: int
    saves: bool
    device: torch.device
    checkpoint: Path

    @property
    def resumes(self) -> bool:
        """True if training starts from the checkpoint."""
        return self.life > 0

    @property
    def world_size(self) -> int:
        """The number of ranks in this life."""
        return len(self.workers)

    @property
    def worker(self) -> int:
        """The worker's rank in the scenario, which is the same in all lives."""
        return self.workers[self.index]

    @property
    def seed(self) -> int:
        """The random seed, different for every worker and every life."""
        return self.seed_of(self.worker)

    def seed_of(self, worker: int) -> int:
        """Return the seed of `worker` in this life."""
        return int(self.scenario.rng("torch", worker, self.life).integers(2**63))

    def random_states(self) -> list[Tensor]:
        """Return the states of torch's generators on the CPU and on this rank's GPU, if any."""
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    def all_random_states(self) -> dict[int, list[Tensor]]:
        """Return the random states of every rank, by worker; all ranks must call it."""
        states: list[list[Tensor]] = [[] for _ in self.workers]
        dist.all_gather_object(states, self.random_states())
        return dict(zip(self.workers, states, strict=True))

    def restore_random(self, states: Sequence[Tensor]) -> None:
        """Restore the generators from the result of `random_states`."""
        torch.set_rng_state(states[0].cpu())
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(states[1].cpu(), self.device)


def write(checkpoint: Path, content: Mapping[str, Any]) -> None:
    """Write `content` atomically: a process that dies meanwhile leaves the previous checkpoint."""
    unfinished = checkpoint.with_suffix(".part")
    torch.save(content, unfinished)
    unfinished.replace(checkpoint)


# --- the process that starts them -------------------------------------------------------------


@cache
def crew() -> Crew:
    """Return the processes of the ranks; they end with this process."""
    made = Crew(main, preload=preload.of_ranks(), one_job=True)
    atexit.register(made.dismiss)
    return made


def run(
    scenario: Scenario,
    *,
    micro_batches: int | None = None,
    promises: tuple[str, ...] = (),
    group_size: Callable[[Scenario, int], int] = lambda *_: 1,
    in_stages: bool = False,
) -> trace.Trace:
    """Train as `scenario` says, with the system that it names.

    Each rank has `micro_batches` a step, by default the scenario's accumulation. `group_size`
    returns, for a number of ranks, how many consecutive ones compute one batch together. With
    `in_stages` they form a pipeline, and each has its own parameters.
    """

    def arrange(world_size: int) -> Arrangement:
        return Arrangement(
            micro_batches=micro_batches or scenario.accumulation,
            group_size=group_size(scenario, world_size),
            in_stages=in_stages,
        )

    with tempfile.TemporaryDirectory(prefix="entrenar-") as folder:
        lives = _Lives(scenario, Path(folder), arrange)
        status, reason = lives.live()
        return trace.Trace(
            scenario=scenario,
            environment=process.environment(),
            promises=promises,
            events=(*lives.events, trace.End(status=status, reason=reason)),
        )


class _Lives:
    """A run, life by life."""

    def __init__(
        self, scenario: Scenario, folder: Path, arrange: Callable[[int], Arrangement]
    ) -> None:
        self._scenario, self._folder, self._arrange = scenario, folder, arrange
        self._life = 0
        self._workers = workers.initial_ranks(scenario.world_size, scenario.faults)
        self._faults = list(scenario.faults)  # faults that have not occurred yet
        self._joins = [one for one in self._faults if one.kind == "join"]
        self.events: list[trace.Event] = []

    def live(self) -> tuple[str, str]:
        """Run all lives; return the status of the run, and the reason."""
        scenario, step = self._scenario, 0
        ends = {*scenario.stops, *((one.step or 0) for one in self._joins), scenario.num_steps}
        for until in sorted(ends - {0}):
            self._join(step)
            end = self._reach(until)
            if end is not None:
                return end
            step = until
        return "completed", ""

    def _reach(self, until: int) -> tuple[str, str] | None:
        """Train to step `until`, exclusive; return None, or status and reason of an earlier end."""
        while True:
            answers, died = self._one_life(until)
            if all(status == "done" for status, _ in answers):
                return None
            for status, reason in answers:
                if status == "halted":
                    return status, reason
            if not died or died - self._left():
                said = (reason for status, reason in answers if status != _SILENT)
                return "failed", next(said, "every rank died")
            self._workers = [worker for worker in self._workers if worker not in died]

    def _left(self) -> set[int]:
        struck = [event.fault for event in self.events if isinstance(event, trace.Injected)]
        return {fault["rank"] for fault in struck if fault["kind"] == "leave"}

    def _join(self, step: int) -> None:
        for fault in [one for one in self._joins if one.step == step]:
            assert fault.rank is not None, "faults.NEEDED has it"
            self.events += [
                trace.Injected(fault=fault.to_dict(), step=step, rank=fault.rank),
                trace.Membership(step=step, rank=fault.rank, change="joined"),
            ]
            self._workers = sorted([*self._workers, fault.rank])
            self._joins.remove(fault)

    def _one_life(self, until: int) -> tuple[list[tuple[str, str]], set[int]]:
        """Run one life; return the status and reason of each rank, and the workers that died.

        The status is _SILENT for a rank that died or hung.
        """
        folder = self._folder / f"life-{self._life:03}"
        folder.mkdir()
        scenario, workers = self._scenario, tuple(self._workers)
        arranged = self._arrange(len(workers))
        placed = {
            json.dumps(adapted.to_dict()): fault
            for fault in self._faults
            for adapted in placed_faults(scenario, fault, workers, arranged)
        }
        saves = bool(scenario.stops) or any(f.kind in ("leave", "join") for f in scenario.faults)
        job = {
            "scenario": scenario.to_dict(),
            "workers": workers,
            "until": until,
            "life": self._life,
            "saves": saves,
            "folder": str(folder),
            "checkpoint": str(self._folder / "checkpoint"),
            "faults": [json.loads(one) for one in placed],
        }
        hands = [crew().give(json.dumps({**job, "index": i}).encode()) for i in range(len(workers))]
        self._life += 1
        dead = _gather(hands, scenario.options.get("deadline_s", PATIENCE_S))
        answers = [
            (_SILENT, "", False) if hand.answer is None else json.loads(hand.answer)
            for hand in hands
        ]
        self._take(folder, arranged, placed, struck=any(struck for _, _, struck in answers))
        ends = [(status, reason) for status, reason, _ in answers]
        return ends, {w for w, hand in zip(workers, hands, strict=True) if hand in dead}

    def _take(
        self, folder: Path, arranged: Arrangement, placed: Mapping[str, Fault], *, struck: bool
    ) -> None:
        """Add the events that the ranks of a life recorded, with ranks replaced by workers."""
        ranks, problems = assembly.load(folder)
        if problems:
            raise SystemFailure(problems[0])
        events = assembly.numbered(
            assembly.ordered(ranks), arranged.micro_batches, assembly.places(ranks)
        )
        for event in [*assembly.holdings(ranks), *events]:
            if isinstance(event, trace.Injected):
                fault = placed[json.dumps(dict(event.fault))]
                event = replace(event, fault=fault.to_dict())
                self._faults = [one for one in self._faults if one != fault]
            rank = getattr(event, "rank", None)
            if rank is not None:
                event = replace(event, rank=self._workers[rank])  # type: ignore[call-arg]
            self.events.append(event)
        if struck and self._scenario.mutant is not None:
            self.events.insert(0, trace.Planted(name=self._scenario.mutant))


def _gather(hands: Sequence[Hand], patience_s: float) -> list[Hand]:
    """Wait until every rank has answered or died, and return those that died.

    After a rank has failed, the other ranks have PARTING_S left, because their collectives may wait
    forever.
    """
    dead = []
    patience, deadline = Patience(patience_s), math.inf
    waiting = list(hands)
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        ready = connection.wait([hand.pipe for hand in waiting], min(left_s, patience.interval_s))
        if not ready and patience.look():
            break
        for hand in [one for one in waiting if one.pipe in ready]:
            hand.heard()
            waiting.remove(hand)
            if hand.answer is None:
                dead.append(hand)
            if hand.answer is None or json.loads(hand.answer)[0] == "failed":
                deadline = min(deadline, time.monotonic() + PARTING_S)
    crew().gather(0.0)
    return dead


# --- one rank's process -----------------------------------------------------------------------


def main(pipe: Connection) -> NoReturn:
    """Do one job, answer, and end at once.

    torch is not shut down: gloo's threads sometimes hang or abort when it is.
    """
    torch.set_num_threads(1)
    desk = Job(pipe)
    message = desk.next()
    if message is not None:
        job = json.loads(message)
        # torch's output isn't part of a report. The file can be read until the run is over.
        with Path(job["folder"], f"{job['index']:05}.output.txt").open("wb") as output:
            os.dup2(output.fileno(), sys.stdout.fileno())
            os.dup2(output.fileno(), sys.stderr.fileno())
        scenario = Scenario.from_dict(job["scenario"])
        with mutants.planted(scenario.mutant) as planting:
            status, reason = _train(scenario, job)
        desk.answer(json.dumps([status, reason, planting.struck]).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _train(scenario: Scenario, job: Mapping[str, Any]) -> tuple[str, str]:
    """Train as one rank; return the status and the reason."""
    index, workers, folder = job["index"], tuple(job["workers"]), Path(job["folder"])
    os.environ.update(
        {
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(len(workers)),
            FOLDER: str(folder),
            FAULTS: json.dumps(job["faults"]),
        }
    )
    try:
        device = _device(scenario, index, len(workers))
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=index,
            world_size=len(workers),
            timeout=timedelta(seconds=scenario.options.get("deadline_s", PATIENCE_S)),
        )
        rank = Rank(
            scenario=scenario,
            index=index,
            workers=workers,
            life=job["life"],
            until=job["until"],
            saves=job["saves"],
            device=device,
            checkpoint=Path(job["checkpoint"]),
        )
        systems.module_of(scenario.system).train(rank)
    except NotFinite as error:
        return "halted", str(error)
    except Exception as error:  # noqa: BLE001  (a rank's crash is a result: its run failed)
        return "failed", f"rank {index}: {type(error).__name__}: {error}"
    return "done", ""


def _device(scenario: Scenario, index: int, world_size: int) -> torch.device:
    """Return the CPU, or the rank's own GPU; raise BackendUnavailable if there are too few GPUs."""
    if scenario.backends[0] != "cuda":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count < world_size:
        raise BackendUnavailable(
            f"backend cuda: {world_size} ranks need a GPU each, but this machine has {count}; "
            f"use --world-size {max(count, 1)} or less"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
