"""Elastic training: ranks may die and join in the middle of a run, and the weights don't change.

Importing this module doesn't import torch. Calling its function does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from entrenar_py.train.elastic.trainer import ElasticTrainer


def elastic(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    micro_batches: int,
    schedulers: Sequence[Any] = (),
    state: Sequence[Any] = (),
    first_step: int = 0,
    seed: int = 0,
    deadline_s: float = 60.0,
    audit: float = 0.0,
) -> ElasticTrainer:
    """Train `model` with the same bits on any number of ranks, while ranks die and join.

    Call it once, on all ranks, with a model that is not wrapped:

        trainer = entrenar_py.elastic(model, optimizer, micro_batches=8)
        for step in trainer.steps(total):
            for inputs, targets in trainer.fold(batches(step)):
                loss_fn(model(inputs), targets).backward()  # the micro-batch's mean, not divided
            trainer.commit()

    `batches(step)` is a sequence of the step's `micro_batches` micro-batches, the same on all
    ranks. A rank reads only its own items. `commit` makes the optimizer's step with the mean of all
    micro-batches, and then a step of each of `schedulers`. If a rank died during the step, nobody
    commits: the ranks that are left form a new group, and `steps` yields the same step again.

    A rank that starts or joins gets the model, the optimizer, `schedulers` and `state` from a rank
    that trains. `state` are other objects with `state_dict` and `load_state_dict`, which may change
    only after a `commit` that returned True. A run that continues from a checkpoint passes its
    number of committed steps as `first_step`.

    Before a micro-batch is read, torch's generators are seeded from `seed`, the step and the
    micro-batch's index. So dropout doesn't depend on which rank computes it. They are also seeded
    before `steps` yields and when `fold` ends, alike on all ranks.

    A rank that doesn't arrive within `deadline_s` seconds of another one is given up. Ranks that
    end are noticed at once if `entrenar_py.supervise` starts them, which also starts new ones:

        torchrun --nproc_per_node=4 -m entrenar_py.supervise train.py

    With `audit`, this share of all micro-batches (0.01: one of a hundred) is computed by a second
    rank, too, and a step is committed only if both got the same bits. A rank that computes wrong
    bits ends with ConvictedError. `fold` yields what a rank audits after its own micro-batches.

    Raises UsageError if `micro_batches` is not a power of two or is smaller than the number of
    ranks, if the model is on several devices or has parts that depend on the number of ranks, if
    the optimizer trains what is not the model's, or if `require_deterministic` would raise.
    """
    from entrenar_py.train.elastic.trainer import ElasticTrainer

    return ElasticTrainer(
        model,
        optimizer,
        micro_batches=micro_batches,
        schedulers=schedulers,
        state=state,
        first_step=first_step,
        seed=seed,
        deadline_s=deadline_s,
        audit=audit,
    )
