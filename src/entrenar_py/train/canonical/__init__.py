"""Canonical reductions: DistributedDataParallel or FSDP, with the same weights for any world size.

Importing this module doesn't import torch. Calling its functions does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.nn import Module
    from torch.nn.parallel import DistributedDataParallel

    from entrenar_py.train.canonical.reducer import Reducer
    from entrenar_py.train.canonical.sharded_reducer import ShardedReducer


def canonical_all_reduce(
    model: DistributedDataParallel, *, micro_batches: int, symmetric_memory: bool | None = None
) -> Reducer:
    """Make `model` compute gradients with the same bits on 1, 2, 4, 8 ... ranks.

    Call it once, on all ranks. A global batch consists of `micro_batches` micro-batches of equal
    shape, for any number of ranks. Rank r of W gets the r-th block of `micro_batches / W`
    micro-batches:

        for inputs, targets in reducer.fold(batches):      # micro_batches / W of them
            loss_fn(model(inputs), targets).backward()     # the micro-batch's mean, not divided
        optimizer.step()                                   # .grad: the mean of all micro-batches

    Micro-batch gradients are added along one binary tree over the global batch. A rank with m
    micro-batches holds up to log2(m) + 1 gradients at a time. Plain accumulation holds one.

    GPUs of one host exchange gradients through each other's memory if they can access it; all other
    GPUs exchange them through NCCL. `symmetric_memory` overrides this choice, which doesn't change
    the bits.

    Raises UsageError if `micro_batches` or the world size is not a power of two, if the model has
    parts that depend on the world size, or if `require_deterministic` would raise.
    """
    from entrenar_py.train.canonical.reducer import Reducer

    return Reducer(model, micro_batches=micro_batches, symmetric_memory=symmetric_memory)


def canonical_reduce_scatter(
    model: Module | FSDPModule, *, micro_batches: int, sync_each: bool = True
) -> ShardedReducer:
    """Make a model of `fully_shard` compute gradients with the same bits on any number of ranks.

    Call it once, on all ranks, after the last fully_shard. It is used as `canonical_all_reduce` is,
    except that rank r of W gets the micro-batches r, W + r, 2 * W + r ... of the global batch:

        for inputs, targets in reducer.fold(batches):      # those of reducer.shards
            loss_fn(model(inputs), targets).backward()     # the micro-batch's mean, not divided
        reducer.clip_grad_norm_(1.0)                       # torch's depends on the world size
        optimizer.step()                                   # .grad: the mean of all micro-batches

    Each module that fully_shard got sums its gradients after each micro-batch, in the dtype of
    MixedPrecisionPolicy. A rank with m micro-batches holds up to log2(m) + 1 sharded gradients.

    With `sync_each=False` they are exchanged only after a rank's last micro-batch, as by FSDP with
    `set_requires_gradient_sync(False)` before it. That is less traffic and more memory: up to
    log2(m) + 1 whole gradients. The bits are the same. `reducer.shards` are neighbours then.

    If W doesn't divide `micro_batches`, some ranks have one micro-batch less. FSDP's collectives
    need all ranks, so their last one is twice in `reducer.shards`. For the second,
    `reducer.is_repeat` is True and the gradient isn't used: leave out its loss.

    Replaces the modules' reduce-scatter, all-reduce hook and divide factor.

    Raises UsageError if `micro_batches` is not a power of two or is smaller than the world size, if
    the world size is not a power of two with `sync_each=False`, if the model has parts that depend
    on the world size or is sharded in more than one dimension, or if
    `require_deterministic` would raise.
    """
    from entrenar_py.train.canonical.sharded_reducer import ShardedReducer

    return ShardedReducer(model, micro_batches=micro_batches, sync_each=sync_each)


def require_deterministic() -> None:
    """Raise UsageError unless this process runs kernels that give the same bits in every run.

    Checks that torch enforces deterministic algorithms (warn_only=False) and that cuDNN autotuning
    is off. With a CUDA device, also checks CUBLAS_WORKSPACE_CONFIG, which must be set before the
    process starts. If cuBLAS started without the variable, this function can't detect it.
    """
    from entrenar_py.train.canonical.requirements import require_deterministic as require

    require()
