"""`elastic: true`: the ranks of `ddp_canonical` exchange gradients through `entrenar_py.elastic`.

Each process is alone in torch's process group, so loop and record are those of a single rank. Only
the exchange of a step knows other ranks: it adds gradients, losses and signals to stop. When ranks
die or join, it raises `Regrouped`, and the loop goes on from its state, which may be another rank's
by then.

One rank writes the record, until it dies. Its successor has the same state, and repeats what that
one did after the last step: a rank doesn't make a step before the writer has recorded the last one.
Lines that are in the files already are not written again. The end of a run is a step of its own, in
which the writer writes the output. If it dies, its successor does.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import backward

import entrenar_py
from entrenar_py.shared.errors import TraceError, UsageError
from entrenar_py.shared.trace import Attempt, End, Event, Spike, Start, ledger, writer
from entrenar_py.shared.untrusted import files, json_text
from entrenar_py.train.elastic import exchange
from entrenar_py.train.elastic.trainer import ElasticTrainer
from entrenar_py.train.finetune.strategies import vector
from entrenar_py.train.finetune.strategies.data_parallel import (
    Canonical,
    use_deterministic_kernels,
)
from entrenar_py.train.finetune.strategies.optimizers import Moments, Optimizer, VectorAdamW
from entrenar_py.train.finetune.strategies.record import Made, Record, State
from entrenar_py.train.finetune.strategies.strategy import Regrouped, Shards, Step, trainable_of
from entrenar_py.train.finetune.task import LEDGER, METRICS
from entrenar_py.train.service import metrics
from entrenar_py.train.service.measures import Memory
from entrenar_py.train.service.run_events import Happening

DEADLINE_S = 1800.0  # for another rank: loading a model, or writing the output, may take long
# For another rank in a step that only computes, and follows one in this process.
STEPS_LONG, LEAST_S = 10, 300.0  # the longest one so far, as often, but a kernel may be compiled
_LOCK_S = 60.0  # until the supervisor has killed a writer that hung
_POLL_S = 0.2


class Elastic(Canonical):
    """The canonical all-reduce of one vector, for ranks that may die and join."""

    def __init__(
        self,
        shards: Shards,
        *,
        record: SharedRecord,
        settings: str,
        is_followed: Callable[[int], bool],
    ) -> None:
        """`settings` are those of the run: another rank with others is refused.

        `is_followed` says whether ranks save or score after so many steps, which may take long.
        """
        if not vector.is_small(shards, trainable_of(shards.workload.module)):
            raise UsageError(
                "elastic: true with more than 256 MiB of trained weights: elastic ranks exchange "
                "them as one vector; train fewer, as with method: lora, or leave elastic out"
            )
        use_deterministic_kernels()
        super().__init__(shards)
        self._weights = nn.Parameter(self._vector.weights)  # the same memory
        # Losses of shards, and three numbers of each rank. They are added like gradients.
        self._numbers = nn.Parameter(shards.zeros().float().new_zeros(self.plan.num_shards + 3))
        self._own = self._others = torch.zeros(3, dtype=torch.float64, device=self.device)
        self._adamw = _Committed(self._vector.optimizer, self._commit)
        self._trainer: ElasticTrainer | None = None
        self._record, self._settings = record, settings
        self._generation = -1  # the one that the loop knows: to join is a change, too
        self._is_followed, self._longest_s = is_followed, 0.0
        self._is_settled = False  # whether the loop's ranks have made a step together
        self._is_closed = False  # whether the output is written

    @property
    def is_ahead(self) -> bool:
        """See `Strategy`. A step that is repeated would be computed in vain."""
        return False

    def optimizer(self) -> Optimizer:  # type: ignore[override]
        """See `Strategy`. Its step commits the gradient of `compute` on all ranks."""
        return self._adamw

    def ranks(self) -> list[int]:
        """See `Strategy`. These are ranks of the launcher."""
        members, num_shards = self._here.generation.members, self.plan.num_shards
        return [
            seat
            for rank, (seat, _) in enumerate(members)
            for _ in exchange.share(num_shards, rank=rank, world_size=len(members))
        ]

    @property
    def _here(self) -> ElasticTrainer:
        assert self._trainer is not None, "it has joined"
        return self._trainer

    def join(self, loop: Any, step: int) -> None:
        """Wait for the other ranks, or join them and get their state. See `Strategy`."""
        settings = f"{json.dumps(self.plan.to_dict(), sort_keys=True)} {self._settings}"
        self._trainer = entrenar_py.elastic(
            nn.ParameterList([self._weights, self._numbers]),
            cast("Any", self._adamw),
            micro_batches=self.plan.num_shards,
            state=[loop, self, self._record],
            first_step=step,
            # No number is drawn from it. A rank with another configuration is refused.
            seed=int(hashlib.sha256(settings.encode()).hexdigest()[:12], 16),
            deadline_s=DEADLINE_S,
        )

    @property
    def is_writer(self) -> bool:
        """True if this rank writes."""
        return self._here.generation.lead == self._here.rank

    def compute(self, step: Step) -> Tensor:
        """Implement `Strategy.compute`, with the losses of all ranks. Raises Regrouped."""
        losses, num_shards = self._shards.zeros(), self.plan.num_shards

        def gradients(shard: int) -> tuple[Tensor, Tensor]:
            (gradient,) = self._vector.gradients(step, range(shard, shard + 1), losses)
            numbers = torch.zeros_like(self._numbers)
            numbers[shard] = losses[shard]
            if shard == self._here.shards.start:
                numbers[num_shards:] = self._own
            return gradient, numbers

        is_plain = self._is_settled and not (
            self._is_followed(step.number) or self._is_followed(step.number + 1)
        )
        self._here.patience_s = self._patience_s if is_plain else DEADLINE_S
        begin = time.monotonic()
        self._exchange_all(gradients)
        self._is_settled = True
        if is_plain:
            self._longest_s = max(self._longest_s, time.monotonic() - begin)
        # Its mean was divided by a power of two.
        assert self._weights.grad is not None
        assert self._numbers.grad is not None
        torch.mul(self._weights.grad, num_shards, out=self._vector.gradient)
        self._vector.divide(step)
        numbers = self._numbers.grad.double() * num_shards
        self._others = numbers[num_shards:]
        return numbers[:num_shards]

    @property
    def _patience_s(self) -> float:
        """Return how long another rank may take for a step that only computes."""
        if not self._longest_s:
            return DEADLINE_S
        return min(max(STEPS_LONG * self._longest_s, LEAST_S), DEADLINE_S)

    def _exchange_all(self, gradients: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        """Leave the mean of all shards' `gradients` in both `.grad`s. Raises Regrouped."""
        trainer = self._here
        next(trainer.steps(sys.maxsize))
        self._require_same_ranks()
        for shard in trainer.fold(range(self.plan.num_shards)):
            with torch.enable_grad():
                copies = [one.clone() for one in gradients(shard)]
                backward([self._weights, self._numbers], copies)
        if self._weights.grad is None:
            self._commit()
            self._require_same_ranks()

    def _require_same_ranks(self) -> None:
        number = self._here.generation.number
        if number != self._generation:
            self._generation, self._is_settled = number, False
            raise Regrouped

    def _commit(self) -> None:
        self._here.commit()

    def total(self, computed: Tensor, own: Tensor) -> Tensor:
        """See `Strategy`. Other ranks get this rank's `own` with the next step."""
        self._own = own
        return torch.cat([computed, self._others])

    def skip(self) -> None:
        """See `Strategy`. A step that changes no weight tells ranks that have no gradient yet."""
        self._commit()

    def close(self) -> bool:
        """End the run. Return False if ranks died or joined, and this one may be the writer now.

        Other ranks wait here for the writer.
        """
        if not self._is_closed:
            self._here.patience_s = DEADLINE_S
            zeros = torch.zeros_like(self._weights), torch.zeros_like(self._numbers)
            try:
                self._exchange_all(lambda _: zeros)
            except Regrouped:
                return False
            self._commit()
            self._is_closed = True
        for _ in self._here.steps(self._here.step):
            raise AssertionError("all steps are made")
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what a newcomer gets, besides the state of the loop."""
        return {"is_closed": self._is_closed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of another rank."""
        self._is_closed = state["is_closed"]


class _Committed(Optimizer):
    """A rank's optimizer. To the loop its step is a commit, and to the trainer an update."""

    def __init__(self, adamw: VectorAdamW, commit: Callable[[], None]) -> None:
        self._adamw, self._commit = adamw, commit
        self._rate: float | None = None

    def clip(self, norm: float, clip_norm: float | None) -> float:
        return self._adamw.clip(norm, clip_norm)

    def step(self, rate: float | None = None) -> None:
        if rate is not None:
            self._rate = rate
            self._commit()  # which calls this function, without a rate
            self._rate = None
        elif self._rate is not None:
            self._adamw.step(self._rate)

    def moment(self, kind: str, parameter: nn.Parameter) -> Tensor:
        return self._adamw.moment(kind, parameter)

    def restore(self, count: int, moments: Moments) -> None:
        self._adamw.restore(count, moments)

    def state_dict(self) -> dict[str, Any]:
        return self._adamw.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._adamw.load_state_dict(state)


Key = tuple[str, str, int | None, int | None]  # a line: its file, what it is, step and shard


class SharedRecord(Record):
    """The record of an elastic run, written by the rank for which `is_writer` returns True.

    What a step adds to it follows from the state after the step. All ranks keep that, so each
    writer hands over all of it again, and lines are left out that are in the files already.
    """

    def share(
        self,
        *,
        is_writer: Callable[[], bool],
        begun: Callable[[], bool],
        refuse: Callable[[str], object],
        since: Callable[[str], str],
    ) -> None:
        """Take what the ranks know of one another.

        `begun` says whether another process has begun the record, and says so to others. It raises
        UsageError if one called `refuse`, with the reason for which it couldn't. `since` returns
        the argument of its first call in all processes.
        """
        self._is_writer, self._is_begun, self._refuse = is_writer, begun, refuse
        self._since_when = since
        self._is_open = self._is_finished = False
        self._last: tuple[Step, Made] | None = None
        self._resume = False
        self._written = set[Key]()  # lines of this run, from the last step on

    @property
    def is_due(self) -> bool:
        """Whether this rank has to end the record and to write the output."""
        return self._is_open and not self._is_finished

    def open(self, *, resume: bool, is_compiled: bool) -> State | None:
        """Return the state to resume from. Files are opened by `begin`.

        A process that starts again, or joins, resumes. Raises UsageError for files of another run.
        """
        self._resume, self._is_compiled = resume, is_compiled
        if not resume:
            writer.require_new(self._folder / LEDGER)
        return self.read(resume=resume)

    def begin(self, state: State) -> None:
        """Begin the record, or continue it, if this rank is the writer now."""
        if not self._is_writer():
            return
        was_open = self._is_open
        if not was_open:
            self._open_files(state.step)
        if self._last is not None:  # of the writer that died, or that others made without this one
            step, result = self._last
            if (METRICS, "step", step.number, None) in self._written:
                self._watch.begin()
            else:
                super().made(step, result)
        if not was_open:
            super().begin(state)

    def _open_files(self, step: int) -> None:
        follows = self._is_begun()
        try:
            self._wait_for_files(resume=self._resume or follows, follows=follows)
        except UsageError as error:
            self._refuse(str(error))
            raise
        # Where this run begins in files that an earlier one may have begun.
        sizes = {name: (self._folder / name).stat().st_size for name in (LEDGER, METRICS)}
        text = self._since_when(json.dumps({"resumed": self._resumed, **sizes}))
        since = json_text.load(text)
        self._resumed = since["resumed"]
        self._written = {
            key
            for name in sizes
            for key in _keys(self._folder / name, since[name])
            if key[2] is None or key[2] >= step - 1  # of the last step, and later ones
        }
        if self._standing.end is None:  # lines follow it
            self._written.discard(_END)
        self._is_open = True

    def _wait_for_files(self, *, resume: bool, follows: bool) -> None:
        end = time.monotonic() + _LOCK_S
        while True:
            try:
                super().open(resume=resume, is_compiled=self._is_compiled)
                return
            except UsageError as error:  # its last writer may still be ending
                self.close()
                if not follows or isinstance(error, TraceError) or time.monotonic() > end:
                    raise
            time.sleep(_POLL_S)

    def _is_new(self, key: Key) -> bool:
        """Return whether the line was not written, and note that it is now."""
        is_new = key not in self._written
        self._written.add(key)
        return is_new

    def _write(self, *events: Event) -> None:
        # Each process that writes says that it has started.
        of_process = (Attempt, Start)
        new = [one for one in events if isinstance(one, of_process) or self._is_new(_key(one))]
        super()._write(*new)
        if new and not isinstance(new[-1], End):
            # One that is in the file is not its last line any more.
            self._written.discard(_END)
            self._standing = replace(self._standing, end=None)

    def tell(self, happening: Happening) -> None:
        if self._is_open and self._is_new(
            (METRICS, metrics.kind_of(happening), happening.step, None)
        ):
            super().tell(happening)

    def made(self, step: Step, result: Made) -> None:
        """Record a step, unless it is recorded."""
        self._last = step, result
        self._written = {key for key in self._written if key[2] is None or key[2] >= step.number}
        if self._is_open:
            super().made(step, result)

    def lacks_scores(self, step: int) -> bool:
        key = METRICS, "evaluation", step, None
        return self._is_open and step > self._resumed and key not in self._written

    def save(self, state: State) -> None:
        if self._is_open:
            super().save(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the last step, which another rank may have to write."""
        if self._last is None:
            return {}
        step, result = self._last
        spike = () if result.spike is None else (result.spike,)
        own = {"spike": ledger.dump_events(spike).decode(), "memory": [*result.memory]}
        shards = [[*map(int, ids)] for ids in step.shards]
        return {"step": {**vars(step), "shards": shards}, "made": {**vars(result), **own}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the last step of another rank."""
        self._last = None
        if not state:
            return
        step, result = state["step"], state["made"]
        spikes = cast("list[Spike]", ledger.load_events(result["spike"].encode()))
        own = {"spike": spikes[0] if spikes else None, "memory": Memory(*result["memory"])}
        self._last = (
            Step(**{**step, "shards": (*map(tuple, step["shards"]),)}),
            Made(**result | own),
        )

    @property
    def _is_over(self) -> bool:
        """True if a writer that died has recorded the end."""
        return super()._is_over or _END in self._written

    def finish(self, *arguments: Any, **more: Any) -> None:
        if self._is_open:
            super().finish(*arguments, **more)

    def written(self) -> None:
        """Note that the output is written."""
        self._is_finished = True


def _key(event: Event) -> Key:
    step, shard = getattr(event, "step", None), getattr(event, "shard", None)
    return LEDGER, event.kind, step, shard


_END = _key(End(status=""))


def _keys(path: Path, start: int) -> Iterator[Key]:
    """Yield the keys of the lines in the ledger or the metrics at `path`, from byte `start` on."""
    with files.open_file(path) as file:
        file.seek(start)
        for line in files.lines(file):
            with suppress(ValueError, LookupError, TypeError):  # cut, or not ours
                entry = json_text.load(line)
                kind = entry["kind" if path.name == LEDGER else "what"]
                numbers = entry.get("step"), entry.get("shard")
                if isinstance(kind, str) and all(isinstance(one, int | None) for one in numbers):
                    yield path.name, kind, *numbers
