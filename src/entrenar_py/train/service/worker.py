"""`entrenar worker`: gets the run's terms from its coordinator, and takes part to the end."""

from __future__ import annotations

import argparse
import asyncio
import signal
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from entrenar_py import compute as backends
from entrenar_py.compute import Backend, chain
from entrenar_py.shared import trace
from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.shared.systems import AUTO
from entrenar_py.shared.untrusted import json_text, printing
from entrenar_py.train.arithmetic.tensors import Workload
from entrenar_py.train.coordinator import topology
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.service import config, exit_codes, signals
from entrenar_py.train.wire.effects import Effect, Finish, Load
from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire_io import queries, sockets
from entrenar_py.train.wire_io.queries import Source, Told
from entrenar_py.train.wire_io.tcp import MeshClient, WorkerClient


class Joining(Protocol):
    """A way to join a run other than with the whole workload, such as with one stage."""

    def client(self, told: Told, stay: Stay) -> WorkerClient:
        """Return the client for the run that the coordinator described."""
        ...


# Gets the workload of a run from its coordinator, or returns a Finish if that fails.
Obtain = Callable[
    [Source, argparse.Namespace, Callable[[str], None]],
    Awaitable[Workload | Joining | Finish],
]


def run(options: argparse.Namespace, obtain: Obtain) -> int:
    """Take part in the run of `options.coordinator`; return the exit code.

    `obtain` is called if the coordinator has the model and the data. Raises UsageError for a secret
    or certificate that can't be read, BackendUnavailable for a missing device, and any exception of
    `obtain`.
    """
    secret, context = config.secret(options.secret_file), None
    if options.tls_ca is not None:
        context = sockets.client_context(
            ca=options.tls_ca, cert=options.tls_cert, key=options.tls_key
        )
    torch.set_num_threads(1)  # the split of a sum over threads is part of its order
    backend, attempts = opened(options.backend)
    finish = asyncio.run(Stay(options, secret, context, backend, attempts, obtain).take_part())
    _say(f"{finish.status}: {finish.reason}" if finish.reason else finish.status)
    return exit_codes.OF_FINISH[finish.status]


def opened(name: str) -> tuple[Backend, Sequence[trace.Attempt]]:
    """Return the backend called `name`, and the attempts to open one.

    The last attempt succeeded.
    """
    attempts: list[trace.Attempt] = []
    if name == AUTO:
        backend = chain.auto(on_attempt=lambda each: attempts.append(trace.Attempt(**asdict(each))))
    else:
        backend = backends.open_backend(name)
        attempts.append(
            trace.Attempt(
                backend=name, served=True, device=backend.device, software=backend.software
            )
        )
    for each in attempts:
        _say(f"backend {each.backend}: {each.device if each.served else each.reason}")
    return backend, attempts


T = TypeVar("T")


@dataclass(eq=False)
class Stay:
    """One worker's session: it gets the run's terms, builds the workload, joins, and leaves."""

    given: argparse.Namespace
    secret: bytes = field(repr=False)
    context: ssl.SSLContext | None
    backend: Backend
    attempts: Sequence[trace.Attempt]
    obtain: Obtain
    _stopped: str | None = None  # the signal that stopped it
    _asking: asyncio.Task[Any] | None = None
    _client: WorkerClient | None = None
    _member: Member | None = None
    _workload: Workload | None = None
    _problem: str = ""

    async def take_part(self) -> Finish:
        """Take part to the end; return the run's Finish, `stopped` if a signal ended it."""
        signals.deliver(self._leave)
        finish = await self._take_part()
        if self._stopped is not None:
            finish = Finish("stopped", f"by {self._stopped}")
        signals.end_with(exit_codes.OF_FINISH[finish.status])
        return finish

    async def _take_part(self) -> Finish:
        host, port = self.given.coordinator
        description = await self._unless_stopped(
            queries.ask(
                host,
                port,
                secret=self.secret,
                backend=self.backend.name,
                context=self.context,
                patience_s=self.given.patience_s,
                alone=self.alone,
            )
        )
        if isinstance(description, Finish):
            return description
        workload: Workload | Joining | None = None
        if description.package is not None:
            source = self._source(description, description.package)
            got = await self._unless_stopped(self.obtain(source, self.given, _say))
            if isinstance(got, Finish):
                return got
            workload = got
        elif self.given.model is not None:
            raise UsageError(
                "--model: the coordinator trains a model of the trainer's own, which needs no "
                "checkpoint; leave it out"
            )
        if workload is None or isinstance(workload, Workload):
            self._workload = workload
            self._client = self.join(description, workload)
        else:
            self._client = workload.client(description, self)
        try:
            return await self._client.run(
                host, port, context=self.context, patience_s=self.given.patience_s
            )
        except SystemFailure:
            if self._stopped is None:
                raise
            return Finish("stopped")  # its wait for data was interrupted
        finally:
            self._interrupt()

    def _interrupt(self) -> None:
        """Let a computation in the client's thread end soon: the process waits for it."""
        if self._member is not None:
            self._member.give_up()
        if self._workload is not None:
            self._workload.interrupt()

    async def _unless_stopped(self, work: Awaitable[T]) -> T | Finish:
        """Return the result of `work`, or a Finish if a signal stops this worker before."""
        self._asking = asyncio.ensure_future(work)
        await asyncio.wait([self._asking])
        if self._asking.cancelled():
            return Finish("stopped")
        result: T = self._asking.result()
        return result

    def _source(self, description: Told, package: str) -> Source:
        host, port = self.given.coordinator
        return Source(
            host=host,
            port=port,
            secret=self.secret,
            backend=self.backend.name,
            context=self.context,
            timing=Timing(
                heartbeat_s=description.heartbeat_s, dead_after_s=description.dead_after_s
            ),
            package=package,
            patience_s=self.given.patience_s,
            alone=self.alone,
        )

    def join(self, description: Told, workload: Workload | None = None) -> WorkerClient:
        """Return the client for the run that the coordinator described.

        If `workload` is None, it is built from the plan.
        """
        plan = plan_of(description)
        if plan.trainer not in {topology.BY_NAME[one].trainer for one in config.TOPOLOGIES}:
            raise SystemFailure(
                f"the coordinator's run is of trainer {plan.trainer}, which is not known here: "
                "use one release on both ends"
            )
        kind = topology.of(plan)
        self._member = member = Member(plan, lambda rank: self.backend, workload)
        machine = kind.worker(
            member.replicas.terms,
            secret=self.secret,
            backend=self.backend.name,
            rank=self.given.rank,
            timing=Timing(
                heartbeat_s=description.heartbeat_s, dead_after_s=description.dead_after_s
            ),
        )
        notify = partial(self._let_in, member)
        if kind is topology.STAR:
            if self.given.listen_port is not None:
                _say("this run is a star, in which no worker listens: --listen-port is ignored")
            return WorkerClient(machine, member, alone=self.alone, notify=notify)
        return MeshClient(
            machine,
            member,
            alone=self.alone,
            notify=notify,
            door_context=self.door_context(),
            listen_port=self.given.listen_port or 0,
        )

    def door_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for connections from other workers, or None without TLS.

        Raises UsageError if a certificate is missing.
        """
        options = self.given
        if options.tls_ca is None:
            return None
        if options.tls_cert is None or options.tls_key is None:
            raise UsageError(
                "in this run workers connect to each other: give --tls-cert and --tls-key, of a "
                "certificate that names the address of this machine"
            )
        return sockets.server_context(cert=options.tls_cert, key=options.tls_key, ca=options.tls_ca)

    def _let_in(self, member: Member, effect: Effect) -> None:
        if isinstance(effect, Load):
            for attempt in self.attempts:
                member.recorder.emit(attempt)
            self.tell_rank(effect.rank, effect.step)

    def tell_rank(self, rank: int, step: int) -> None:
        """Print the rank of this worker, which takes part from `step` on."""
        _say(f"takes part as rank {rank}, from step {step} on")

    def tell(self, text: str) -> None:
        """Print a line for this worker, from any thread."""
        _say(text)

    def alone(self, problem: str) -> None:
        """Print why the coordinator can't be reached, if the reason is new."""
        if problem != self._problem:
            self._problem = problem
            patience_s = self.given.patience_s
            _say(f"{self.given.coordinator}: {problem}; tries again for {patience_s:g} s")

    def _leave(self, number: signal.Signals) -> None:
        self._stopped = number.name
        if self._client is not None:
            self._client.leave(f"stopped by {number.name}")
            self._interrupt()
        elif self._asking is not None:
            self._asking.cancel()
            signals.end_soon(number)  # a thread that loads a model would delay the exit


def plan_of(description: Told) -> TrainingPlan:
    """Return the plan of a run. Raises SystemFailure if it can't be read."""
    try:
        return TrainingPlan.from_dict(json_text.load(description.plan))
    except (UsageError, ValueError) as error:
        raise SystemFailure(
            f"the coordinator's plan can't be read ({error}): use one release on both ends"
        ) from error


def _say(text: str) -> None:
    printing.say(f"worker: {text}")
