"""The worker processes of a run on this machine: how many, and what they load ahead.

A worker computes on one thread. If several threads shared a matrix product or a sum, then torch,
its libraries, the shape and the number of threads would decide how it is split, and so how it is
rounded. Shards are added along one tree, so several processes use all cores without changing a bit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from entrenar_py.shared import scenario
from entrenar_py.shared.errors import TraceError
from entrenar_py.shared.trace import ledger
from entrenar_py.shared.untrusted import files
from entrenar_py.shared.wording import counted
from entrenar_py.train.wire_io import processes

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds allowed in a period
_WORKER = "entrenar_py.train.finetune.local"
# It looks for CUDA devices when it is imported. After that, forks of the process can't use any.
_OF_THE_CPU = "entrenar_py.train.model.libraries"


def preloaded(names: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that are imported before workers on the backends `names` are forked."""
    uses_cuda = any(scenario.backend_kind(name) == "cuda" for name in names)
    return (_WORKER,) if uses_cuda else (_WORKER, _OF_THE_CPU)


def load_ahead(names: Sequence[str]) -> None:
    """Start loading what workers on the backends `names` need, in parallel to this process."""
    processes.load_ahead(preloaded(names))


def num_cores() -> int:
    """Return the number of cores for this process, by its affinity and its container's quota."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # no container, or no limit ("max")
        return allowed


def busy(num_cores: int, num_shards: int) -> int:
    """Return the fewest workers on `num_cores` cores with which a step is as short as possible."""
    rounds = -(-num_shards // min(num_cores, num_shards))
    return -(-num_shards // rounds)


def begun_with(path: Path) -> int | None:
    """Return the number of workers of the run with its ledger at `path`; None if unreadable.

    A resumed run keeps this number, even if this machine has a different number of cores by now.
    """
    try:
        with files.open_file(path) as file:
            return ledger.Reader(file, path, cut=True).head.plan.world_size
    except (OSError, TraceError):  # the coordinator reports what is wrong with it
        return None


def remark(num_workers: int, *, num_shards: int, limit: str) -> str:
    """Return a text that says how many workers and cores are used, and why no more.

    The reason is `limit`, or that there are only `num_shards` shards.
    """
    cores = num_cores()
    threads = "one thread each" if num_workers > 1 else "one thread"
    said = f"{counted(num_workers, 'worker')} with {threads}, on {counted(cores, 'core')}"
    if num_workers < busy(cores, num_shards):
        return f"{said}; {limit}"
    if num_workers < cores:
        return f"{said}; training.num_shards: {num_shards} allows no more workers"
    return said
