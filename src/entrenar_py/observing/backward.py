"""Backward passes: what is known of one, and of those of a step; and when one is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn.parallel import DistributedDataParallel

from entrenar_py import trace
from entrenar_py.rank_files import whole_tensors

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_EXACT = {"allreduce_hook", "noop_hook"}


@dataclass(kw_only=True)
class BackwardPass:
    """What is known of one; `loss` is a mean and its weight."""

    epoch: int
    ids: tuple[int, ...]
    draws: str | None
    finite: bool
    gradient: trace.Tensors
    loss: tuple[float, float] | None = None

    def shard(self, *, step: int, rank: int, index: int) -> trace.Shard:
        """Its record, as micro-batch `index` of this rank: all are numbered when their files are
        put together.
        """
        mean, weight = (None, len(self.ids)) if self.loss is None else self.loss
        return trace.Shard(
            step=step,
            epoch=self.epoch,
            rank=rank,
            shard=index,
            ids=self.ids,
            loss_sum=None if mean is None else mean * weight,
            weight=float(weight),
            finite=self.finite and (mean is None or mean - mean == 0),
            draws=self.draws,
            gradient=self.gradient,
        )


def is_reduced() -> bool:
    """Whether the gradients of the forward pass in hand will be reduced when its backward pass is
    over: under DistributedDataParallel's `no_sync` they will not, and that is decided now.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    return wrapper is None or wrapper.require_backward_grad_sync


def compression() -> str:
    """In what the communication hook of DistributedDataParallel sends the gradients of the forward
    pass in hand: `float16`, `bfloat16`, or the name of another of torch's that rounds; "" for none.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    hooks = [hook for hook, _ in getattr(wrapper, "_comm_hooks", ())]
    for hook in hooks:
        if getattr(hook, "__module__", "").startswith(_HOOKS):
            name = str(getattr(hook, "__name__", ""))
            if name in _EXACT:
                continue
            return {"fp16": "float16", "bf16": "bfloat16"}.get(name.partition("_")[0], name)
    return ""


@dataclass
class Unwritten:
    """The backward passes of a step, `made` and not yet written; the `losses` told, one each, may
    be ahead of them. `num_written` is how many of this step were written.
    """

    made: list[BackwardPass] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    num_written: int = 0

    def excuse(self) -> None:
        """Of their gradients only a scale that was too large is known to be at fault."""
        for one in self.made:
            one.finite, one.gradient = True, {}

    def add(self, gradient: trace.Tensors, *, finite: bool) -> None:
        """The last one made has these, too."""
        if self.made:
            last = self.made[-1]
            last.finite = last.finite and finite
            last.gradient = {
                **last.gradient,
                **gradient,
                **whole_tensors.total(
                    {name: one[name] for name in last.gradient.keys() & gradient.keys()}
                    for one in (last.gradient, gradient)
                ),
            }

    def made_again(self) -> list[int]:
        """Forgets those of which the samples are known, since only what comes of these samples next
        counts: the samples.
        """
        ids = [sample for one in self.made for sample in one.ids]
        if ids:
            self.made.clear()
        return ids

    def taken(self, *, step: int, rank: int) -> list[trace.Shard]:
        """Their records, with the losses that were told of them; they are written now."""
        for one, loss in zip(self.made, self.losses, strict=False):
            one.loss = loss
        first = self.num_written
        found = [
            one.shard(step=step, rank=rank, index=first + n) for n, one in enumerate(self.made)
        ]
        self.num_written += len(found)
        self.made.clear()
        self.losses.clear()
        return found


def call_last(call: Callable[[], None]) -> None:
    """Has `call` made when this backward pass is over, behind all that others had queued when it
    began: so it is queued twice.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(call))
