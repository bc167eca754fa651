"""The record of a run that may take weeks: its ledger, checkpoints and notes to listeners.

Memory use doesn't grow with the number of steps. The ledger is written before the checkpoint: a
checkpoint newer than its ledger would leave an unexplained gap, while a newer ledger only repeats
some steps. If the ledger can't be written, the run ends. If a checkpoint can't be written, the run
continues, because the previous checkpoint is still intact; the next save tries again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.shared.trace.writer import Mark, Standing, Writer
from entrenar_py.shared.untrusted import files
from entrenar_py.train.arithmetic.tensors import Array, Workload
from entrenar_py.train.coordinator import recorder, topology
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.service import ledger_account, measures
from entrenar_py.train.service.ledger_account import weights_digest
from entrenar_py.train.service.measures import GradientNorms, Memory, Stopwatch
from entrenar_py.train.service.progress import digits
from entrenar_py.train.service.run_events import Happening, Listener, Noted, StepMade
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import pipeline
from entrenar_py.train.wire.effects import Effect, Finish, Left
from entrenar_py.train.wire.messages import (
    Applied,
    Commit,
    Computed,
    Message,
    State,
    Summed,
    TreeNode,
)
from entrenar_py.train.wire_io.endpoints import ReadPiece, Saving, no_piece

UNLIKE = 1.25  # workers differ if one takes this many times longer for a shard than another
SHARDS_A_WORKER = 2  # fewer shards can't be divided in proportion to speeds
Traffic = Callable[[], tuple[int, int]]
Tensors = Callable[[], Mapping[str, Array]]
Stepped = Callable[[int, Tensors, Listener], None]


class Host:
    """The record of one coordinator's run. Its `server` does the arithmetic.

    `unsaved` says why the last checkpoint could not be written, and `broken` why the ledger could
    not; each is None if there was no problem. When the ledger can't be written, `give_up` is
    called. `traffic` returns the bytes received and sent so far, `backends` the backend of each
    rank, and `memory` the peak memory of the run's processes on this machine. `since` is the Gap
    event at the start of a new ledger after a resume, or None. `ledger_end` is the last line of the
    ledger after it was closed.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        *,
        checkpoint_path: Path | None,
        listeners: Iterable[Listener],
        clock: Callable[[], float] = time.monotonic,
        workload: Workload | None = None,
        halt_on_spike: bool = False,
        stepped: Stepped = lambda made, tensors, tell: None,
        piece: ReadPiece = no_piece,
        make_server: Callable[..., Server] = Server,
    ) -> None:
        """Start without a ledger. `stepped` and `make_server` are as in `coordinator.Task`."""
        self.plan = plan
        self.server = make_server(
            plan,
            checkpoint_path=checkpoint_path,
            save=self.begin_save,
            clock=clock,
            workload=workload,
            objection=self._objection if halt_on_spike else None,
            piece=piece,
        )
        self.unsaved: str | None = None
        self.broken: str | None = None
        self.since: trace.Gap | None = None
        self.give_up: Callable[[str], object] = lambda reason: None
        self.ledger_end: Mark | None = None
        self.traffic: Traffic = lambda: (0, 0)
        self.backends: Callable[[], Mapping[int, str]] = dict
        self.memory: Callable[[], Memory] = measures.memory_peak
        self._in_star = topology.of(plan) is topology.STAR  # otherwise the workers hold the state
        self._ledger: Writer | None = None
        self._is_over = False  # the ledger already says that the run is completed
        self._listeners = tuple(listeners)
        self._stepped = stepped
        self._watch = Stopwatch(clock)
        self._step = 0  # the current step
        self._held_step = 0  # the coordinator holds the state before this step
        self._made_step = -1  # the last step that listeners were told of
        self._saved: int | None = None  # the last checkpoint holds the state before this step
        self._has_warned = False  # whether the note on too few shards for unequal workers was sent
        self._norms = GradientNorms()
        self._spike: trace.Spike | None = None  # the spike that `_objection` halts for
        self._passes: dict[int, tuple[int, ...]] = {}  # of the current step, by rank
        self._told = (0, 0)  # the traffic at the last step reported to listeners

    # --- called by the protocol -------------------------------------------------------------------

    def notify(self, effect: Effect) -> None:
        """Record `effect`, which the server has carried out, and notify the listeners."""
        match effect:
            case do.Joined(rank, step):
                self._write()
                self._watch.begin()
                self.note("joined", f"worker {rank} takes part from step {step} on")
            case do.Left(rank, step, reason):
                self._write()
                self.note("left", f"worker {rank} left in step {step}: {reason}")
            case do.Gather(step):
                self._step = step
                self._passes.clear()
                self._write()
                self._watch.begin()
            case do.Keep(rank, message) | do.Copy(rank, message):
                self._kept(rank, message)
            case do.Apply(step):
                self._held_step = step + 1
                average = self.server.average_held()
                self._tell_made(step, average.loss, average.clipped.rate, average.clipped.norm)
                self._tell_stepped(step + 1)
            case do.Send(_, Commit()):
                self._watch.exchanged()
            case do.Dealt():
                self._dealt(effect)
            case do.Stop(_, _, reason):
                if self._spike is not None:
                    self.server.recorder.emit(self._spike)
                self._write()
                self.note("halted", reason)

    def _kept(self, rank: int, message: Message) -> None:
        """Record when a gradient was computed and delivered, and each step of a mesh."""
        if isinstance(message, Summed):
            self._passes[rank] = message.times_us
        if isinstance(message, Computed | Summed):
            self._watch.computed(rank)
            if not self._in_star:  # in a mesh, gradients don't pass through the coordinator
                self._watch.delivered(rank)
        elif isinstance(message, TreeNode):
            self._watch.delivered(rank)
        elif isinstance(message, State):
            self._held_step = message.step
        elif isinstance(message, Applied) and message.step > self._made_step:
            update = recorder.update_in(self.server.recorder.of(trace.Update))
            assert update is not None, "a star's step was told before, a mesh's loss was required"
            assert update.loss is not None
            self._tell_made(message.step, update.loss, update.learning_rate, update.grad_norm)

    def _dealt(self, dealt: do.Dealt) -> None:
        """Note how many shards each worker gets, if the measured speeds differ."""
        slowest, fastest = max(dealt.costs.values()), min(dealt.costs.values())
        if slowest < UNLIKE * fastest:
            return
        parts = [
            f"{count} to worker {rank} ({digits(1e3 * dealt.costs[rank])} ms each)"
            for rank, count in dealt.counts.items()
        ]
        self.note("dealt", f"shards from step {dealt.step} on: {', '.join(parts)}")
        num_shards, num_workers = self.plan.num_shards, len(dealt.counts)
        least = SHARDS_A_WORKER * num_workers
        if num_shards < least and not self._has_warned:
            self._has_warned = True
            self.note(
                "few_shards",
                f"num_shards={num_shards} for {num_workers} workers of different speeds: slow ones "
                f"hold up the others; use {least} or more in the next run",
            )

    def begin_save(self, step: int) -> Saving:
        """Write the ledger; return a function that writes the checkpoint, if one is configured.

        If the checkpoint can't be written, a note says so and the run continues. The previous
        checkpoint stays intact, and the next save tries again.
        """
        self._write(sync=True)
        path = self.server.checkpoint_path
        if path is None or self.broken is not None or step == self._saved:
            # a checkpoint newer than the ledger would leave a gap in the ledger
            return lambda: lambda: None
        last = None if self._ledger is None else self._ledger.last
        notes = {
            ledger_account.LEDGER_KEY: ledger_account.mark_record(last),
            measures.NORMS_KEY: self._norms.to_record(),
        }
        write = self.server.write_checkpoint(step, notes)

        def save() -> Callable[[], None]:
            try:
                record = write()
            except OSError as error:
                why = files.problem(error, path.parent)
                return partial(self._not_saved, f"checkpoint {path}: can't be written ({why})")
            return partial(self._keep_saved, step, record)

        return save

    def _keep_saved(self, step: int, record: Callable[[], None]) -> None:
        record()
        self.unsaved, self._saved = None, step
        self._write()
        self.note("saved", f"checkpoint before step {step}: {self.server.checkpoint_path}")

    def _not_saved(self, problem: str) -> None:
        self.unsaved = problem
        kept = "there is no earlier one"
        if self._saved is not None:
            kept = f"the checkpoint of step {self._saved} stays"
        self.note("not_saved", f"{problem}; {kept}, and the run goes on")

    # --- called by the service --------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Write the ledger, and then the checkpoint, if one is configured; see `begin_save`."""
        self.begin_save(step)()()

    def resume(self) -> int:
        """Return the next step, after restoring the state from the checkpoint, if it exists."""
        path = self.server.checkpoint_path
        if path is None or not path.exists():
            return 0
        first = self.server.restore()
        self.since = ledger_account.gap_since(self.server.notes, path)
        self._norms = measures.of_checkpoint(self.server.notes, path)
        self._step = self._held_step = self._saved = first
        if self._in_star and first:
            self._tell_stepped(first)
        return first

    def write_to(self, ledger: Writer, standing: Standing) -> None:
        """Record in `ledger` from now on; `standing` is the state at its current end.

        A Gap in a new ledger is noted. If an existing ledger doesn't end with End, its coordinator
        died, and the ranks that took part are recorded as having left.
        """
        self._ledger = ledger
        if self.since is not None and standing.is_new:
            self.note("gap", f"the ledger is new: {ledger_account.gap_in_words(self.since)}")
        elif self.since is not None and self.since.digest is None:
            self.note("unchecked", ledger_account.unchecked(self.since))
        self._is_over = standing.end is not None and standing.end.status == "completed"
        if standing.end is None:
            for rank in standing.present:
                left = Left(rank, standing.step, "the coordinator died")
                self.server.left(left)
                self.notify(left)

    def finish(self, finish: Finish) -> None:
        """Record how the run ended, save the state if it failed or halted, and close the ledger."""
        self._step = self._held_step
        if finish.status in ("failed", "halted"):  # otherwise the protocol has already saved it
            self.save(self._step)
        recorder = self.server.recorder
        if not self._is_over:
            status = "failed" if finish.status == "stopped" else finish.status
            recorder.emit(trace.End(status=status, reason=finish.reason))
        self._write()
        self.close()
        reason = f" ({finish.reason})" if finish.reason else ""
        told = f"{finish.status}{reason}: step {self._step}, weights {self.digest()}"
        self.note(finish.status, told)

    def digest(self) -> str:
        """Return 16 hex digits over weights and buffers."""
        recorder, worker = self.server.recorder, self.server.replica.replica
        return weights_digest(recorder.tensors(worker.weights), recorder.tensors(worker.buffers))

    def close(self) -> None:
        """Close the ledger."""
        if self._ledger is None:
            return
        ledger, self._ledger = self._ledger, None
        try:
            ledger.close()
        except OSError as error:  # some file systems write only now
            self._note_broken(ledger.path, error)
            return
        self.ledger_end = ledger.last

    @property
    def made(self) -> int:
        """The number of steps that the state here includes."""
        return self._held_step

    def note(self, what: str, text: str) -> None:
        """Send a note to the listeners."""
        self.tell(Noted(what=what, step=self._step, text=text))

    def _objection(self, norm: float) -> str | None:
        """Return why training halts before a step with this gradient norm; None if it doesn't."""
        self._spike = self._norms.spike(self._step, norm)
        return None if self._spike is None else measures.say_halted(self._spike)

    def _look_for_spike(self, step: int, norm: float) -> None:
        spike = self._norms.spike(step, norm)
        self._norms.add(norm)
        if spike is not None:
            self.server.recorder.emit(spike)
            self.note("spike", measures.say_made(spike, self.plan.clip_norm))

    def _tell_made(self, step: int, loss: float, rate: float, norm: float | None) -> None:
        """Report to the listeners that `step` was applied, with its workers, times and traffic."""
        self._made_step = step
        if norm is not None:
            self._look_for_spike(step, norm)
        num_tokens = self.server.replicas.workload.num_tokens(self.server.drawn)
        times = self._watch.made(reduce_s=self.server.reduction.seconds, num_tokens=num_tokens)
        before, self._told = self._told, self.traffic()
        memory = self.memory()
        self.tell(
            StepMade(
                step=step,
                num_steps=self.plan.num_steps,
                loss=loss,
                workers=tuple(sorted(self.server.present)),
                step_ms=times.step_ms,
                exchange_ms=times.exchange_ms,
                reduce_ms=times.reduce_ms,
                steps_per_s=times.steps_per_s,
                bytes_in=self._told[0] - before[0],
                bytes_out=self._told[1] - before[1],
                last=self._watch.last(),
                waits_ms=self._watch.waits_ms(sorted(self.server.present)),
                learning_rate=rate,
                grad_norm=norm,
                tokens_per_s=times.tokens_per_s,
                backends=dict(sorted(self.backends().items())),
                memory_bytes=memory.host_bytes,
                device_bytes=memory.device_bytes,
                idle_share=pipeline.idle_share(
                    {rank: pipeline.decode(times) for rank, times in self._passes.items()}
                ),
                passes_us=dict(sorted(self._passes.items())),
            )
        )
        self._passes.clear()

    def _tell_stepped(self, made: int) -> None:
        self._stepped(made, lambda: self.server.replica.replica.arrays, self.tell)

    def tell(self, happening: Happening) -> None:
        """Send an event to the listeners."""
        for listener in self._listeners:
            listener(happening)

    def _write(self, *, sync: bool = False) -> None:
        """Move the recorded events to the ledger, or discard them if there is none.

        If the ledger can't be written, the run is ended, because the ledger would have a gap.
        """
        events = self.server.recorder.drain()
        if self._ledger is None:
            return
        try:
            self._ledger.append(events)
            if sync:
                self._ledger.sync()
        except (OSError, UsageError) as error:
            ledger, self._ledger = self._ledger, None
            broken = self._note_broken(ledger.path, error)
            with suppress(OSError):
                ledger.close()
            self.give_up(broken)

    def _note_broken(self, path: Path, error: OSError | UsageError) -> str:
        reason = files.problem(error, path.parent) if isinstance(error, OSError) else error
        self.broken = f"the ledger {path.name} can't be written ({reason})"
        return self.broken
