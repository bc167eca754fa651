"""The line that a user adds to a training script: `obs = entrenar_py.observe(model, optimizer)`.

Inert unless the harness listens, or it is told to watch: then nothing but this file is imported,
and no hook is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entrenar_py.errors import UsageError, WatchFinding

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from entrenar_py.watch.judge import Watched
    from entrenar_py.watch.watch import Watch

# Where the harness wants to find what is recorded; nobody listens where it is not set.
FOLDER = "ENTRENAR_TRACE_DIR"
FAULTS = "ENTRENAR_FAULTS"  # what is to go wrong, as a JSON list
PATIENCE = 100  # steps in which a tensor that should move has to, where nobody says another number


class Observation:
    """What a script may tell of itself that no hook can see. This one listens to nothing.

    `watch` is what watches the training, if anything does.
    """

    watch: Watch | None = None

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

    def skipped(self) -> None:
        """Tell that no rank steps, since a gradient is not finite; called on every rank.

        Needed where a rank holds pieces of the gradients (`fully_shard`) and the script, or its
        `GradScaler`, skips the step because of another rank's. Call it where the optimizer would
        have stepped, before the next backward pass. A rank that holds whole gradients sees it.
        """

    def halted(
        self,
        reason: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        micro_batch: int | None = None,
        tensor: str | None = None,
        ids: Iterable[int] = (),
    ) -> None:
        """Training stops on purpose before the update of `step`, by something not finite.

        Without `step`, that is this one. It was found in micro-batch `micro_batch` (from 0) of rank
        `rank`, in the gradient of `tensor` or, without one, in the loss; its samples are `ids`.
        """

    def synchronised(
        self, optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor]
    ) -> None:
        """Ranks that step alone were just brought together; each goes on with the same model.

        `optimizer` is the outer one, which moves `weights`, by the names of the parameters.
        """

    def watched(self) -> tuple[Watched, ...]:
        """Of each clause that is watched (`every=`) how often it was looked at, and what of it is
        not: `clause`, `check`, `steps`, `comparisons`, `note`. Empty where nothing is watched.
        """
        return () if self.watch is None else self.watch.watched()

    def close(self) -> None:
        """Training is over: what comes after it is not part of it. At the process's end at last.

        Raises WatchFinding if the last step that was watched broke a clause.
        """
        if self.watch is not None:
            self.watch.close()


def observe(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    sampler: Any = None,
    scheduler: Any = None,
    step: int = 0,
    layout: Mapping[str, int] | DeviceMesh | None = None,
    tied: Iterable[Iterable[str]] = (),
    every: int | None = None,
    contract: str | Path | None = None,
    on_finding: Callable[[WatchFinding], None] | None = None,
    patience: int = PATIENCE,
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

    With `every` the training is watched, harness or not: after each `every`-th step all ranks hold
    the same weights (F-DP-001), these are finite (F-DP-003), and what has a gradient and a learning
    rate moves within `patience` steps (F-TI-004). `contract` (a file, or the name of a shipped one)
    leaves those of the three that stand in it. What breaks one raises WatchFinding, on all ranks,
    out of `optimizer.step()`; or it is given to `on_finding`, and training goes on. On GPUs that is
    in the next step that is watched. All ranks must make the same steps, and give the same.
    """
    if every is None and (contract, on_finding, patience) != (None, None, PATIENCE):
        raise UsageError("contract=, on_finding=, patience= are of the watch: give every=, too")
    observation = Observation()
    if FOLDER in os.environ:
        from entrenar_py.observing.observer import Observer

        observation = Observer(
            model,
            optimizer,
            sampler=sampler,
            scheduler=scheduler,
            step=step,
            layout=layout,
            tied=tied,
        )
    if every is not None:
        if isinstance(optimizer, Iterable):
            raise UsageError("every=: the watch follows one optimizer; give it, and not several")
        if layout is not None or tied:
            raise UsageError(
                "every= with layout= or tied=: the watch knows pieces by their DTensors alone, and "
                "would take others for copies; leave one of them out"
            )
        from entrenar_py.observing import arguments, tensors
        from entrenar_py.watch.watch import Watch

        (stepped,) = arguments.optimizers(model, optimizer)
        arguments.require_callable("on_finding", on_finding)
        observation.watch = Watch(
            tensors.unwrapped(model),
            stepped,
            every=arguments.steps("every", every, least=1),
            contract=contract,
            on_finding=on_finding,
            patience=arguments.steps("patience", patience, least=1),
            step=arguments.steps("step", step, least=0),
        )
    return observation
