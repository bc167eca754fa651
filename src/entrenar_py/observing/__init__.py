"""The line that a user adds to a training script: `obs = entrenar_py.observe(model, optimizer)`.

Inert unless the harness listens: then nothing but this file is imported, and no hook is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

# Where the harness wants to find what is recorded; nobody listens where it is not set.
FOLDER = "ENTRENAR_TRACE_DIR"
FAULTS = "ENTRENAR_FAULTS"  # what is to go wrong, as a JSON list


class Observation:
    """What a script may tell of itself that no hook can see. This one listens to nothing."""

    def samples(self, ids: Iterable[int], *, epoch: int | None = None) -> None:
        """The ids of the samples of the next backward pass, where no sampler tells them.

        An id is a sample's place in the data set, from 0; `epoch` counts from 0, and is that of
        the samples before where it is left out.
        """

    def loss(self, value: float | torch.Tensor, weight: float) -> None:
        """The mean loss of a micro-batch, over `weight` samples or tokens; once a backward pass."""

    def reduced(self) -> None:
        """The gradients are those of the whole batch now, and not clipped yet; once a step.

        Left out, the gradients are recorded as the optimizer finds them.
        """

    def halted(
        self,
        reason: str,
        *,
        rank: int | None = None,
        micro_batch: int | None = None,
        tensor: str | None = None,
        ids: Iterable[int] = (),
    ) -> None:
        """Training stops on purpose before the update of this step, by something not finite.

        It was found in micro-batch `micro_batch` (from 0, of this step) of rank `rank`, in the
        gradient of `tensor` or, without one, in the loss; its samples are `ids`.
        """

    def close(self) -> None:
        """Training is over: what comes after it is not part of it. At the process's end at last."""


def observe(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    sampler: Any = None,
    scheduler: Any = None,
    step: int = 0,
    layout: Mapping[str, int] | DeviceMesh | None = None,
    tied: Iterable[Iterable[str]] = (),
) -> Observation:
    """Records what `optimizer` makes of `model` from here on, by torch's own hooks.

    `model` may be wrapped already, or be wrapped later, in `DistributedDataParallel` or by
    `fully_shard`; of several optimizers a step is over when all have made theirs. `sampler` is what
    draws the samples: the `DataLoader`, a batch sampler or a sampler. `scheduler` is
    the schedule of the learning rate: recorded is where it stands at the start. `step` is the
    number of optimizer steps that were made before, for a script that goes on from a checkpoint.

    `layout` are the axes along which the ranks are arranged, and their sizes, row-major: `{"dp": 2,
    "tp": 2}`, or the mesh. Along dp, dp_replicate, dp_shard and fsdp each rank draws samples of its
    own, along tp, sp, pp, cp and ep all draw the same. It is needed where parameters are no
    DTensors, or their meshes have other names. `tied` names tensors that are copies of one another
    on several ranks: `(("embedding.weight", "head.weight"),)`. UsageError for what can't be.
    """
    if FOLDER not in os.environ:
        return Observation()
    from entrenar_py.observing.observer import Observer

    return Observer(
        model,
        optimizer,
        sampler=sampler,
        scheduler=scheduler,
        step=step,
        layout=layout,
        tied=tied,
    )
