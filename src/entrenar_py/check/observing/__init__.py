"""The line that a user adds to a training script: `obs = entrenar_py.observe(model, optimizer)`.

It sets no hook and imports no other module of `observing`, unless entrenar-check runs the script or
`every=` starts a watch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entrenar_py.shared.errors import UsageError, WatchFinding

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from entrenar_py.check.watch.judge import Watched
    from entrenar_py.check.watch.watch import Watch

# The folder to which ranks record. The harness sets the variable. Without it nothing is recorded.
FOLDER = "ENTRENAR_TRACE_DIR"
COPY = "root"  # a file in that folder: the root below which the copy of the user's folder lies
# BATCHES_KEPT, or the folder of an earlier run with batches for this run.
BATCHES, BATCHES_KEPT = "ENTRENAR_BATCHES", "keep"
FAULTS = "ENTRENAR_FAULTS"  # the faults to plant, as a JSON list
RATES = "ENTRENAR_RATES"  # a file with the learning rate to use in each step
TOKENS = "ENTRENAR_TOKENS"  # set if a clause is about what a language model's outputs depend on
# The step before which the process is ended, as if the job was cut off: `6`, or `6 from 3`.
STOP = "ENTRENAR_STOP"
# Set by `entrenar-check anatomy`: ranks write down their calls, and `observe` records nothing.
ANATOMY = "ENTRENAR_ANATOMY"
PATIENCE = 100  # default number of steps within which a tensor has to move


class Observation:
    """The result of `observe`: receives reports of facts that no hook sees.

    This class ignores them.

    `watch` is the watch of the training run, or None if `every=` was not given.
    """

    watch: Watch | None = None

    def samples(
        self, ids: Iterable[int], *, epoch: int | None = None, replacement: bool = False
    ) -> None:
        """Report the samples of the next backward pass by their ids.

        An id is the index of a sample in the data set, from 0. `epoch` counts from 0; its default
        is the epoch of the previous samples. If the script never gives it, epochs are assumed to be
        complete. `replacement` says that samples may be drawn again within an epoch. Reported
        samples replace those that were seen when a sampler drew them.
        """

    def loss(self, value: float | torch.Tensor, weight: float) -> None:
        """Report the mean loss of a micro-batch, over `weight` samples or tokens.

        Call it once for each backward pass, before or after that pass. If `value` is the tensor on
        which `backward` is called, and is reported before the pass, the micro-batch's part of the
        gradient is judged, too.
        """

    def reduced(self) -> None:
        """Report that the gradients are now those of the whole batch, and not clipped yet.

        Call it once per step, before the script changes gradients on purpose. If it is not called,
        gradients are recorded in the state in which the optimizer receives them.
        """

    def skipped(self) -> None:
        """Report, on every rank, that all ranks skip this step because a gradient is not finite.

        The call is needed if each rank holds only pieces of the gradients (`fully_shard`), and the
        script or its `GradScaler` skips the step because of a piece on a different rank, which this
        rank can't see. Call it where the optimizer would have stepped, before the next backward
        pass.
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
        """Report that training stops on purpose, before the update of `step`, at a NaN or infinity.

        The default of `step` is the current step. The NaN or infinity was detected in micro-batch
        `micro_batch` of rank `rank`, which has the samples `ids`. It was in the gradient of
        `tensor`, or in the loss if `tensor` is None.
        """

    def synchronised(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
        *,
        inner_steps: int | None = None,
    ) -> None:
        """Report that ranks that train independently (local SGD) just got the same weights.

        `weights` are the tensors that the outer `optimizer` updates, by parameter name. Leave both
        out if the weights are simply averaged. `inner_steps` is the number of steps of a round. By
        default it is derived from the steps between these calls.

        Raises UsageError if only one of `optimizer` and `weights` is given.
        """

    def watched(self) -> tuple[Watched, ...]:
        """Return for each watched clause (`every=`) how often it was checked.

        Each entry has `clause`, `check`, `steps`, `comparisons`, and a `note` on what is not
        checked. There are no entries if nothing is watched.
        """
        return () if self.watch is None else self.watch.watched()

    def close(self) -> None:
        """Report that training is over. The end of the process reports this as well.

        Raises WatchFinding if the last watched step broke a clause.
        """
        if self.watch is not None:
            self.watch.close()


def observe(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    sampler: Any = None,
    dataset: Any = None,
    scheduler: Any = None,
    step: int = 0,
    layout: Mapping[str, int] | DeviceMesh | None = None,
    tied: Iterable[Iterable[str]] = (),
    frozen: Iterable[str] | None = None,
    synchronised_buffers: Iterable[str] = (),
    averages: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    reduce_dtype: torch.dtype | None = None,
    loss_over: str | None = None,
    every: int | None = None,
    contract: str | Path | None = None,
    on_finding: Callable[[WatchFinding], None] | None = None,
    patience: int = PATIENCE,
) -> Observation:
    """Record how `optimizer` trains `model` from here on, if entrenar-check runs the script.

    - `model`: the model itself, or the model wrapped in `DistributedDataParallel` or by
      `fully_shard`. It may also be wrapped later.
    - `optimizer`: one optimizer, or several. A step is over when all of them have stepped.
    - `sampler`: the `DataLoader`, the batch sampler or the sampler that draws the samples.
    - `dataset`: the data set, a `Subset`, or a number of samples. Every epoch draws each sample.
      Torch's samplers show their data set. With a sampler of your own, or with `obs.samples` alone,
      the data set is a guess unless you give it.
    - `scheduler`: the schedule of the learning rate. Its position at the start is recorded.
    - `step`: the number of optimizer steps already taken, in a script that resumes.
    - `layout`: the axes along which the ranks are arranged, with their sizes, row-major:
      `{"dp": 2, "tp": 2}`, or the `DeviceMesh`. Along dp, dp_replicate, dp_shard and fsdp each rank
      draws its own samples. Along tp, sp, pp, cp and ep all ranks draw the same samples. By default
      the layout is read from the meshes of DTensors. Without these each rank draws its own samples.
    - `tied`: for each tensor with several names, on one rank or on the stages of a pipeline, these
      names: `(("embedding.weight", "head.weight"),)`. Its copies are compared after each step.
    - `frozen`: names or patterns of the parameters that must not change; all others must change.
      The name of a module stands for all parameters in it, and a leading `!` excludes names again:
      `("embedding", "blocks.[01].*")`, `("*", "!*.lora_*")`, or `()` if nothing is frozen.
    - `synchronised_buffers`: names or patterns of the buffers that forward passes change in the
      same way on all ranks, `("*.running_*",)`. Those of SyncBatchNorm need no declaration.
    - `averages`: averages of the weights that the script keeps next to the model, under any names:
      `{"ema": ema}`. Each is a module, a list or dictionary of tensors in the order of the model's
      parameters, or an object that has one of these. Averages that are not given are recognised by
      how they change.
    - `clip_norm`: the L2 norm to which the gradient of all parameters is clipped.
    - `reduce_dtype`: the dtype in which ranks add gradients, such as `torch.bfloat16`. Needed only
      if gradients are rounded to it without the hooks of DistributedDataParallel and the policy of
      `fully_shard`.
    - `loss_over`: "batch" if the loss of a step is that of all its samples, however they are
      divided into ranks and micro-batches. "micro-batch" if each micro-batch of all ranks has its
      own loss (negatives are gathered from all ranks, but not from different micro-batches).

    With `every` the training run is watched, whether entrenar-check runs it or not. Every
    `every`-th step is checked: all ranks hold the same weights (F-DP-001), the weights are finite
    (F-DP-003), and each tensor with a gradient and a learning rate moves within `patience` steps
    (F-TI-004).

    - `contract`: a file, or the name of a shipped contract. Only its clauses with these three
      checks are watched.
    - `on_finding`: called with a WatchFinding for each broken clause; training then continues. By
      default the finding is raised from `optimizer.step()` on all ranks; on GPUs, one watched step
      later.

    All ranks must take the same steps, and watch with the same arguments. Raises UsageError for an
    invalid argument.
    """
    if every is None and (contract, on_finding, patience) != (None, None, PATIENCE):
        raise UsageError(
            "contract=, on_finding= and patience= are arguments of the watch, which "
            "every= starts: give every=, or leave them out"
        )
    observation = Observation()
    if FOLDER in os.environ and ANATOMY not in os.environ:
        from entrenar_py.check.observing.observer import Observer

        observation = Observer(
            model,
            optimizer,
            sampler=sampler,
            dataset=dataset,
            scheduler=scheduler,
            step=step,
            layout=layout,
            tied=tied,
            frozen=frozen,
            synchronised_buffers=synchronised_buffers,
            averages=averages,
            clip_norm=clip_norm,
            reduce_dtype=reduce_dtype,
            loss_over=loss_over,
        )
    if every is not None:
        if isinstance(optimizer, Iterable):
            raise UsageError(
                f"every={every!r} with a list of optimizers: the watch follows one optimizer; give "
                "one, or leave every= out"
            )
        if layout is not None or tied:
            raise UsageError(
                f"every={every!r} with layout= or tied=: the watch recognises only DTensors as "
                "pieces, and would take other pieces for copies; leave every= out, or the others"
            )
        from entrenar_py.check.observing import arguments, tensors
        from entrenar_py.check.watch.watch import Watch

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
    follower = sys.modules.get("entrenar_py.check.observing.auto.follower")
    if follower is not None and follower.CURRENT is not None:  # launched with --auto
        follower.CURRENT.wins(observation)
    return observation
