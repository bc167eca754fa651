"""A fine-tuning as the coordinator serves it: evaluated on the way, exported at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from entrenar_py.finetune import export
from entrenar_py.finetune.evaluator import Evaluator
from entrenar_py.service import memory_peak
from entrenar_py.service.address import Address
from entrenar_py.service.coordinator import Ended, Task
from entrenar_py.service.memory_peak import Memory
from entrenar_py.tuning.prepared import Prepared
from entrenar_py.tuning.workload import Finetuning
from entrenar_py.untrusted import printing


@contextmanager
def opened(
    prepared: Prepared,
    workload: Finetuning,
    *,
    num_steps: int,
    device: torch.device,
    listening: Callable[[Address], None] = lambda _: None,
    memory: Callable[[], Memory] = memory_peak.here,
    halt_on_spike: bool = False,
) -> Iterator[Task]:
    """Yield the task of a run of `num_steps`; validation rows are scored on `device`.

    The other arguments are those of `Task`.
    """
    with ExitStack() as stack:
        evaluator = Evaluator(prepared, workload, device=device, num_steps=num_steps)
        stack.callback(evaluator.close)
        yield Task(
            workload=workload,
            listening=listening,
            memory=memory,
            stepped=evaluator.stepped,
            ended=partial(_end, prepared, workload, evaluator),
            halt_on_spike=halt_on_spike,
        )


def _end(prepared: Prepared, workload: Finetuning, evaluator: Evaluator, ended: Ended) -> None:
    """Export a run that is complete, and tell how it does on the validation rows."""
    if ended.finish.status != "completed":
        evaluator.close()
        return
    evaluator.settle(ended.tell)
    printing.say(f"written to {export.write(prepared, workload, ended.tensors)}")
    scores = evaluator.finish(ended.made, ended.tensors, ended.tell)
    for line in () if scores is None else scores.lines():
        printing.say(f"validation: {line}")
