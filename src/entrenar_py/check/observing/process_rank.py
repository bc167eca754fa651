"""The place of this process among the ranks."""

from __future__ import annotations

import ctypes
import os

import torch.distributed as dist

from entrenar_py.check.rank_files import rank_file


def place() -> tuple[int, int]:
    """Return rank and world size: as the launcher set them, or those of the process group.

    Ranks that a script spawns itself (`torch.multiprocessing.spawn`) may have no environment.
    """
    is_told = not {"RANK", "ENTRENAR_RANK"}.isdisjoint(os.environ)
    if not is_told and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return rank_file.environment_rank()


def keep_groups() -> None:
    """Keep the process groups that exist until the process has ended.

    A group that the script lets go of waits for its thread. That thread may be about to let go of a
    tensor of the last collective, and waits for the lock of Python's, which the script's thread
    has: neither ends (gloo, torch 2.11 and 2.13). So the groups are never taken down.
    """
    if dist.is_available() and dist.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
