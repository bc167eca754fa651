"""`entrenar coordinator --wire v2`: averages for workers that use the original system's wire.

Its configuration is a YAML file, in which unknown keys are errors. The docs show the table of keys.
"""

from __future__ import annotations

import asyncio
import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import entrenar_py
from entrenar_py.shared import trace
from entrenar_py.shared.config import composer
from entrenar_py.shared.config.composer import ListNode, MapNode, plain
from entrenar_py.shared.config.fields import WHOLE_MAX, Record
from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.shared.trace import writer
from entrenar_py.shared.trace.ledger import Head
from entrenar_py.shared.trace.writer import Writer
from entrenar_py.shared.wording import counted
from entrenar_py.train.service import address, exit_codes, file_locks, progress, signals
from entrenar_py.train.service.address import Address
from entrenar_py.train.service.config import LISTEN
from entrenar_py.train.service.measures import Stopwatch
from entrenar_py.train.service.run_events import Listener, Noted, StepAveraged
from entrenar_py.train.upstream import terms
from entrenar_py.train.upstream.frames import FRAME_BYTES_MAX, LENGTH_MAX, Part
from entrenar_py.train.upstream.server import Average, AveragingServer
from entrenar_py.train.upstream.terms import AveragingRun, Patience
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Effect

REQUIRED = ("num_samples", "num_steps", "world_size")

# Key -> (type, default, meaning). The docs show this table.
KEYS: Mapping[str, tuple[str, str, str]] = {
    "num_samples": (
        "whole number >= 1",
        "required",
        "number of samples in the data set of each worker",
    ),
    "num_steps": ("whole number >= 1", "required", "steps of the run"),
    "world_size": (
        *("whole number from 1 to 65536", "required"),
        "largest number of workers at a time; `total_workers` in JoinAccepted",
    ),
    "num_shards": (
        *("whole number from `world_size` to 65536", "`world_size`"),
        "shards of a batch; their number decides the bits of the averages",
    ),
    "batch_size": ("whole number >= `num_shards`", "`num_samples`", "samples per step"),
    "wait_for": (
        "whole number >= 1",
        "`world_size`",
        "workers that must have joined before the first step",
    ),
    "components": (
        *("list of numbers from 0 to 255", "a shard ends with GradientPayload"),
        "a shard ends with the last of its blocks and these NonBlock components",
    ),
    "late_joins": (
        *("`true` or `false`", "`true`"),
        "whether workers may join after the first step; they must hold the weights "
        "before the step of their first shard",
    ),
    "frame_bytes_max": (
        *("whole number from 4096 to 4294967295", f"`{FRAME_BYTES_MAX}`"),
        "largest size of a worker's frame, in bytes",
    ),
    "gradient_bytes_max": (
        *("whole number >= `frame_bytes_max`", "`frame_bytes_max`"),
        "largest total size of all parts of one shard's gradient, in bytes",
    ),
    "listen": ("host:port", f"`{LISTEN}`", "where workers connect; port 0 means any free port"),
    "timing": ("mapping", "below", "how long the coordinator waits"),
    "metrics": ("path", "none are written", "a file with one JSON object for each step"),
    "ledger": (
        "path",
        "none is written",
        "the trace of the run: one chained line for each event, with the digests of the averages",
    ),
}
TIMING_KEYS: Mapping[str, str] = {
    "hello_s": "how long a new connection may take to ask to join",
    "dead_after_s": "how long a worker that sends heartbeats may be silent while it has a shard",
    "shard_s": "how long a worker may take to compute a shard",
    "gather_s": "how long the run waits for enough workers before it ends",
}
# Keys of other runs, with the reason why they mean nothing here.
NOT_HERE: Mapping[str, str] = {
    "secret_file": "this wire has no authentication",
    "tls": "this wire has no encryption",
    "checkpoint": "the workers hold the weights",
    "workload": "the workers hold the model",
    "topology": "gradients go through the coordinator",
    "updates": "the workers make the steps",
    "audit_share": "this wire can't ask two workers for one shard",
    "seed": "the coordinator draws nothing",
}


PARTS_MAX = 2**16
FRAME_BYTES_MIN = 2**12
COMPONENT_MAX = 2**8 - 1


@dataclass(frozen=True, kw_only=True)
class AveragingConfig:
    """The settings of an averaging coordinator."""

    run: AveragingRun
    listen: Address
    frame_bytes_max: int
    patience: Patience
    metrics: Path | None
    ledger: Path | None


def load(path: Path) -> AveragingConfig:
    """Return the configuration at `path`. Relative paths in it are relative to its folder.

    Raises ContractError with all problems at once, each as `file:line:column: error: ...`.
    """
    problems = Problems()
    form = "a configuration is a mapping (num_samples, num_steps, world_size, ...)"
    root = composer.load(path, problems, form=form)
    config = None if root is None else _Reader(root, path.parent, problems).config()
    problems.settle(strict=True)
    assert config is not None, "what can't be read is a problem"
    return config


class _Reader:
    """Reads one file key by key. Every problem goes to `problems`, with its place."""

    def __init__(self, root: MapNode, folder: Path, problems: Problems) -> None:
        self._root = Record(root, what="configuration", known=tuple(KEYS), problems=problems)
        self._folder, self._problems = folder, problems
        for key in root.fields:
            if key in NOT_HERE:
                problems.error(root.keys[key], f"{key}: {NOT_HERE[key]}; leave it out")
        self._root.warn_unread(read_elsewhere=tuple(NOT_HERE))

    def config(self) -> AveragingConfig:
        """Return the configuration. A wrong value is reported, and replaced by its limit."""
        for name in REQUIRED:
            if self._root.present(name) is None:
                meaning = KEYS[name][2]
                self._problems.error(self._root.node.at, f"{name} is missing: {meaning}")
        frame_bytes_max = self._whole(
            "frame_bytes_max", FRAME_BYTES_MAX, least=FRAME_BYTES_MIN, most=LENGTH_MAX
        )
        text = self._root.text("listen") or LISTEN
        listen = self._root.attempt("listen", lambda: address.parse(text, port_min=0))
        return AveragingConfig(
            run=self._run(frame_bytes_max),
            listen=listen or Address("", 0),
            frame_bytes_max=frame_bytes_max,
            patience=self._root.numbers("timing", Patience, TIMING_KEYS),
            metrics=self._root.path("metrics", self._folder),
            ledger=self._root.path("ledger", self._folder),
        )

    def _run(self, frame_bytes_max: int) -> AveragingRun:
        num_samples = self._whole("num_samples", 1)
        if self._root.present("num_samples") is None:
            num_samples = WHOLE_MAX  # its absence is already reported; it limits nothing else
        world_size = self._whole("world_size", 1, most=min(PARTS_MAX, num_samples))
        num_shards = self._whole("num_shards", world_size, least=world_size, most=PARTS_MAX)
        batch_size = self._whole("batch_size", num_samples, least=num_shards, most=num_samples)
        return AveragingRun(
            num_samples=num_samples,
            num_steps=self._whole("num_steps", 1),
            world_size=world_size,
            num_shards=num_shards,
            batch_size=batch_size,
            num_awaited=self._whole("wait_for", world_size, most=world_size),
            gradient_bytes_max=self._whole(
                "gradient_bytes_max", frame_bytes_max, least=frame_bytes_max
            ),
            components=self._components(),
            late_joins=self._root.present("late_joins") is None or self._root.flag("late_joins"),
        )

    def _whole(self, name: str, default: int, *, least: int = 1, most: int = WHOLE_MAX) -> int:
        if self._root.present(name) is None and name in REQUIRED:
            return least  # its absence is already reported
        value = self._root.whole(name, default, least=least, most=most)
        return least if value is None else value

    def _components(self) -> tuple[int, ...] | None:
        node = self._root.present("components")
        if node is None:
            return None
        values: list[Any] = [None]
        if isinstance(node, ListNode):
            values = [plain(item) for item in node.items]
        right = all(type(value) is int and 0 <= value <= COMPONENT_MAX for value in values)
        if not right or len(set(values)) < len(values):
            advice = f"use a list of different numbers from 0 to {COMPONENT_MAX}"
            self._root.refuse("components", f"components={plain(node)!r}: {advice}")
            return None
        return tuple(values)


TRAINER = "averaging"  # the trainer's name in the plan of an averaging coordinator's ledger
_HALTED = "halted"


class AveragingRecord:
    """Reports a run to `listeners`, and writes its ledger, if it has one.

    `broken` says why the ledger could no longer be written; `give_up` is then called. `averages`
    returns the averages of the current step, `traffic` the bytes received and sent so far.
    """

    def __init__(
        self,
        run: AveragingRun,
        *,
        ledger: Writer | None,
        listeners: Iterable[Listener],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.broken: str | None = None
        self.give_up: Callable[[str], None] = lambda reason: None
        self.averages: Callable[[], Mapping[Part, Average]] = dict
        self.traffic: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._run, self._ledger, self._listeners = run, ledger, tuple(listeners)
        self._watch = Stopwatch(clock)
        self._step = 0
        self._told = (0, 0)

    def notify(self, effect: Effect) -> None:
        """Record `effect`, which the endpoint has carried out."""
        match effect:
            case terms.Enlist(worker, step, late, asked):
                self._write(trace.Membership(step=step, rank=worker, change="joined"))
                gpus = counted(asked.gpu_count, "GPU")
                text = f"worker {worker} takes part: {asked.node_id!r}, {asked.backend!r}, {gpus}"
                if late:
                    text += f"; in step {step}, and must hold the weights that its shards ask for"
                self.note("joined", text)
            case do.Left(worker, step, reason):
                self._write(trace.Membership(step=step, rank=worker, change="left", reason=reason))
                self.note("left", f"worker {worker} left in step {step}: {reason}")
            case terms.BeginStep(step):
                self._step = step
                self._watch.begin()
            case terms.KeepPart(worker):
                self._watch.computed(worker)
                self._watch.delivered(worker)
            case terms.MadeStep():
                self._made(effect)
            case do.Finish():
                self._finish(effect)

    def note(self, what: str, text: str) -> None:
        """Send a note to the listeners."""
        for listener in self._listeners:
            listener(Noted(what=what, step=self._step, text=text))

    def close(self) -> None:
        """Close the ledger."""
        if self._ledger is None:
            return
        ledger, self._ledger = self._ledger, None
        try:
            ledger.close()
        except OSError as error:  # some file systems write only now
            self.broken = self.broken or f"the ledger can't be written ({error.strerror})"

    def _made(self, effect: terms.MadeStep) -> None:
        averages = self.averages()
        digests = {str(part): averages[part].digest for part in effect.parts}
        self._write(
            trace.Averaged(
                step=effect.step,
                ranks=effect.workers,
                gradient={name: trace.TensorRecord(digest) for name, digest in digests.items()},
                loss=effect.loss,
                correct=effect.correct,
                weight=effect.total,
            )
        )
        times = self._watch.made(reduce_s=sum(averages[part].seconds for part in effect.parts))
        traffic = self.traffic()
        happening = StepAveraged(
            step=effect.step,
            num_steps=self._run.num_steps,
            loss=math.nan if effect.loss is None else effect.loss,
            workers=effect.workers,
            step_ms=times.step_ms,
            exchange_ms=times.exchange_ms,
            reduce_ms=times.reduce_ms,
            steps_per_s=times.steps_per_s,
            bytes_in=traffic[0] - self._told[0],
            bytes_out=traffic[1] - self._told[1],
            last=self._watch.last(),
            waits_ms=self._watch.waits_ms(effect.workers),
            num_samples=effect.num_samples,
            correct=effect.correct,
            total=effect.total,
            digests=digests,
        )
        self._told = traffic
        for listener in self._listeners:
            listener(happening)

    def _finish(self, finish: do.Finish) -> None:
        if finish.status == _HALTED:
            self._write(trace.Halt(step=self._step, reason=finish.reason))
        self._write(trace.End(status=finish.status, reason=finish.reason))
        self.note(finish.status, finish.reason or "the run is complete")

    def _write(self, event: trace.Event) -> None:
        if self._ledger is None or self.broken is not None:
            return
        try:
            self._ledger.append([event])
            if isinstance(event, trace.End):
                self._ledger.sync()
        except (OSError, UsageError) as error:
            told = getattr(error, "strerror", None) or error
            self.broken = f"the ledger can't be written ({told})"
            self.give_up(self.broken)


def new_ledger(path: Path, run: AveragingRun) -> Writer:
    """Create the ledger of `run`. Raises UsageError if it exists or can't be created."""
    if path.exists():
        raise UsageError(
            f"ledger {path}: it already exists, and no run with --wire v2 can be continued; give "
            "another path, or move it away"
        )
    plan = TrainingPlan(
        trainer=TRAINER,
        workload="own",
        world_size=run.world_size,
        seed=0,
        num_shards=run.num_shards,
        num_samples=run.num_samples,
        batch_size=run.batch_size,
        num_steps=run.num_steps,
    )
    described = {
        "entrenar": entrenar_py.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }
    return writer.create(path, Head(plan=plan, environment=described))


def run(path: Path, *, insecure: bool) -> int:
    """Serve the run that the file at `path` describes; return the exit code.

    `insecure` allows connections from other machines. Raises ContractError or UsageError for a
    problem found before the run begins, and SystemFailure if the ledger can't be written.
    """
    config = load(path)
    with ExitStack() as stack:
        file_locks.claim({"ledger": config.ledger, "metrics": config.metrics}, stack)
        listeners = progress.listeners(
            stack, num_steps=config.run.num_steps, metrics=config.metrics
        )
        return asyncio.run(_serve(config, listeners, stack, insecure=insecure))


async def _serve(
    config: AveragingConfig, listeners: list[Listener], stack: ExitStack, *, insecure: bool
) -> int:
    ledger = None
    if config.ledger is not None:
        ledger = new_ledger(config.ledger, config.run)
    record = AveragingRecord(config.run, ledger=ledger, listeners=listeners)
    stack.callback(record.close)
    server = AveragingServer(
        config.run,
        patience=config.patience,
        frame_bytes_max=config.frame_bytes_max,
        notify=record.notify,
    )
    record.averages = lambda: server.end.averages
    record.traffic = lambda: (server.bytes_in, server.bytes_out)
    loop = asyncio.get_running_loop()
    record.give_up = lambda reason: _end_soon(loop, server, reason)
    try:
        at = await server.listen(*config.listen, insecure=insecure)
    except (OSError, UsageError) as error:
        if config.ledger is not None:
            config.ledger.unlink()  # it was just created, and would block the next attempt
        if isinstance(error, UsageError):
            raise
        problem = f"can't listen there ({error.strerror or error}); use another one"
        raise UsageError(f"listen={config.listen}: {problem}") from error
    signals.deliver(signals.Stopper(server, record.note).stop)
    record.note("listening", f"listens at {Address(*at)} for workers of the original system")
    finish = await server.finish()
    signals.ignore()
    number, last = server.strangers
    if number:
        here, why = last[-1]
        text = f"{number} connections ended without joining; the last from {here}: {why}"
        record.note("strangers", text)
    record.close()
    if record.broken is not None:
        raise SystemFailure(f"{record.broken}; make room or give access, and start it again")
    return exit_codes.OF_FINISH[finish.status]


def _end_soon(loop: asyncio.AbstractEventLoop, server: AveragingServer, reason: str) -> None:
    loop.call_soon(partial(server.stop, reason, at_once=True))
