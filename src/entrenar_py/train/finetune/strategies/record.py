"""The record of a run over torch.distributed, kept by rank 0: ledger, metrics, checkpoints.

The files have the format of the reference trainer. The ledger has the samples and losses of each
shard, and each step's loss, learning rate and norms. For each checkpoint, it has digests of the
weights.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from entrenar_py.shared import process, trace
from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.page import console
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.shared.trace import writer
from entrenar_py.shared.trace.ledger import Head
from entrenar_py.shared.trace.writer import Mark, Standing
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.arithmetic import blocks, checkpoint, optimizer, sharding
from entrenar_py.train.arithmetic.tensors import TensorSpec
from entrenar_py.train.finetune.strategies.strategy import Arrays, Step
from entrenar_py.train.finetune.task import CHECKPOINT, LEDGER, METRICS
from entrenar_py.train.service import file_locks, ledger_account, measures, progress
from entrenar_py.train.service.ledger_account import weights_digest
from entrenar_py.train.service.measures import Memory, Stopwatch
from entrenar_py.train.service.metrics import EventFiles, Metrics
from entrenar_py.train.service.run_events import Happening, Listener, Noted, Scored, StepMade


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a training run between two steps: whole tensors by name, and AdamW's moments."""

    step: int
    position: sharding.Position
    tensors: Arrays
    moments: Mapping[str, Arrays]
    norms: Sequence[float]  # of the last steps' gradients (`train.service.measures`)

    @property
    def progress(self) -> dict[str, int]:
        """The position in the data and the schedule, in the form that a checkpoint has."""
        epoch, offset = self.position.epoch, self.position.offset
        return {"step": self.step, "schedule_step": self.step, "epoch": epoch, "offset": offset}


@dataclass(frozen=True, kw_only=True)
class Made:
    """A completed step: losses (summed), ranks and weights of shards, and numbers of its update."""

    losses: Sequence[float]
    ranks: Sequence[int]
    weights: Sequence[float]
    rate: float
    norm: float
    applied_norm: float
    num_tokens: int
    spike: trace.Spike | None
    memory: Memory


class Record:
    """The files of one run in `folder`. Close it at the end: until then, they are locked."""

    def __init__(
        self,
        folder: Path,
        plan: TrainingPlan,
        specs: tuple[TensorSpec, ...],
        *,
        backends: Mapping[int, str],
        hardware: Collection[str],
        tensorboard: Path | None,
    ) -> None:
        """Event files go to the folder `tensorboard`, if given.

        `backends` are ranks' devices, and `hardware` describes them.
        """
        self._backends, self._hardware, self._is_compiled = backends, hardware, False
        self._folder, self._plan, self._tensorboard = folder, plan, tensorboard
        self._layout = blocks.Layout(specs)
        self._stack = ExitStack()
        self._listeners: list[Listener] = []
        self._ledger: writer.Writer | None = None
        self._since: trace.Gap | None = None
        self._resumed = -1  # from the checkpoint of this step
        self._standing = Standing(is_new=True)
        self._watch = Stopwatch(time.monotonic)

    # --- opening ----------------------------------------------------------------------------------

    def open(self, *, resume: bool, is_compiled: bool) -> State | None:
        """Lock and open all files; return the state to resume from, None for a new run.

        `is_compiled` says whether torch compiles the model's blocks, which decides bits.

        Raises UsageError for a file that can't be used, or that an earlier run left there, and
        CheckpointError for a checkpoint that does not fit.
        """
        self._is_compiled = is_compiled
        self._claim()
        state = self.read(resume=resume)
        self._resumed = -1 if state is None else state.step
        self._watch.begin()
        self._open_ledger(resume=resume)
        metrics = Metrics(self._folder / METRICS)
        self._stack.callback(metrics.close)
        shown = console.standard_output(color=True)
        num_steps = self._plan.num_steps
        live = self._stack.enter_context(progress.opened(shown, num_steps=num_steps))
        self._listeners = [live, metrics]
        if self._tensorboard is not None:
            self._listeners.append(
                self._stack.enter_context(closing(EventFiles(self._tensorboard)))
            )
        return state

    def read(self, *, resume: bool) -> State | None:
        """Return the state in the checkpoint, None if there is none. Raises as `open` does."""
        path = self._folder / CHECKPOINT
        if not path.exists():
            return None
        if not resume:
            raise UsageError(
                f"checkpoint {path}: it already exists; continue with --resume, or give another "
                "`output:`"
            )
        return self._load(path)

    def close(self) -> None:
        """Close and unlock all files."""
        self._stack.close()

    def _claim(self) -> None:
        for name, what in ((CHECKPOINT, "checkpoint"), (LEDGER, "ledger")):
            path = self._folder / name
            self._stack.enter_context(
                file_locks.claimed(path, what, warn=lambda text: printing.warn(f"entrenar: {text}"))
            )
        file_locks.require_writable(self._folder / CHECKPOINT)

    def _load(self, path: Path) -> State:
        arrays, stored = checkpoint.load(path, bytes_max=checkpoint.bytes_max(self._expected()))
        checkpoint.require_own(path, stored, self._plan.to_dict())
        most = self._plan.num_steps
        limits = {"step": most, "epoch": most, "offset": self._plan.num_samples}
        expected = self._expected()
        checkpoint.require_fitting(path, arrays, stored, expected=expected, limits=limits)
        self._since = ledger_account.gap_since(stored, path)
        moments = checkpoint.group_of(arrays, "optimizer")
        return State(
            step=stored["step"],
            position=sharding.Position(stored["epoch"], stored["offset"]),
            tensors=checkpoint.group_of(arrays, "tensors"),
            moments={name: self._unflat(moments[name]) for name in ("exp_avg", "exp_avg_sq")},
            norms=measures.of_checkpoint(stored, path).to_record(),
        )

    def _expected(self) -> Arrays:
        tensors = {spec.name: np.empty(spec.shape, np.float32) for spec in self._layout.specs}
        moments = optimizer.initial_state("adamw", self._layout.num_trainable)
        return checkpoint.as_arrays(tensors=tensors, optimizer=moments)

    def _open_ledger(self, *, resume: bool) -> None:
        path = self._folder / LEDGER
        environment = process.environment()
        if self._is_compiled:
            environment["kernels"] = "blocks compiled by torch"
        head = Head(plan=self._plan, environment=environment)
        if resume:
            self._ledger, self._standing = writer.reopen(path, head, since=self._since)
        else:
            self._ledger = writer.create(path, head)
        self._stack.callback(self._ledger.close)

    # --- steps ------------------------------------------------------------------------------------

    def begin(self, state: State) -> None:
        """Record the state from which all ranks start."""
        self._watch.begin()
        if not self._is_over:
            self._write_start(state)
        size = self._plan.world_size
        text = f"{self._plan.trainer}: {size} ranks, from step {state.step} on"
        text += ", blocks compiled" if self._is_compiled else ""
        self.note("began", state.step, text)

    @property
    def _is_over(self) -> bool:
        return self._standing.end is not None and self._standing.end.status == "completed"

    def _write_start(self, state: State) -> None:
        names = tuple(spec.name for spec in self._layout.specs)
        decayed = tuple(spec.name for spec in self._layout.specs if spec.decayed)
        self._write(
            *(
                trace.Attempt(backend=self._plan.backends[0], served=True, device=device)
                for device in self._hardware
            ),
            trace.Start(
                step=state.step,
                rank=0,
                trainable=names,
                decayed=decayed,
                progress=state.progress,
                resumed=state.step > 0,
                weights=_records(state.tensors),
                optimizer=_records(self._flat_moments(state)),
            ),
        )

    def made(self, step: Step, result: Made) -> None:
        """Record a completed step."""
        loss = sum(result.losses) / step.weight
        self._write(
            *(
                trace.Shard(
                    step=step.number,
                    epoch=step.epoch,
                    rank=result.ranks[shard],
                    shard=shard,
                    ids=tuple(ids),
                    loss_sum=result.losses[shard],
                    weight=result.weights[shard],
                    finite=True,
                )
                for shard, ids in enumerate(step.shards)
            ),
            trace.Update(
                step=step.number,
                rank=0,
                loss=loss,
                weight=step.weight,
                learning_rate=result.rate,
                finite=True,
                weights={},
                grad_norm=result.norm,
                applied_norm=result.applied_norm,
            ),
        )
        if result.spike is not None:
            self._write(result.spike)
            spike = measures.say_made(result.spike, self._plan.clip_norm)
            self.note("spike", step.number, spike)
        times = self._watch.made(reduce_s=0.0, num_tokens=result.num_tokens)
        self._watch.begin()
        self.tell(
            StepMade(
                step=step.number,
                num_steps=self._plan.num_steps,
                loss=loss,
                workers=tuple(range(self._plan.world_size)),
                step_ms=times.step_ms,
                exchange_ms=None,
                reduce_ms=None,
                steps_per_s=times.steps_per_s,
                bytes_in=None,
                bytes_out=None,
                last=None,
                waits_ms={},
                learning_rate=result.rate,
                grad_norm=result.norm,
                tokens_per_s=times.tokens_per_s,
                backends=self._backends,
                memory_bytes=result.memory.host_bytes,
                device_bytes=result.memory.device_bytes,
            )
        )

    def scored(self, scores: Scored) -> None:
        """Report scores of the model. The time that scoring took isn't counted for any step."""
        self.tell(scores)
        self._watch.begin()

    def lacks_scores(self, step: int) -> bool:
        """Return whether a process died before it had recorded its scores after `step` steps."""
        return False

    def save(self, state: State) -> None:
        """Write the checkpoint before step `state.step`, unless the run was resumed from it.

        If it can't be written, a note says so, the run continues, and the last checkpoint stays.
        """
        if state.step <= self._resumed:
            return
        assert self._ledger is not None, "it was opened"
        self._ledger.sync()
        path, moments = self._folder / CHECKPOINT, self._flat_moments(state)
        arrays = checkpoint.as_arrays(tensors=state.tensors, optimizer=moments)
        plan = self._plan.to_dict()
        notes = {
            ledger_account.LEDGER_KEY: ledger_account.mark_record(self._ledger.last),
            measures.NORMS_KEY: list(state.norms),
        }
        try:
            checkpoint.save(path, arrays, {**state.progress, "plan": plan, **notes})
        except OSError as error:
            problem = f"checkpoint {path}: can't be written ({error.strerror or error})"
            self.note("not_saved", state.step, f"{problem}; the run goes on")
            return
        self._write(
            trace.Saved(
                step=state.step,
                rank=0,
                progress=state.progress,
                weights=_records(state.tensors),
                optimizer=_records(moments),
            )
        )
        self.note("saved", state.step, f"checkpoint before step {state.step}: {path}")

    def finish(
        self,
        step: int,
        status: str,
        reason: str,
        *,
        tensors: Arrays,
        events: Sequence[trace.Event],
    ) -> None:
        """Record how the run ended, before step `step`; `events` are the events of a halt."""
        self._write(*events)
        if not self._is_over:
            ended = "failed" if status == "stopped" else status
            self._write(trace.End(status=ended, reason=reason))
        weights = self.digest(tensors)
        because = f" ({reason})" if reason else ""
        self.note(status, step, f"{status}{because}: step {step}, weights {weights}")

    def note(self, what: str, step: int, text: str) -> None:
        """Show a note, and write it to the metrics."""
        self.tell(Noted(what=what, step=step, text=text))

    @property
    def ledger_end(self) -> Mark | None:
        """The last line of the ledger; None before it is opened."""
        return None if self._ledger is None else self._ledger.last

    def tell(self, happening: Happening) -> None:
        """Send an event to the screen, the metrics and the event files."""
        for listener in self._listeners:
            listener(happening)

    def _write(self, *events: trace.Event) -> None:
        assert self._ledger is not None, "it was opened"
        try:
            self._ledger.append(events)
        except OSError as error:
            path, problem = self._folder / LEDGER, error.strerror or error
            raise SystemFailure(
                f"ledger {path}: can't be written ({problem}); make room or give access, and go on "
                "with --resume"
            ) from error

    def digest(self, tensors: Arrays) -> str:
        """Return 16 hex digits over the trained tensors."""
        held = {spec.name: tensors[spec.name] for spec in self._layout.specs}  # in one order
        return weights_digest(_records(held), {})

    # --- tensors ----------------------------------------------------------------------------------

    def _flat_moments(self, state: State) -> Arrays:
        """Return the moments in the form of the reference trainer: one vector each."""
        moments = optimizer.initial_state("adamw", self._layout.num_trainable)
        moments["count"][:] = state.step
        for kind, arrays in state.moments.items():
            for name, array in arrays.items():
                moments[kind][self._layout.trainable[name]] = array.reshape(-1)
        return moments

    def _unflat(self, vector: Any) -> Arrays:
        parts = self._layout.trainable
        return {
            spec.name: vector[parts[spec.name]].reshape(spec.shape) for spec in self._layout.specs
        }


def _records(arrays: Arrays) -> trace.Tensors:
    return {
        name: trace.record_tensor(np.ascontiguousarray(array), values=False)
        for name, array in arrays.items()
    }
