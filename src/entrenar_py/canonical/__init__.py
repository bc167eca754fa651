"""The canonical all-reduce: DistributedDataParallel whose weights do not depend on the world size.

Doors only; nothing of torch is imported before one is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from entrenar_py.canonical.reducer import Reducer


def canonical_all_reduce(
    model: DistributedDataParallel, *, micro_batches: int, symmetric_memory: bool | None = None
) -> Reducer:
    """Switches `model` to gradients with the same bits on 1, 2, 4, 8 ... ranks; once, on all ranks.

    A global batch is `micro_batches` micro-batches of one shape, however many ranks there are: rank
    r of W has the r-th run of `micro_batches / W` of them. Training goes through what comes back:

        for inputs, targets in reducer.fold(batches):      # micro_batches / W of them
            loss_fn(model(inputs), targets).backward()     # the micro-batch's mean, not divided
        optimizer.step()                                   # .grad: the mean of all micro-batches

    Micro-batch gradients are added along one binary tree over the global batch. While a rank goes
    through m of them it holds up to log2(m) + 1 gradients, where adding them up in order holds one.

    GPUs of one host that can reach each other's memory exchange gradients through it, all others
    through NCCL; `symmetric_memory` says which, whatever they can. The bits are the same.

    UsageError if the numbers are no powers of two, the model holds what can't be the same on
    another world size, or kernels may differ from run to run (see `require_deterministic`).
    """
    from entrenar_py.canonical.reducer import Reducer

    return Reducer(model, micro_batches=micro_batches, symmetric_memory=symmetric_memory)


def require_deterministic() -> None:
    """Returns if this process runs kernels that give the same bits each time; UsageError if not.

    What is checked: deterministic algorithms, not only warned of; no cuDNN autotuning; and, where
    there is a CUDA device, cuBLAS's workspace. That the workspace was set before cuBLAS started
    can't be seen from inside: set it where the process is started.
    """
    from entrenar_py.canonical.settings import require_deterministic as require

    require()
