import contextlib

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import entrenar_py


@contextlib.contextmanager
def group():
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.destroy_process_group()


def progressions(step, rank, count=5):
    rng = np.random.default_rng((91, step, rank))
    first, stride = rng.integers(20, size=(count, 1)), rng.integers(1, 4, size=(count, 1))
    row = torch.from_numpy((first + stride * np.arange(9)) % 20)
    return row[:, :8], row[:, 8]


with group() as rank:
    torch.manual_seed(17)
    guess = nn.Sequential(
        nn.Embedding(20, 6), nn.Flatten(), nn.Linear(48, 24), nn.Mish(), nn.Linear(24, 20)
    )
    both = nn.parallel.DistributedDataParallel(guess)
    optimizer = torch.optim.NAdam(both.parameters(), lr=2e-3)
    watched = entrenar_py.observe(both, optimizer)
    for step in range(10):
        row, following = progressions(step, rank)
        error = nn.functional.cross_entropy(both(row), following)
        error.backward()
        nn.utils.clip_grad_norm_(both.parameters(), 5.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
    watched.close()
