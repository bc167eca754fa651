"""The place of this process among the ranks."""

from __future__ import annotations

import os

import torch.distributed as dist

from entrenar_py.rank_files import rank_file


def place() -> tuple[int, int]:
    """Return rank and world size: as the launcher set them, or those of the process group.

    Ranks that a script spawns itself (`torch.multiprocessing.spawn`) may have no environment.
    """
    is_told = not {"RANK", "ENTRENAR_RANK"}.isdisjoint(os.environ)
    if not is_told and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return rank_file.environment_rank()
