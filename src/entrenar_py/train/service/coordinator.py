"""`entrenar coordinator`: serves one run to its end, from its first step or from a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from entrenar_py.shared import process, systems
from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.trace import writer
from entrenar_py.shared.trace.ledger import Head
from entrenar_py.shared.trace.writer import Mark
from entrenar_py.train.arithmetic.tensors import Array, Workload
from entrenar_py.train.coordinator import topology
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.service import exit_codes, file_locks, measures, progress, signals
from entrenar_py.train.service.address import Address
from entrenar_py.train.service.config import Config
from entrenar_py.train.service.host import Host, Stepped
from entrenar_py.train.service.measures import Memory
from entrenar_py.train.service.run_events import Listener
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Finish
from entrenar_py.train.wire.messages import Stage
from entrenar_py.train.wire.terms import Package, Run
from entrenar_py.train.wire_io.endpoints import ReadPiece, no_piece
from entrenar_py.train.wire_io.tcp import CoordinatorServer


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that is over, with its tensors by name after `made` steps.

    `digest` is the digest of weights and buffers, `ledger` the last line of the ledger, or None.
    `tell` sends an event to the listeners.
    """

    finish: Finish
    made: int
    tensors: Mapping[str, Array]
    digest: str
    ledger: Mark | None
    tell: Listener


GiveUp: TypeAlias = Callable[[str], bool]  # whether the run was still going on
Listening: TypeAlias = Callable[[Address, GiveUp], None]


def ignore(_address: Address, _give_up: GiveUp) -> None:
    """Do nothing when workers may connect, because they are started elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training run to serve, and its callbacks.

    `workload` defaults to the plan's workload. `listening` is called when workers may connect, with
    the address and a function that ends the run for a given reason. `memory` returns the peak
    memory of the run's processes on this machine. `stepped` is called after each step of a star,
    and when one is resumed, with the number of steps so far, the tensors by name, which it must
    copy, and a function that sends an event to the listeners. `complete` is called with the last
    tensors and such a function before a run reports completion; if it raises an exception, the run
    does not complete. `ended` is called when the run is over, before the listeners are closed.
    `halt_on_spike` halts a star's run before a step with a gradient far larger than the previous
    ones. Event files go to the folder `tensorboard`, if given. `package` has the files that workers
    may fetch; `piece` reads them. After a signal, the current step has `grace_s` seconds, by
    default no limit. `make_server` creates the object that does the coordinator's arithmetic.
    `machine` is the coordinator's state machine, by default the one of the plan's topology.
    """

    workload: Workload | None = None
    listening: Listening = ignore
    memory: Callable[[], Memory] = measures.memory_peak
    stepped: Stepped = lambda made, tensors, tell: None
    complete: Callable[[Mapping[str, Array], Listener], None] = lambda tensors, tell: None
    ended: Callable[[Ended], None] = lambda _: None
    halt_on_spike: bool = False
    tensorboard: Path | None = None
    package: Package | None = None
    piece: ReadPiece = no_piece
    grace_s: float | None = None
    make_server: Callable[..., Server] = Server
    machine: type[Coordinator] | None = None


def serve(settings: Config, task: Task, *, resume: bool) -> int:
    """Serve a run to its end; return the exit code. Raises the same exceptions as `run`."""
    torch.set_num_threads(1)  # the split of a sum over threads is part of its order
    with ExitStack() as stack:
        path = None if settings.checkpoint is None else settings.checkpoint.path
        paths = {"checkpoint": path, "ledger": settings.ledger, "metrics": settings.metrics}
        file_locks.claim(paths, stack)
        require_intended(path, resume=resume)
        listeners = progress.listeners(
            stack,
            num_steps=settings.plan.num_steps,
            metrics=settings.metrics,
            tensorboard=task.tensorboard,
        )
        return _run(settings, task, listeners, resume=resume)


def require_intended(path: Path | None, *, resume: bool, other: str = "another path") -> None:
    """Raise UsageError if --resume is missing but needed, or given without a checkpoint's path.

    `other` is what to change in the configuration for a new run.
    """
    if path is None and resume:
        raise UsageError(
            "--resume: the configuration has no checkpoint to continue from; give it one"
        )
    if path is not None and path.exists() and not resume:
        raise UsageError(
            f"checkpoint {path}: it already exists; continue with --resume, or give {other}"
        )


def _run(settings: Config, task: Task, listeners: Sequence[Listener], *, resume: bool) -> int:
    path = None if settings.checkpoint is None else settings.checkpoint.path
    host = Host(
        settings.plan,
        checkpoint_path=path,
        listeners=listeners,
        workload=task.workload,
        halt_on_spike=task.halt_on_spike,
        stepped=task.stepped,
        piece=task.piece,
        make_server=task.make_server,
    )
    with closing(host):
        first = host.resume() if resume else 0
        if first == settings.plan.num_steps:
            _open_ledger(settings, host, resume=resume)
            signals.ignore()
            finish = Finish("completed", "it was complete already")
        else:
            finish = asyncio.run(_serve(settings, task, host, first, resume=resume))
        arrays = host.server.replica.replica.arrays
        if finish.status == "completed":
            task.complete(arrays, host.tell)
        host.finish(finish)
        ended = Ended(
            finish=finish,
            made=host.made,
            tensors=arrays,
            digest=host.digest(),
            ledger=host.ledger_end,
            tell=host.tell,
        )
        task.ended(ended)
    problem = host.broken or host.unsaved
    if problem is not None:
        raise SystemFailure(f"{problem}; make room or give access, and start it again")
    return exit_codes.OF_FINISH[finish.status]


async def _serve(settings: Config, task: Task, host: Host, first: int, *, resume: bool) -> Finish:
    server = CoordinatorServer(
        replace(_run_of(settings, host, first, resume=resume), package=task.package),
        host.server,
        timing=settings.timing,
        secret=settings.secret,
        kind=task.machine or topology.of(settings.plan).coordinator,
        notify=host.notify,
    )
    _open_ledger(settings, host, resume=resume)
    try:
        at = await server.listen(*settings.listen, context=settings.context)
    except (OSError, UsageError) as error:
        if settings.ledger is not None and not resume:
            settings.ledger.unlink()  # it was just created, and would block the next attempt
        if isinstance(error, UsageError):
            raise
        problem = f"can't listen there ({error.strerror or error}); use another one"
        raise UsageError(f"listen={settings.listen}: {problem}") from error
    loop = asyncio.get_running_loop()
    host.traffic = lambda: (server.bytes_in, server.bytes_out)
    host.memory = task.memory
    peers = server.end.machine.peers
    host.backends = lambda: {
        peer.rank: peer.backend for peer in peers.values() if peer.rank is not None
    }
    host.give_up = lambda reason: _end_soon(loop, server, reason)
    signals.deliver(signals.Stopper(server, host.note, task.grace_s).stop)
    host.note("listening", f"listens at {Address(*at)}, from step {first} on")
    task.listening(Address(*at), partial(_end_soon, loop, server))
    finish = await server.finish()
    signals.ignore()
    number, last = server.strangers
    if number:
        here, why = last[-1]
        text = f"{number} connections were not admitted; the last from {here}: {why}"
        host.note("strangers", text)
    return finish


def _run_of(settings: Config, host: Host, first: int, *, resume: bool) -> Run:
    plan = settings.plan
    # The workers of a mesh hold the state. The coordinator has it at the end only if it requests it
    # then.
    saves = set() if topology.of(plan) is topology.STAR else {plan.num_steps}
    if settings.checkpoint is not None:
        saves = {*range(first, plan.num_steps, settings.checkpoint.every_steps)} - {first}
        saves.add(plan.num_steps)
    run = host.server.run_between(first, plan.num_steps)
    if run.places is not None:
        return replace(run, resumed=resume, saves=saves)
    return replace(run, resumed=resume, num_awaited=settings.wait_for, saves=saves, by_speed=True)


def _open_ledger(settings: Config, host: Host, *, resume: bool) -> None:
    if settings.ledger is None:
        return
    head = Head(
        plan=settings.plan,
        environment=process.environment(),
        traits=systems.traits_of(settings.plan),
    )
    try:
        if resume:
            host.write_to(*writer.reopen(settings.ledger, head, since=host.since))
        else:
            host.write_to(writer.create(settings.ledger, head), writer.Standing())
    except OSError as error:
        problem = f"can't be written ({error.strerror}); give another path"
        raise UsageError(f"ledger {settings.ledger}: {problem}") from error


def _end_soon(loop: asyncio.AbstractEventLoop, server: CoordinatorServer, reason: str) -> bool:
    """End the run for `reason`. Return whether it was still going on."""
    if loop.is_closed():  # the run is over, and only its record failed
        return False
    goes_on = server.end.machine.stage is not Stage.OVER
    loop.call_soon(partial(server.stop, reason, at_once=True))
    return goes_on
