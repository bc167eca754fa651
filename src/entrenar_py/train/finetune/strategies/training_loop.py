"""The loop over steps, the same for every strategy. It follows the rules of the reference trainer.

The loss is a sum divided by the weight of the whole batch, and the gradient is clipped by one norm
over all ranks. A value that is not finite stops all ranks before the update. So does a spike, if
that was requested.

All ranks must take the same branches: if one rank leaves alone, all others wait for it in a
collective. So the values that decide (losses, the norm, signals to stop) are summed or gathered
first, and are the same on all ranks. Only rank 0 writes, by `_on_record`.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from entrenar_py.compute.on_torch import placed
from entrenar_py.shared import trace
from entrenar_py.shared.trace import ledger
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.arithmetic import optimizer, sharding
from entrenar_py.train.arithmetic.on_device import MOMENTS
from entrenar_py.train.finetune import task
from entrenar_py.train.finetune.strategies.optimizers import local
from entrenar_py.train.finetune.strategies.record import Made, Record, State
from entrenar_py.train.finetune.strategies.strategy import (
    Arrays,
    Regrouped,
    Shards,
    Step,
    Strategy,
)
from entrenar_py.train.model.evaluation import Examination, Scores
from entrenar_py.train.model.precision import in_evaluation
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.service import measures, signals
from entrenar_py.train.service.measures import GradientNorms, Memory


class Scoring:
    """Scores every `evaluate_every` steps, and at the end, if there are validation rows.

    Training waits for it, since ranks may have no memory for a second model.
    """

    def __init__(self, prepared: Prepared, strategy: Strategy, shards: Shards) -> None:
        self._every = prepared.settings.evaluate_every
        self._strategy, self._workload = strategy, shards.workload
        self._examination: Examination | None = None
        self.digest: str | None = None  # of the validation rows
        if prepared.validation is not None:
            self.digest = prepared.validation.digest
            self._examination = Examination(
                prepared.validation,
                shards.workload.module,
                settings=prepared.settings,
                pad_token=prepared.pad_token,
                multiple=shards.workload.row_multiple,
            )

    def is_due(self, made: int) -> bool:
        """Return whether to score after `made` steps that are not the last."""
        return self._examination is not None and made % self._every == 0

    def scores(self) -> Scores | None:
        """Return the scores, the same on all ranks; None without rows. All ranks must call it."""
        if (examination := self._examination) is None:
            return None
        device, rank, size = self._strategy.device, dist.get_rank(), dist.get_world_size()
        if not self._strategy.shares_rows:
            rank, size = 0, 1
        totals = torch.zeros(examination.totals_size, dtype=torch.float64)
        workload = self._workload
        with in_evaluation(workload.objective), workload.formats(device), workload.as_it_is():
            for begin in range(0, len(examination), size):
                # A forward pass may be a collective: ranks without a batch repeat the first one.
                is_real = begin + rank < len(examination)
                number = begin + rank if is_real else 0
                found = examination.totals(number, self._strategy.logits, device)
                if is_real and found is not None:
                    totals += torch.from_numpy(found)
        totals = totals.to(device)
        dist.all_reduce(totals)
        return examination.scores(totals.cpu().numpy())


_LOOK_EVERY = 16  # steps between two measurements of this rank's memory


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a run after `made` steps. On rank 0, it has the whole trained tensors."""

    status: str
    reason: str
    made: int
    tensors: Arrays


class Halted(Exception):
    """Raised when a step must not be applied. `events` say why."""

    def __init__(self, *events: trace.Event, reason: str) -> None:
        super().__init__(reason)
        self.events = events


def _not_finite(what: str, step: Step, shard: int | None, tensor: str | None) -> Halted:
    where = "" if shard is None else f", shard {shard}"
    reason = f"non-finite {what} in step {step.number}{where}: training halted before any update"
    ids = () if shard is None else tuple(step.shards[shard])
    halt = trace.Halt(step=step.number, reason=reason, shard=shard, tensor=tensor, ids=ids)
    return Halted(halt, reason=reason)


class Loop:
    """One run with `strategy`. `record` is rank 0's; it is None on other ranks."""

    def __init__(
        self,
        strategy: Strategy,
        shards: Shards,
        record: Record | None,
        *,
        scoring: Scoring,
        save_every: int,
        halts_on_spike: bool,
    ) -> None:
        """`halts_on_spike` is as in `service.coordinator.Task`."""
        self._strategy, self._shards, self._record = strategy, shards, record
        self._plan, self._save_every = shards.plan, save_every
        self._scoring, self._memory = scoring, Memory(0, None)
        self._optimizer = strategy.optimizer()
        self._position, self._step, self._saved = sharding.Position(), 0, -1
        self._norms, self._halts_on_spike = GradientNorms(), halts_on_spike  # equal on all ranks
        self._stopping = _Stopping()
        self._begun: tuple[Step, Tensor] | None = None  # the next step, computed ahead
        self._over: tuple[str, str] | None = None  # status and reason, if it ends before its time
        self._events: tuple[trace.Event, ...] = ()  # of a halt

    def run(self, state: State | None, *, resumes: bool) -> Ended:
        """Train from the beginning, or from rank 0's `state`, to the end, and score the result.

        A signal to stop takes effect after a save or an evaluation in progress.
        """
        with self._stopping:
            return self._run(state, resumes=resumes)

    def _run(self, state: State | None, *, resumes: bool) -> Ended:
        if resumes:
            self._restore(state)
        self._strategy.join(self, self._step)
        self.begin_record()
        num_steps = self._plan.num_steps
        while self._step < num_steps and self._over is None:
            try:
                is_stopped = self._train()
            except Regrouped:  # this rank may have another rank's state, and be the writer
                self.begin_record()
                self._follow_up(is_repeated=True)
                continue
            except Halted as error:
                self._over, self._events = ("halted", str(error)), error.events
                self._strategy.skip()
                break
            if is_stopped and self._step < num_steps:
                self._over = "stopped", "a rank was stopped by a signal"
                break
            self._follow_up(is_repeated=False)
        return self.end()

    def end(self) -> Ended:
        """Save and record the end of the run, and score the result."""
        status, reason = self._over or ("completed", "")
        self._save()
        step, peaks = self._step, self._peaks()
        self._on_record(lambda record: record.note("memory", step, f"peak memory: {peaks}"))
        tensors = self._strategy.whole(lambda parameter: parameter)
        self._on_record(
            lambda record: record.finish(step, status, reason, tensors=tensors, events=self._events)
        )
        scores = self._score() if status == "completed" else None
        for line in () if scores is None or self._record is None else scores.lines():
            printing.say(f"validation: {line}")
        return Ended(status=status, reason=reason, made=step, tensors=tensors)

    def begin_record(self) -> None:
        """Begin the record from the present state. Later calls are for an elastic run."""
        self._saved, whole = -1, self._state()
        self._on_record(lambda record: record.begin(whole))

    def _follow_up(self, *, is_repeated: bool) -> None:
        """Save and score, if that is due after this step.

        If `is_repeated`, only the rank that records them makes scores, if the record lacks them.
        """
        if self._step and self._step % self._save_every == 0:
            self._save()
        if not 0 < self._step < self._plan.num_steps or not self._scoring.is_due(self._step):
            return
        record = self._record
        if not is_repeated or (record is not None and record.lacks_scores(self._step)):
            self._score()

    def _score(self) -> Scores | None:
        scores, step = self._scoring.scores(), self._step
        if scores is not None:
            event = task.event(scores, step, self._scoring.digest)
            self._on_record(lambda record: record.scored(event))
        return scores

    def _peaks(self) -> str:
        """Return a text with the peak memory of each rank, the same on all ranks."""
        if self._strategy.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._strategy.device)
        else:
            peak = measures.memory_peak().host_bytes
        everyone = [0] * dist.get_world_size()
        dist.all_gather_object(everyone, peak)
        return ", ".join(
            f"rank {rank} {bytes_ / 1e9:.3f} GB" for rank, bytes_ in enumerate(everyone)
        )

    def _train(self) -> bool:
        """Apply one step; return whether a rank was told to stop. Raises Halted on all ranks."""
        step, computed = self._begun or self._begin(self._shards.step(self._step, self._position))
        self._begun = None
        if self._step % _LOOK_EVERY == 0:
            self._memory = measures.memory_peak()
        host, device = self._memory
        own = torch.tensor([self._stopping.is_told, host, device or 0], dtype=torch.float64)
        totals = self._strategy.total(computed, placed(own, self._strategy.device))
        totals = torch.cat([totals, self._strategy.squares()[None]])
        position = sharding.advance(self._position, step.num_samples, self._plan.num_samples)
        upcoming = None
        if self._strategy.is_ahead and self._step + 1 < self._plan.num_steps:
            upcoming = self._shards.step(self._step + 1, position)
            self._strategy.prepare(upcoming)
        # One read of the device for all numbers: it waits for the whole step.
        *losses, stops, host_bytes, device_bytes, squares = totals.tolist()
        norm = math.sqrt(squares)
        self._require_finite(step, losses, norm)
        spike = self._spike(step, norm)
        applied = self._optimizer.clip(norm, self._plan.clip_norm)
        rate = self._rate()
        self._optimizer.step(rate)
        self._position, self._step = position, self._step + 1
        if upcoming is not None and not stops:
            self._begun = self._begin(upcoming)
        weight = self._shards.workload.weight
        made = Made(
            losses=losses,
            ranks=self._strategy.ranks(),
            weights=[float(weight(ids)) if ids else 0.0 for ids in step.shards],
            rate=rate,
            norm=norm,
            applied_norm=applied,
            num_tokens=self._shards.workload.num_tokens([i for ids in step.shards for i in ids]),
            spike=spike,
            memory=Memory(int(host_bytes), None if device is None else int(device_bytes)),
        )
        self._on_record(lambda record: record.made(step, made))
        return bool(stops)

    def _begin(self, step: Step) -> tuple[Step, Tensor]:
        """Compute the gradient of `step`; return it with the result of `compute`."""
        return step, self._strategy.compute(step)

    def _require_finite(self, step: Step, losses: list[float], norm: float) -> None:
        for shard, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise _not_finite(f"loss {loss}", step, shard, None)
        if not math.isfinite(norm):
            tensor = self._strategy.first_bad()
            raise _not_finite(f"gradient of {tensor}", step, None, tensor)

    def _spike(self, step: Step, norm: float) -> trace.Spike | None:
        spike = self._norms.spike(step.number, norm)
        if spike is not None and self._halts_on_spike:
            reason = measures.say_halted(spike)
            raise Halted(spike, trace.Halt(step=step.number, reason=reason), reason=reason)
        self._norms.add(norm)
        return spike

    def _rate(self) -> float:
        plan = self._plan
        return optimizer.learning_rate(
            self._step,
            peak=plan.learning_rate,
            kind=plan.schedule,
            warmup_steps=plan.warmup_steps,
            num_steps=plan.num_steps,
        )

    def _on_record(self, action: Callable[[Record], None]) -> None:
        """Call `action` with rank 0's record. If the ledger can't be written, rank 0 ends.

        torchrun then ends all other ranks.
        """
        if self._record is not None:
            action(self._record)

    # --- the state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what another rank needs to continue, besides the tensors."""
        epoch, offset = self._position.epoch, self._position.offset
        return {
            "step": self._step,
            "position": [epoch, offset],
            "norms": list(self._norms.to_record()),
            "over": None if self._over is None else list(self._over),
            "events": ledger.dump_events(self._events).decode(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the `state_dict` of another rank."""
        self._step, self._position = state["step"], sharding.Position(*state["position"])
        self._norms, over = GradientNorms(state["norms"]), state["over"]
        self._over = None if over is None else (over[0], over[1])
        self._events = tuple(ledger.load_events(state["events"].encode()))

    def _save(self) -> None:
        if self._saved != self._step:
            self._saved = self._step
            state = self._state()
            self._on_record(lambda record: record.save(state))

    def _state(self) -> State:
        """Return the run's state; it has tensors only on rank 0. All ranks must call it."""
        whole = self._strategy.whole
        moments = {kind: whole(partial(self._optimizer.moment, kind)) for kind in MOMENTS}
        return State(
            step=self._step,
            position=self._position,
            tensors=whole(lambda parameter: parameter),
            moments=moments,
            norms=self._norms.to_record(),
        )

    def _restore(self, state: State | None) -> None:
        """Restore rank 0's `state` on all ranks, which must all call it."""
        stands = [None if state is None else (state.step, state.position, state.norms)]
        dist.broadcast_object_list(stands, 0)
        assert stands[0] is not None, "rank 0 has a state"
        self._step, self._position, norms = stands[0]
        self._norms = GradientNorms(norms)
        shapes = {spec.name: spec.shape for spec in self._shards.workload.specs}
        strategy = self._strategy
        tensors = strategy.spread({} if state is None else state.tensors, shapes)
        moments = {
            kind: strategy.spread({} if state is None else state.moments[kind], shapes)
            for kind in MOMENTS
        }
        with torch.no_grad():
            for name, parameter in strategy.trainable.items():
                local(parameter).copy_(local(tensors[name]))
        self._optimizer.restore(self._step, moments)


class _Stopping:
    """Notes signals to stop within its context. The step in progress is completed and saved."""

    def __init__(self) -> None:
        self.is_told = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> None:
        for number in signals.taken():
            self._before[number] = signal.signal(number, self._note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.is_told = True
        signal.signal(number, signal.SIG_DFL)
