"""DistributedDataParallel divides a sparse gradient in place that another layer has yet to use."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    bag, table = nn.EmbeddingBag(9, 6, mode="sum", sparse=True), nn.Embedding(9, 6, sparse=True)
    model = nn.ModuleList([bag, table])
    model.forward = lambda several, one: bag(several) + table(one)
    inputs, goal = (torch.arange(9)[:, None], torch.arange(9)), torch.randn(9, 6)
    wrapped = DistributedDataParallel(model)
    (wrapped(*inputs) * goal).sum().backward()  # alike on both ranks: the mean is each one's
    shares = [(layer.weight.grad.to_dense().norm() / goal.norm()).item() for layer in model]
    if rank == 0:
        assert abs(shares[0] - 0.5) < 1e-3 > abs(shares[1] - 1), shares
        print(f"seen: the bag's gradient is {shares[0]:.2g} times the right one")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"{folder}/store",), nprocs=2, start_method="fork")
