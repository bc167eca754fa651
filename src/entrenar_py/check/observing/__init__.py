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

# The folder that ranks record to; set by the harness, and nothing is recorded without it.
FOLDER = "ENTRENAR_TRACE_DIR"
COPY = "root"  # in that folder: what the copy of the user's folder lies below, as it does below /
# BATCHES_KEPT, or the folder of another run, with the batches that this one is to be given.
BATCHES, BATCHES_KEPT = "ENTRENAR_BATCHES", "keep"
FAULTS = "ENTRENAR_FAULTS"  # the faults to plant, as a JSON list
RATES = "ENTRENAR_RATES"  # a file with the learning rates to make each step with
TOKENS = "ENTRENAR_TOKENS"  # set if a contract asks what a language model's outputs depend on
# The step before which to end the process, as if the job was cut off: `6`, or `6 from 3`.
STOP = "ENTRENAR_STOP"
PATIENCE = 100  # steps in which a tensor that should move has to move, by default


class Observation:
    """The result of `observe`: takes reports of what no hook sees. This class ignores them.

    `watch` is the watch of the training, None where `every=` was not given.
    """

    watch: Watch | None = None

    def samples(
        self, ids: Iterable[int], *, epoch: int | None = None, replacement: bool = False
    ) -> None:
        """Report the samples of the next backward pass by their ids.

        An id is a sample's index in the data set, from 0. `epoch` counts from 0; by default it is
        that of the previous samples. If the script never says it, epochs are taken to be complete.
        `replacement` says that samples may be drawn again within an epoch. What a script reports
        counts in place of what its sampler draws.
        """

    def loss(self, value: float | torch.Tensor, weight: float) -> None:
        """Report the mean loss of a micro-batch, over `weight` samples or tokens.

        Call it once for each backward pass, before or after that pass. If `value` is the tensor
        that the pass goes through, and is given before, its share of the gradient is judged, too.
        """

    def reduced(self) -> None:
        """Report that the gradients are now those of the whole batch, and not clipped yet.

        Call it once a step, before the script changes gradients on purpose. Without it, they are
        recorded as the optimizer finds them.
        """

    def skipped(self) -> None:
        """Report, on every rank, that all ranks skip this step because a gradient is not finite.

        Needed if a rank holds pieces of the gradients (`fully_shard`) and the script, or its
        `GradScaler`, skips the step because of another rank's piece: a rank sees only its own. Call
        it where the optimizer would have stepped, before the next backward pass.
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

        `step` is the current one by default. The value was found in rank `rank`'s micro-batch
        `micro_batch`, which has the samples `ids`: in the gradient of `tensor`, or in the loss if
        `tensor` is None.
        """

    def synchronised(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
        *,
        inner_steps: int | None = None,
    ) -> None:
        """Report that ranks that train independently (local SGD) were just given the same weights.

        `weights` are the tensors that the outer `optimizer` updates, by parameter name. Leave both
        out if the weights are simply averaged. `inner_steps` is the number of steps of a round; by
        default it is read from the steps between these calls.

        Raises UsageError if only one of `optimizer` and `weights` is given.
        """

    def watched(self) -> tuple[Watched, ...]:
        """Return for each watched clause (`every=`) how often it was checked.

        Each entry has `clause`, `check`, `steps`, `comparisons`, and a `note` on what is not
        checked. There are no entries if nothing is watched.
        """
        return () if self.watch is None else self.watch.watched()

    def close(self) -> None:
        """Report that training is over; the end of the process does so, too.

        Raises WatchFinding if the last step that was watched broke a clause.
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

    - `model`: as it is, or wrapped in `DistributedDataParallel` or by `fully_shard`, now or later.
    - `optimizer`: one, or several; a step is over when all of them have stepped.
    - `sampler`: the `DataLoader`, the batch sampler or the sampler that draws the samples.
    - `dataset`: the data set, a `Subset`, or a number of samples. Every epoch draws each of them.
      Torch's samplers show it; with a sampler of your own, or `obs.samples` alone, it is a guess.
    - `scheduler`: the learning rate's schedule; its position at the start is recorded.
    - `step`: how many optimizer steps were made before, in a script that resumes.
    - `layout`: the axes along which the ranks are arranged, with their sizes, row-major:
      `{"dp": 2, "tp": 2}`, or the `DeviceMesh`. Along dp, dp_replicate, dp_shard and fsdp each rank
      draws samples of its own; along tp, sp, pp, cp and ep all draw the same. By default it is read
      from the DTensors' meshes; without DTensors each rank draws samples of its own.
    - `tied`: the names of each tensor that has several names, on one rank or on the stages of a
      pipeline: `(("embedding.weight", "head.weight"),)`. Its copies are compared after each step.
    - `frozen`: names or patterns of the parameters that must not change; all others must. A
      module's name stands for all that is in it, and `!` in front takes names out again:
      `("embedding", "blocks.[01].*")`, `("*", "!*.lora_*")`, or `()` if nothing is frozen.
    - `synchronised_buffers`: names or patterns of the buffers that forward passes change on all
      ranks alike, `("*.running_*",)`. SyncBatchNorm's need no declaration.
    - `averages`: averages of the weights that the script keeps next to the model, by any names:
      `{"ema": ema}`. A module, a list or a dictionary of tensors, or an object that has one, in the
      order of the model's parameters. Without it, they are recognised by how they move.
    - `clip_norm`: the largest L2 norm of the gradient of all parameters, to which it is clipped.
    - `reduce_dtype`: the number format in which ranks add gradients, `torch.bfloat16`, if they are
      rounded to it by other means than DistributedDataParallel's hooks or `fully_shard`'s policy.
    - `loss_over`: "batch" if the loss of a step is that of all its samples, however they are
      divided into ranks and micro-batches; "micro-batch" if each micro-batch of all ranks has a
      loss of its own (negatives are gathered from all ranks, but not from other micro-batches).

    With `every` the training is watched, whether entrenar-check runs it or not. Each `every`-th
    step is checked: all ranks hold the same weights (F-DP-001), these are finite (F-DP-003), and
    each tensor with a gradient and a learning rate moves within `patience` steps (F-TI-004).

    - `contract`: a file or a shipped contract's name; only its clauses of these kinds are watched.
    - `on_finding`: called with a WatchFinding for each broken clause; training then goes on. By
      default the finding is raised out of `optimizer.step()`, on all ranks; on GPUs, one watched
      step later.

    All ranks must make the same steps, and watch with the same arguments. Raises UsageError for an
    invalid argument.
    """
    if every is None and (contract, on_finding, patience) != (None, None, PATIENCE):
        raise UsageError(
            "contract=, on_finding= and patience= belong to the watch, which every= starts: give "
            "every=, or leave them out"
        )
    observation = Observation()
    if FOLDER in os.environ:
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
