"""`entrenar finetune`: the coordinator and the workers on this machine, each in its own process.

A worker joins over TCP, as a worker on another machine does, and gets the settings through a pipe.
So there is one way to train, on one machine or on several. A worker has one thread (`staffing`).
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from entrenar_py import compute as backends
from entrenar_py.compute import Backend
from entrenar_py.compute.on_torch import CudaBackend
from entrenar_py.shared import scenario, trace
from entrenar_py.shared.errors import BackendUnavailable, SystemFailure, UsageError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.arithmetic.reduction import Aside
from entrenar_py.train.coordinator import topology
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.distill import student
from entrenar_py.train.finetune import foresight, outputs, settings_file, staffing, task
from entrenar_py.train.model import model_folder, preparation
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.settings import Distillation, Settings
from entrenar_py.train.model.workload import Finetuning
from entrenar_py.train.plan import plan as planning
from entrenar_py.train.service import coordinator, exit_codes, measures
from entrenar_py.train.service.address import Address
from entrenar_py.train.service.config import Checkpoint, Config
from entrenar_py.train.service.measures import Memory
from entrenar_py.train.wire.effects import Effect, Finish, Load
from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire_io.processes import Crew, Hand, Job
from entrenar_py.train.wire_io.tcp import WorkerClient

REPORT_EVERY_S = 2.0
T = TypeVar("T")


def work(pipe: Connection) -> None:
    """Do the one job that arrives through `pipe`, in three parts.

    The backend's name comes at once, and the settings when the coordinator has read the rows. So
    libraries, device and model are loaded while the coordinator loads its own, and the model's
    blocks are compiled on a GPU. The rest comes when the coordinator listens. Until then failures
    are kept: if one is the coordinator's too, the coordinator reports it.
    """
    torch.set_num_threads(1)  # the number of threads changes the order of sums
    desk = Job(pipe)
    if (name := desk.next()) is None:
        return
    backend = _kept(lambda: _opened_ahead(name.decode()))
    if (settings := desk.next()) is None:
        return
    workload = _kept(lambda: _loaded(settings.decode(), backend()))
    if (job := desk.next()) is None:
        return
    is_for_all = False
    try:
        finish = asyncio.run(_stay(desk, workload(), backend(), json.loads(job)))
    except SystemFailure as error:  # a teacher's shard is missing, for any worker
        finish, is_for_all = Finish("failed", str(error)), True
    answer = {"status": finish.status, "reason": finish.reason, "is_for_all": is_for_all}
    desk.answer(json.dumps(answer).encode())


def _kept(load: Callable[[], T]) -> Callable[[], T]:
    """Call `load`; return a function that returns its result or raises its exception."""
    try:
        result = load()
    except Exception as error:  # noqa: BLE001  (raised by the function)
        failure = error

        def fails() -> T:
            raise failure

        return fails
    return lambda: result


def _opened_ahead(name: str) -> Backend:
    model_folder.library()
    return backends.open_backend(name)


def _loaded(settings: str, backend: Backend) -> Finetuning:
    prepared = preparation.prepare(settings_file.of_text(settings, "the settings"))
    workload = student.workload(prepared)
    if isinstance(backend, CudaBackend) and prepared.settings.distill is None:
        training = prepared.settings.training
        num_rows = min(workload.num_samples, training.batch_size) // training.num_shards
        # The first step meets the same problem, and reports it.
        with suppress(BackendUnavailable, UsageError), backend.failures():
            workload.warm_up(backend.place, max(1, num_rows))
    return workload


async def _stay(
    desk: Job, workload: Finetuning, backend: Backend, job: Mapping[str, Any]
) -> Finish:
    loop = asyncio.get_running_loop()
    loop.add_reader(desk.fileno(), _abandoned)
    plan = TrainingPlan.from_dict(job["plan"])
    member = Member(plan, lambda rank: backend, workload)
    machine = topology.of(plan).worker(
        member.replicas.terms,
        secret=bytes.fromhex(job["secret"]),
        backend=backend.name,
        rank=job["rank"],
        timing=Timing(),
    )
    client = WorkerClient(machine, member, notify=partial(_let_in, member, backend))
    reports = asyncio.create_task(_report_memory(desk))
    finish = await client.run(job["host"], job["port"], patience_s=Timing().gather_s)
    reports.cancel()
    loop.remove_reader(desk.fileno())
    return finish


async def _report_memory(desk: Job) -> None:
    while True:
        desk.note(json.dumps(measures.memory_peak()).encode())
        await asyncio.sleep(REPORT_EVERY_S)


def _let_in(member: Member, backend: Backend, effect: Effect) -> None:
    """Record which device this worker computes on when it is admitted."""
    if isinstance(effect, Load):
        member.recorder.emit(
            trace.Attempt(
                backend=backend.name,
                served=True,
                device=backend.device,
                software=backend.software,
            )
        )


def _abandoned() -> None:
    os._exit(1)


LOOPBACK = Address("127.0.0.1", 0)
SECRET_BYTES = 32
LOOK_EVERY_S = 0.5
DEATHS_MAX = 4  # a worker that died this often is not started again


def train(
    path: Path,
    *,
    resume: bool,
    names: Sequence[str] = ("cpu",),
    halt_on_spike: bool = False,
    tensorboard: Path | None = None,
    follow: bool | None = None,
) -> int:
    """Train as the configuration at `path` says; return the exit code.

    Workers compute on the backends called `names` in turns, with at least one worker for each. If
    the CPU is the only backend, the number of workers follows from its cores, the shards and the
    memory, unless the configuration gives it. `halt_on_spike` and `tensorboard` are as in `Task`.
    `follow` says whether a student waits for its teacher's shards; None means as configured. Raises
    ContractError and UsageError for a problem found before the run begins, and BackendUnavailable
    for a device that is missing or does not start.
    """
    settings = _following(settings_file.load(path), follow)
    settings_file.require_other(settings, path, "entrenar finetune")
    if settings.strategy is not None:
        raise UsageError(
            f"{path}: strategy={settings.strategy} is for ranks of torchrun: start torchrun "
            f"--nproc_per_node=N -m entrenar_py.finetune {path}, or leave strategy out"
        )
    outputs.require_own(settings)
    coordinator.require_intended(
        settings.output / task.CHECKPOINT, resume=resume, other="another `output:`"
    )
    if (
        max(settings.num_workers, len(names)) > settings.training.num_shards
    ):  # without backends, the file's reader has already refused it
        raise UsageError(
            f"--backend={','.join(names)}: {path} has training.num_shards="
            f"{settings.training.num_shards}, so a worker would have no shard; use num_shards >= "
            f"{len(names)}, or fewer backends"
        )
    if settings.lora.dora and any(scenario.backend_kind(name) == "wgpu" for name in names):
        raise UsageError(
            f"--backend={','.join(names)}: {path} has lora.dora: true, and backend wgpu has no "
            "kernel for its norms; use cpu or cuda, or leave dora out"
        )
    with closing(_Workers(names)) as workers:
        if (given := _number_given(settings, names)) is not None:
            workers.open(given)
        imported = Aside().start(model_folder.library)
        devices = _opened(names)
        imported()
        prepared = preparation.prepare(settings, day=student.day_of(settings))
        settings = prepared.settings
        foresight.say_rows(prepared)
        num_workers, limit = _staff(prepared, names, resume=resume)
        settings = replace(settings, workers=num_workers)
        prepared = replace(prepared, settings=settings)
        devices_now = planning.of_backends(names, settings.devices)  # with what is free now
        workers.open(num_workers)
        workers.settings = settings
        # Workers of GPUs load while this process looks: each has one copy of the frozen weights in
        # the host's memory, as this process will. A student may have to wait for its teacher.
        are_on_gpus = all(scenario.backend_kind(name) == "cuda" for name in names)
        if are_on_gpus and settings.adapts and settings.distill is None:
            workers.load()
        foresight.look(path, prepared, names, devices_now)
        if settings.distill is None:
            workers.load()
        torch.set_num_threads(1)  # more would wait for each other while a checkpoint is mapped
        workload = student.workload(prepared)
        foresight.say_teacher(workload)
        foresight.say_warnings()
        output = outputs.make_folder(prepared)
        config = Config(
            plan=preparation.plan_of(settings, workload),
            listen=LOOPBACK,
            secret=secrets.token_bytes(SECRET_BYTES),
            context=None,
            wait_for=num_workers,
            timing=Timing(),
            checkpoint=Checkpoint(
                path=output / task.CHECKPOINT, every_steps=settings.checkpoint_every
            ),
            metrics=output / task.METRICS,
            ledger=output / task.LEDGER,
        )
        for rank in range(num_workers):
            name = names[rank % len(names)]
            printing.say(f"worker {rank}: {name} ({devices[name]})")
        if "cpu" in names:
            num_shards = settings.training.num_shards
            printing.say(staffing.remark(num_workers, num_shards=num_shards, limit=limit))
        with task.opened(
            prepared,
            workload,
            plan=config.plan,
            # Validation rows are scored on a CUDA device if a worker has one.
            device=torch.device(next((name for name in names if name.startswith("cuda")), "cpu")),
            listening=partial(workers.start, config),
            memory=workers.memory,
            halt_on_spike=halt_on_spike,
            tensorboard=tensorboard,
        ) as finetuning:
            code = coordinator.serve(config, finetuning, resume=resume)
            # No user stopped it: the workers' problem has to be fixed before the run can resume.
            is_given_up = code == exit_codes.STOPPED and workers.are_gone
            return exit_codes.WRONG if is_given_up else code


def _staff(prepared: Prepared, names: Sequence[str], *, resume: bool) -> tuple[int, str]:
    """Return the number of workers, and the reason why no more cores are used."""
    settings = prepared.settings
    most = staffing.busy(staffing.num_cores(), settings.training.num_shards)
    if (given := _number_given(settings, names)) is not None:
        return given, f"workers: {most} would use more cores, with the same bits"
    if resume and (begun := staffing.begun_with(settings.output / task.LEDGER)):
        return begun, "the run began with this many workers"
    return foresight.workers_that_fit(prepared, most), "this machine has no memory for more workers"


def _number_given(settings: Settings, names: Sequence[str]) -> int | None:
    """Return the number of workers; None if it depends on this machine's cores and memory."""
    depends = settings.workers is None and tuple(names) == ("cpu",)
    return None if depends else max(settings.num_workers, len(names))


def _following(settings: Settings, follow: bool | None) -> Settings:
    if settings.distill is None or follow is None or follow is (settings.distill.wait_s > 0):
        return settings
    wait_s = Distillation.wait_s if follow else 0.0
    return replace(settings, distill=replace(settings.distill, wait_s=wait_s))


def _opened(names: Sequence[str]) -> dict[str, str]:
    """Return the device of each backend. Opening them here ends the run early if one is missing."""
    return {name: backends.open_backend(name).device for name in dict.fromkeys(names)}


class _Workers:
    """The worker processes, one for each rank. A process that dies is restarted, up to a limit.

    They load their libraries and open their devices after `open`, load the model after `load`, and
    take part after `start`. `settings` must be there before `load`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.settings: Settings | None = None
        self._names = names
        self._crew = Crew(work, preload=staffing.preloaded(names), one_job=True)
        self._give_up: coordinator.GiveUp = lambda _: False
        self._hands: dict[int, Hand] = {}
        self._is_loading = self._take_part = False
        self._deaths = Counter[int]()
        self._peaks: dict[int, Memory] = {}
        self._address = LOOPBACK
        self.are_gone = False

    def open(self, num_workers: int) -> None:
        """Start the processes that don't run."""
        for rank in range(num_workers):
            if rank not in self._hands:
                self._hands[rank] = self._new(rank)

    def load(self) -> None:
        """Send the settings, once."""
        if not self._is_loading:
            self._is_loading = True
            for hand in self._hands.values():
                self._send_settings(hand)

    def start(self, config: Config, address: Address, give_up: coordinator.GiveUp) -> None:
        self._config, self._address, self._give_up = config, address, give_up
        self.load()
        self._take_part = True
        for rank, hand in self._hands.items():
            self._join(rank, hand)
        asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def memory(self) -> Memory:
        return measures.total([measures.memory_peak(), *self._peaks.values()])

    def close(self) -> None:
        if not self._take_part:  # the run was refused, and they may load for long
            for hand in self._hands.values():
                hand.process.kill()
        self._crew.dismiss()

    def _new(self, rank: int) -> Hand:
        return self._crew.give(self._names[rank % len(self._names)].encode())

    def _send_settings(self, hand: Hand) -> None:
        assert self.settings is not None, "they are set before a model is loaded"
        # Not the file's name: the file may have changed when a worker is started again.
        hand.add(settings_file.to_text(settings_file.to_record(self.settings)).encode())

    def _join(self, rank: int, hand: Hand) -> None:
        job = {
            "plan": self._config.plan.to_dict(),
            "rank": rank,
            "host": self._address.host,
            "port": self._address.port,
            "secret": self._config.secret.hex(),
        }
        hand.add(json.dumps(job).encode())

    def _died(self, rank: int, code: int) -> None:
        self._deaths[rank] += 1
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if self._deaths[rank] == DEATHS_MAX:
            self._stay_away(rank, f"worker {rank} died {DEATHS_MAX} times ({how})")
            return
        printing.say(f"worker {rank} died ({how}) and is started again")
        try:
            self._hands[rank] = self._new(rank)
            self._send_settings(self._hands[rank])
            self._join(rank, self._hands[rank])
        except SystemFailure as error:  # the next check finds it dead again
            printing.say(f"worker {rank}: {error}")

    def _stay_away(self, rank: int, reason: str, *, is_for_all: bool = False) -> None:
        printing.say(f"{reason} and is not started again")
        if self.are_gone:
            return
        if is_for_all:  # each of the others would wait as long, and then fail as well
            self.are_gone = self._give_up(f"no other worker can do its part: {reason}")
        elif all(self._deaths[other] == DEATHS_MAX for other in self._hands):
            self.are_gone = self._give_up(f"no worker is left: {reason}")

    def _look(self) -> None:
        """Read the workers' notes, and restart workers that died.

        By then, the coordinator has given their shards to others.
        """
        for rank, hand in self._hands.items():
            while hand.pipe.poll() and (note := hand.heard()) is not None:
                self._peaks[rank] = Memory(*json.loads(note))
            code = hand.process.exitcode
            if self._deaths[rank] == DEATHS_MAX:
                continue
            if code:
                self._died(rank, code)
            elif code == 0 and (reason := _failure(hand)):  # for example, rows have changed
                self._deaths[rank] = DEATHS_MAX
                is_for_all = bool(json.loads(hand.answer or b"{}").get("is_for_all"))
                self._stay_away(rank, f"worker {rank} ended ({reason})", is_for_all=is_for_all)
        asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)


def _failure(hand: Hand) -> str:
    ended = {} if hand.answer is None else json.loads(hand.answer)
    return str(ended["reason"]) if ended.get("status") == "failed" else ""
