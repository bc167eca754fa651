"""A fine-tuning run as the coordinator serves it: evaluated on the way, exported at the end.

Validation rows are scored in a thread of the coordinator, and no worker waits for that. The thread
gets copies of a step's tensors, and its results are reported with a later step, or at the end.
"""

from __future__ import annotations

import math
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from entrenar_py.shared.errors import SystemFailure
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.shared.untrusted import escaping, printing
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.finetune import outputs, page
from entrenar_py.train.finetune.page import Outcome
from entrenar_py.train.model import evaluation, preparation
from entrenar_py.train.model.evaluation import Scores
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.workload import Tuned
from entrenar_py.train.service import coordinator, measures
from entrenar_py.train.service.coordinator import Ended, Listening, Task
from entrenar_py.train.service.measures import Memory
from entrenar_py.train.service.run_events import ClassScored, Listener, Noted, Scored

# Bytes of copies that may wait to be scored. That is room for many adapters; one copy is always
# allowed.
WAITING_BYTES = 2**30
# What torch raises if memory runs out (also on the CPU), or if a device fails.
_FAILED = (RuntimeError, MemoryError, SystemFailure)  # the last one if nothing can be written
# Scores, and the error if the state that they belong to could not be kept.
_Result: TypeAlias = tuple[Scores, Exception | None]


class Evaluator:
    """Scores a run's model every `evaluate_every` steps, and at its end.

    It puts the trained tensors into the workload's module, which nothing else may use before
    `settle` or `close` has returned. Without validation rows it does nothing.
    """

    def __init__(
        self, prepared: Prepared, workload: Tuned, *, device: torch.device, plan: TrainingPlan
    ) -> None:
        """Evaluate on `device`; the run has the given plan."""
        self._prepared, self._module, self._device = prepared, workload.module, device
        self._num_steps, self._keeper = plan.num_steps, _Keeper(prepared, workload.module, plan)
        self._every = prepared.settings.evaluate_every
        self._thread = ThreadPoolExecutor(1, "evaluation")
        self._waiting: deque[tuple[int, int, Future[_Result]]] = deque()  # step, bytes, scores
        self._is_stopped, self._is_first = False, True

    def stepped(
        self, step: int, present: Callable[[], Mapping[str, Array]], tell: Listener
    ) -> None:
        """Report finished scores to `tell`, and start to score the `present` tensors if due.

        `present` returns the tensors after `step` steps, which are copied. If the copies that
        already wait have more than WAITING_BYTES, the evaluation is skipped, which is reported. The
        state with which a resumed run begins is scored only if the run was stopped before it was.
        """
        self._tell(tell, wait=False)
        rows, is_first, self._is_first = self._prepared.validation, self._is_first, False
        if rows is None or step % self._every or step == self._num_steps:
            return
        if is_first and self._was_scored(step, rows):
            return
        tensors = present()
        size = sum(array.nbytes for array in tensors.values())
        if self._waiting and size + sum(held for _, held, _ in self._waiting) > WAITING_BYTES:
            text = f"validation after step {step} is skipped: the previous one is still running"
            tell(Noted(what="not_scored", step=step, text=f"{text}; raise evaluate_every"))
            return
        copies = {name: array.copy() for name, array in tensors.items()}
        self._waiting.append((step, size, self._thread.submit(self._kept, step, rows, copies)))

    def settle(self, tell: Listener) -> None:
        """Wait until everything is scored, and report it to `tell`. Then the module is free."""
        self._tell(tell, wait=True)

    def finish(self, step: int, tensors: Mapping[str, Array], tell: Listener) -> Scores | None:
        """Score the result of the run, and report it; return None if there are no validation rows.

        If the GPU has too little memory, the CPU is used. If scoring fails, it is skipped, which is
        reported, and None is returned, since the run itself is over. A state that can't be kept is
        reported, too.
        """
        rows = self._prepared.validation
        if rows is None:
            return None
        try:
            scores = self._scores_somewhere(rows, tensors)
        except _FAILED as error:
            tell(_left_out(step, error))
            return None
        self._report(step, (scores, self._unkept(step, scores, tensors)), tell)
        return scores

    def close(self, tell: Listener = lambda _: None) -> None:
        """Abandon what is not scored yet, and report that to `tell`."""
        self._is_stopped = True
        self._thread.shutdown()
        self._tell(tell, wait=True)

    def _was_scored(self, step: int, rows: Samples) -> bool:
        path = self._prepared.settings.output / METRICS
        try:
            history = page.read_history(path, num_steps=self._num_steps)
        except OSError:
            return False
        if step not in history.evaluations:
            return False
        noted = history.evaluations[step].get("rows")
        return noted in (None, rows.digest)  # older releases noted no rows

    def _tell(self, tell: Listener, *, wait: bool) -> None:
        while self._waiting and (wait or self._waiting[0][2].done()):
            step, _, future = self._waiting.popleft()
            try:
                scored = future.result()
            except _FAILED as error:
                tell(_left_out(step, error))
            else:
                self._report(step, scored, tell)

    def _report(self, step: int, scored: _Result, tell: Listener) -> None:
        scores, unkept = scored
        rows = self._prepared.validation
        tell(event(scores, step, None if rows is None else rows.digest))
        if unkept is not None:
            text = f"the state after step {step} is not kept: {_reason(unkept)}"
            tell(Noted(what="not_kept", step=step, text=text))

    def _kept(self, step: int, rows: Samples, tensors: Mapping[str, Array]) -> _Result:
        scores = self._scores(rows, tensors)
        return scores, self._unkept(step, scores, tensors)

    def _unkept(self, step: int, scores: Scores, tensors: Mapping[str, Array]) -> Exception | None:
        """Keep the state, if it is due; return the error if it can't be written."""
        try:
            self._keeper.keep(step, scores.loss, tensors)
        except _FAILED as error:
            return error
        return None

    def _scores(self, rows: Samples, tensors: Mapping[str, Array]) -> Scores:
        self._require_running()
        return evaluation.scores(
            self._put(tensors),
            rows,
            settings=self._prepared.settings,
            pad_token=self._prepared.pad_token,
            go_on=self._require_running,
        )

    def _scores_somewhere(self, rows: Samples, tensors: Mapping[str, Array]) -> Scores:
        try:
            return self._scores(rows, tensors)
        except torch.OutOfMemoryError:  # only GPUs raise this
            self._device = torch.device("cpu")
        return self._scores(rows, tensors)

    def _put(self, tensors: Mapping[str, Array]) -> nn.Module:
        module = self._module.to(self._device)
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, array in tensors.items():
                parameters[name].copy_(torch.from_numpy(array))
        return module

    def _require_running(self) -> None:
        if self._is_stopped:
            raise SystemFailure("the run ended before")


class _Keeper:
    """Keeps the best adapters, and the last ones, as the settings say.

    A resumed run continues from the best loss that an earlier part of the same plan noted, if that
    is a loss of the same rows. If it evaluates a step again, that step has the same bits.
    """

    def __init__(self, prepared: Prepared, module: nn.Module, plan: TrainingPlan) -> None:
        self._prepared, self._module, self._plan = prepared, module, plan
        self._output = prepared.settings.output
        rows = prepared.validation
        self._rows = None if rows is None else rows.digest
        best = outputs.Kept.of(self._output / BEST)
        # Earlier releases noted the digest of the whole plan.
        self._runs = (plan.run_digest, plan.digest)
        is_own = best is not None and best.run in self._runs and best.rows in (None, self._rows)
        self._least = best.loss if best is not None and is_own else math.inf

    def keep(self, step: int, loss: float, tensors: Mapping[str, Array]) -> None:
        """Keep the state after `step`, and remove the oldest one if there are more than configured.

        Raises SystemFailure if it can't be written.
        """
        chosen = self._prepared.settings.keep
        if chosen.last:
            self._write(self._output / f"step-{step}", step, loss, tensors)
            kept = [(outputs.Kept.of(path), path) for path in self._output.glob("step-*")]
            own = [(one.step, path) for one, path in kept if one and one.run in self._runs]
            for _, path in sorted(own)[: -chosen.last]:
                shutil.rmtree(path, ignore_errors=True)
        if chosen.best and loss < self._least:
            self._write(self._output / BEST, step, loss, tensors)
            self._least = loss

    def _write(self, folder: Path, step: int, loss: float, tensors: Mapping[str, Array]) -> None:
        kept = outputs.Kept(self._plan.run_digest, step, loss, self._rows)
        digest = preparation.model_digest(self._plan)
        outputs.keep(folder, self._prepared, self._module, tensors, kept, model_digest=digest)


def _left_out(step: int, error: Exception) -> Noted:
    text = f"validation after step {step} is skipped: it failed ({_reason(error)})"
    return Noted(what="not_scored", step=step, text=text)


def _reason(error: Exception) -> str:
    return escaping.shortened(" ".join(str(error).split()))


def event(scores: Scores, step: int, rows: str | None) -> Scored:
    """Return `scores` after `step` steps as an event for the run's listeners.

    `rows` is the digest of the rows that were scored.
    """
    classes = tuple(
        ClassScored(
            label=label,
            recall=_known(scores.recall(number)),
            precision=_known(scores.precision(number)),
            f1=_known(scores.f1(number)),
        )
        for number, label in enumerate(scores.labels)
    )
    return Scored(
        step=step,
        loss=scores.loss,
        weight=scores.weight,
        perplexity=_known(scores.perplexity) if scores.are_of_tokens else None,
        accuracy=_known(scores.accuracy),
        margin=scores.margin,
        classes=classes,
        confusion=tuple(map(tuple, scores.confusion.tolist())),
        rows=rows,
    )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


BEST = "best"  # a folder in the output folder
CHECKPOINT, LEDGER, METRICS = (
    "state.checkpoint",
    preparation.LEDGER,
    "metrics.jsonl",
)  # in the output folder
GRACE_S = 10.0  # for the step in progress, which may wait for a teacher's shard for hours


@contextmanager
def opened(
    prepared: Prepared,
    workload: Tuned,
    *,
    plan: TrainingPlan,
    device: torch.device,
    listening: Listening = coordinator.ignore,
    memory: Callable[[], Memory] = measures.memory_peak,
    halt_on_spike: bool = False,
    tensorboard: Path | None = None,
) -> Iterator[Task]:
    """Yield the task of the run `plan`; validation rows are scored on `device`.

    The other arguments are as in `Task`.
    """
    evaluator = Evaluator(prepared, workload, device=device, plan=plan)
    with closing(evaluator):
        yield Task(
            workload=workload,
            listening=listening,
            memory=memory,
            stepped=evaluator.stepped,
            complete=partial(_export, prepared, workload, evaluator, plan),
            ended=partial(_end, prepared, evaluator, plan),
            halt_on_spike=halt_on_spike,
            tensorboard=tensorboard,
            grace_s=GRACE_S if prepared.settings.distill else None,
        )


def _export(
    prepared: Prepared,
    workload: Tuned,
    evaluator: Evaluator,
    plan: TrainingPlan,
    tensors: Mapping[str, Array],
    tell: Listener,
) -> None:
    evaluator.settle(tell)
    digest = preparation.model_digest(plan)
    output = outputs.write(prepared, workload, tensors, model_digest=digest)
    printing.say(f"written to {output}")


def _end(prepared: Prepared, evaluator: Evaluator, plan: TrainingPlan, ended: Ended) -> None:
    if ended.finish.status == "completed":
        scores = evaluator.finish(ended.made, ended.tensors, ended.tell)
        for line in () if scores is None else scores.lines():
            printing.say(f"validation: {line}")
    evaluator.close(ended.tell)
    draw(prepared, plan.num_steps, ended)


def draw(prepared: Prepared, num_steps: int, ended: Ended) -> None:
    """Write the page of a run. Only warns if that is impossible, since the run itself is over."""
    output, rows = prepared.settings.output, prepared.validation
    outcome = Outcome(
        status=ended.finish.status,
        reason=ended.finish.reason,
        made=ended.made,
        num_steps=num_steps,
        num_rows=(len(prepared.train), 0 if rows is None else len(rows)),
        ledger=ended.ledger,
        digest=ended.digest,
    )
    path = output / page.FILE
    try:
        told = page.read_history(output / METRICS, num_steps=num_steps)
        path.write_text(page.render(prepared.settings, outcome, told), encoding="utf-8")
    except OSError as error:
        printing.warn(f"entrenar: {path}: can't be written ({error.strerror or error})")
        return
    printing.say(f"drawn in {path}")
