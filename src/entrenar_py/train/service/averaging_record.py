"""The record of a run over the original system's wire: its ledger, its metrics, its notes."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

import entrenar_py
from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import writer
from entrenar_py.shared.trace.writer import Writer
from entrenar_py.shared.wording import counted
from entrenar_py.train.service.run_events import Listener, Noted, StepAveraged
from entrenar_py.train.service.stopwatch import Stopwatch
from entrenar_py.train.upstream import terms as wire
from entrenar_py.train.upstream.frames import Part
from entrenar_py.train.upstream.server import Average
from entrenar_py.train.upstream.terms import AveragingRun
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Effect

SYSTEM = "averaging"  # of the scenario in such a ledger
_HALTED = "halted"


class AveragingRecord:
    """Tells `listeners` of a run, and writes its ledger, if there is one.

    `broken` says why the ledger could not be written any more; `give_up` is called then. `averages`
    returns those of the current step, `traffic` the bytes received and sent so far.
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
        """Record `effect`, which the end has carried out."""
        match effect:
            case wire.Enlist(worker, step, late, asked):
                self._write(trace.Membership(step=step, rank=worker, change="joined"))
                gpus = counted(asked.gpu_count, "GPU")
                text = f"worker {worker} takes part: {asked.node_id!r}, {asked.backend!r}, {gpus}"
                if late:
                    text += f"; in step {step}, and must hold the weights that its shards ask for"
                self.note("joined", text)
            case do.Left(worker, step, reason):
                self._write(trace.Membership(step=step, rank=worker, change="left", reason=reason))
                self.note("left", f"worker {worker} left in step {step}: {reason}")
            case wire.BeginStep(step):
                self._step = step
                self._watch.begin()
            case wire.KeepPart(worker):
                self._watch.computed(worker)
                self._watch.delivered(worker)
            case wire.MadeStep():
                self._made(effect)
            case do.Finish():
                self._finish(effect)

    def note(self, what: str, text: str) -> None:
        """Tell the listeners of an event."""
        for listener in self._listeners:
            listener(Noted(what=what, step=self._step, text=text))

    def close(self) -> None:
        """Close the ledger."""
        if self._ledger is not None:
            self._ledger.close()

    def _made(self, made: wire.MadeStep) -> None:
        averages = self.averages()
        digests = {str(part): averages[part].digest for part in made.parts}
        self._write(
            trace.Averaged(
                step=made.step,
                ranks=made.workers,
                gradient={name: trace.TensorRecord(digest) for name, digest in digests.items()},
                loss=made.loss,
                correct=made.correct,
                weight=made.total,
            )
        )
        times = self._watch.made(reduce_s=sum(averages[part].seconds for part in made.parts))
        traffic = self.traffic()
        happening = StepAveraged(
            step=made.step,
            num_steps=self._run.num_steps,
            loss=math.nan if made.loss is None else made.loss,
            workers=made.workers,
            step_ms=times.step_ms,
            exchange_ms=times.exchange_ms,
            reduce_ms=times.reduce_ms,
            steps_per_s=times.steps_per_s,
            bytes_in=traffic[0] - self._told[0],
            bytes_out=traffic[1] - self._told[1],
            last=self._watch.last(),
            waits_ms=self._watch.waits_ms(made.workers),
            num_samples=made.num_samples,
            correct=made.correct,
            total=made.total,
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
    """Create the ledger of `run`; UsageError if it exists or can't be created."""
    scenario = Scenario(
        system=SYSTEM,
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
    head = trace.Trace(
        scenario=scenario, environment=described, promises=(), traits=trace.Traits(), events=()
    )
    return writer.create(path, head)
