"""A fine-tuning as the coordinator serves it: evaluated on the way, exported at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch

from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.finetune import export, history, page
from entrenar_py.train.finetune.evaluator import Evaluator
from entrenar_py.train.finetune.page import Outcome
from entrenar_py.train.model import prepared as preparing
from entrenar_py.train.model.prepared import Prepared
from entrenar_py.train.model.workload import Tuned
from entrenar_py.train.service import coordinator, measures
from entrenar_py.train.service.coordinator import Ended, Listening, Task
from entrenar_py.train.service.measures import Memory
from entrenar_py.train.service.run_events import Listener

CHECKPOINT, LEDGER, METRICS = "state.checkpoint", preparing.LEDGER, "metrics.jsonl"  # in the output
GRACE_S = 10.0  # for a step that may wait for a teacher's shard, which may take hours


@contextmanager
def opened(
    prepared: Prepared,
    workload: Tuned,
    *,
    scenario: Scenario,
    device: torch.device,
    listening: Listening = coordinator.ignore,
    memory: Callable[[], Memory] = measures.memory_peak,
    halt_on_spike: bool = False,
    tensorboard: Path | None = None,
) -> Iterator[Task]:
    """Yield the task of the run `scenario`; validation rows are scored on `device`.

    The other arguments are those of `Task`.
    """
    evaluator = Evaluator(prepared, workload, device=device, num_steps=scenario.num_steps)
    with closing(evaluator):
        yield Task(
            workload=workload,
            listening=listening,
            memory=memory,
            stepped=evaluator.stepped,
            complete=partial(_export, prepared, workload, evaluator, scenario),
            ended=partial(_end, prepared, evaluator, scenario),
            halt_on_spike=halt_on_spike,
            tensorboard=tensorboard,
            grace_s=GRACE_S if prepared.settings.distill else None,
        )


def _export(
    prepared: Prepared,
    workload: Tuned,
    evaluator: Evaluator,
    scenario: Scenario,
    tensors: Mapping[str, Array],
    tell: Listener,
) -> None:
    """Write what was trained, and read it back by stock libraries."""
    evaluator.settle(tell)
    digest = preparing.model_digest(scenario)
    output = export.write(prepared, workload, tensors, model_digest=digest)
    printing.say(f"written to {output}")


def _end(prepared: Prepared, evaluator: Evaluator, scenario: Scenario, ended: Ended) -> None:
    """Tell how a run that is complete does on the validation rows, and draw it."""
    if ended.finish.status == "completed":
        scores = evaluator.finish(ended.made, ended.tensors, ended.tell)
        for line in () if scores is None else scores.lines():
            printing.say(f"validation: {line}")
    evaluator.close()
    draw(prepared, scenario.num_steps, ended)


def draw(prepared: Prepared, num_steps: int, ended: Ended) -> None:
    """Write the page of a run; warn if that can't be done, since the run itself is over."""
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
        told = history.read(output / METRICS, num_steps=num_steps)
        path.write_text(page.render(prepared.settings, outcome, told), encoding="utf-8")
    except OSError as error:
        printing.warn(f"entrenar: {path}: can't be written ({error.strerror or error})")
        return
    printing.say(f"drawn in {path}")
