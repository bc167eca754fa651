"""A parameter server that may run for weeks: what it records goes to disk, and it tells of itself.

Nothing that grows with the number of steps is kept in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from entrenar_py import trace
from entrenar_py.protocol.effects import Finish, Joined, Left, Stop
from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.messages import Commit, Computed, Message, TreeNode
from entrenar_py.scenario import Scenario
from entrenar_py.service import digest, ledger_continuity
from entrenar_py.service.run_events import Happening, Listener, Noted, StepMade
from entrenar_py.service.stopwatch import Stopwatch
from entrenar_py.systems.star.server import Server
from entrenar_py.trace.writer import Standing, Writer

Traffic = Callable[[], tuple[int, int]]


class Host(Server):
    """`unsaved` says why the last checkpoint could not be written, `broken` why the ledger could
    not; None if they could. A broken ledger calls `give_up`. `traffic` is asked for the bytes in
    and out so far. `since` is what a new ledger lacks, if the run was gone on with from a
    checkpoint.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        checkpoint_path: Path | None,
        listeners: Iterable[Listener],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(scenario)
        self.checkpoint_path = checkpoint_path
        self.unsaved: str | None = None
        self.broken: str | None = None
        self.since: trace.Gap | None = None
        self.give_up: Callable[[str], None] = lambda reason: None
        self.traffic: Traffic = lambda: (0, 0)
        self._ledger: Writer | None = None
        self._is_over = False  # the ledger says so already
        self._listeners = tuple(listeners)
        self._watch = Stopwatch(clock)
        self._step = 0  # in work
        self._saved: int | None = None  # the step before which the state was last written
        self._told = (0, 0)  # of the traffic

    # --- what the protocol wants done -------------------------------------------------------------

    def joined(self, effect: Joined) -> None:
        """Also says so; every worker is mentioned here."""
        super().joined(effect)
        self._write()
        self._watch.begin()
        self.note("joined", f"worker {effect.rank} takes part from step {effect.step} on")

    def left(self, effect: Left) -> None:
        """Also says so."""
        super().left(effect)
        self._write()
        self.note("left", f"worker {effect.rank} left in step {effect.step}: {effect.reason}")

    def gather(self, step: int) -> None:
        """Also writes down all that happened up to here."""
        super().gather(step)
        self._step = step
        self._write()
        self._watch.begin()

    def keep(self, rank: int, message: Message, payload: Buffer) -> None:
        """Also notes when a gradient came."""
        super().keep(rank, message, payload)
        self._heard(rank, message)

    def copy(self, rank: int, message: Message, payload: Buffer) -> None:
        """Also notes when a gradient came."""
        super().copy(rank, message, payload)
        self._heard(rank, message)

    def reduce(self, block: int) -> tuple[float, float] | str:
        """Also takes its time."""
        since = self._watch.now()
        reduced = super().reduce(block)
        self._watch.reduced(since)
        return reduced

    def apply_average(self, step: int) -> None:
        """Also tells that the step is made."""
        loss = self.average_held().loss
        super().apply_average(step)
        self._tell_made(step, loss=loss)

    def payload(self, message: Message) -> Buffer:
        """Also notes when everyone is told to make the step."""
        if isinstance(message, Commit):
            self._watch.exchanged()
        return super().payload(message)

    def stop(self, effect: Stop) -> None:
        """Also says so."""
        super().stop(effect)
        self._write()
        self.note("halted", effect.reason)

    def save(self, step: int) -> None:
        """Writes the checkpoint, if the run has a place for one, and the ledger before it.

        A checkpoint that can't be written is told of, and the run goes on: the one before is whole,
        and the next is tried in its turn.
        """
        self._sync()
        if self.checkpoint_path is None or self.broken is not None or step == self._saved:
            return  # a checkpoint is never newer than the ledger: there would be a gap in it
        try:
            super().save(step)
        except OSError as error:
            self.unsaved = (
                f"checkpoint {self.checkpoint_path}: can't be written ({error.strerror or error})"
            )
            before = "none before it" if self._saved is None else f"the one of step {self._saved}"
            self.note("not_saved", f"{self.unsaved}; {before} stays, the run goes on")
            return
        self.unsaved, self._saved = None, step
        self._write()
        self.note("saved", f"checkpoint before step {step}: {self.checkpoint_path}")

    # --- what the service wants done --------------------------------------------------------------

    def resume(self) -> int:
        """Takes the state from the checkpoint, if there is one; the next step."""
        there = self.checkpoint_path is not None and self.checkpoint_path.exists()
        first = self.restore() if there else 0
        self._step, self._saved = first, first if there else None
        return first

    def notes(self) -> Mapping[str, Any]:
        """Return the ledger's last line, which is synced by then; null where there is none."""
        last = None if self._ledger is None else self._ledger.last
        return {ledger_continuity.KEY: ledger_continuity.to_record(last)}

    def read_notes(self, progress: Mapping[str, Any]) -> None:
        """Takes which line of the ledger the checkpoint names."""
        assert self.checkpoint_path is not None, "it was read there"
        self.since = ledger_continuity.since(progress, self.checkpoint_path)

    def write_to(self, ledger: Writer, standing: Standing) -> None:
        """Records in `ledger` from now on; who took part where it ends (`standing`) has left.

        A new one begins with the gap before it, if the run goes on from a checkpoint.
        """
        self._ledger = ledger
        if self.since is not None and standing.is_new:
            self.recorder.emit(self.since)
            self._write()
            self.note("gap", f"the ledger is new: {ledger_continuity.say(self.since)}")
        elif self.since is not None and self.since.digest is None:
            self.note("unchecked", ledger_continuity.unchecked(self.since))
        self._is_over = standing.end is not None and standing.end.status == "completed"
        if standing.end is None:
            for rank in standing.present:
                self.left(Left(rank, standing.step, "the coordinator died"))

    def finish(self, finish: Finish) -> None:
        """Writes down how the run ended, and its state if nobody has; nothing more is recorded."""
        if finish.status in ("failed", "halted"):  # else the protocol had it saved
            self.save(self._step)
        if not self._is_over:
            status = "failed" if finish.status == "stopped" else finish.status
            self.recorder.emit(trace.End(status=status, reason=finish.reason))
        self._write()
        self.close()
        worker = self.replica.replica
        weights = digest.of(
            self.recorder.tensors(worker.weights), self.recorder.tensors(worker.buffers)
        )
        said = f" ({finish.reason})" if finish.reason else ""
        self.note(finish.status, f"{finish.status}{said}: step {self._step}, weights {weights}")

    def close(self) -> None:
        """Lets go of the ledger."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def note(self, what: str, text: str) -> None:
        """Tells the listeners."""
        self._tell(Noted(what=what, step=self._step, text=text))

    def _heard(self, rank: int, message: Message) -> None:
        """Notes when a gradient was computed, and when it came."""
        if isinstance(message, Computed):
            self._watch.computed()
        elif isinstance(message, TreeNode):
            self._watch.delivered(rank)

    def _tell_made(self, step: int, *, loss: float) -> None:
        """Tells that `step` is made, by whom, in what time and with what traffic."""
        times = self._watch.made()
        before, self._told = self._told, self.traffic()
        self._tell(
            StepMade(
                step=step,
                num_steps=self.scenario.num_steps,
                loss=loss,
                workers=tuple(sorted(self.present)),
                step_ms=times.step_ms,
                exchange_ms=times.exchange_ms,
                reduce_ms=times.reduce_ms,
                steps_per_s=times.steps_per_s,
                bytes_in=self._told[0] - before[0],
                bytes_out=self._told[1] - before[1],
                last=self._watch.last(),
            )
        )

    def _tell(self, happening: Happening) -> None:
        for listener in self._listeners:
            listener(happening)

    def _write(self) -> None:
        """Moves what was recorded to the ledger; without one nobody asks for it.

        A ledger that can't be written ends the run: what it is to prove would have a gap.
        """
        events = self.recorder.drain()
        if self._ledger is None:
            return
        try:
            self._ledger.append(events)
        except OSError as error:
            self._break(error)

    def _sync(self) -> None:
        self._write()
        try:
            if self._ledger is not None:
                self._ledger.sync()
        except OSError as error:
            self._break(error)

    def _break(self, error: OSError) -> None:
        self.broken = f"the ledger can't be written ({error.strerror or error})"
        self._ledger = None
        self.give_up(self.broken)
