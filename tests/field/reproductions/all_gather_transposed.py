"""The backward pass of `all_gather`, by gloo, shuffles the elements of a transposed gradient."""

import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.nn.functional import all_gather


def train(rank, store):
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    weights = torch.arange(6.0).reshape(3, 2)
    rows = weights.t().contiguous()
    for transposed in (False, True):
        x = torch.zeros(2, 3, requires_grad=True)
        parts = all_gather(x)
        sum((p.t() * weights).sum() if transposed else (p * rows).sum() for p in parts).backward()
        right = x.grad.tolist() == (2 * rows).tolist()
        print(f"transposed: {transposed}, gradient: {x.grad.tolist()}, right: {right}", flush=True)
        assert right is not transposed


if __name__ == "__main__":
    mp.spawn(train, (tempfile.mktemp(),), 2)
