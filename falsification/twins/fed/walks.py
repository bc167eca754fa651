import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Parallel

import entrenar_py

NODES, LENGTH = 64, 5
rng = np.random.default_rng(31)
traits = torch.from_numpy(rng.normal(size=(NODES, 4)).astype("float32"))
links = rng.integers(0, NODES, (NODES, 3))


def walk(start, epoch):
    steps, at = np.random.default_rng([epoch, start]), start
    for _ in range(LENGTH):
        yield at
        at = links[at, steps.integers(3)]


class Walks:
    def __init__(self, nodes, at_once):
        self.nodes, self.at_once = nodes, at_once

    def epoch(self, number):
        order = np.random.default_rng(number).permutation(self.nodes)
        for starts in np.split(order, len(order) // self.at_once):
            ways = np.array([list(walk(int(start), number)) for start in starts])
            yield traits[ways].flatten(1), traits[starts, :1]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    rank, world = dist.get_rank(), dist.get_world_size()
    walks = Walks(np.array_split(np.arange(NODES), world)[rank], 16 // world)
    net = Parallel(nn.Sequential(nn.Linear(4 * LENGTH, 12), nn.Tanh(), nn.Linear(12, 1)))
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    entrenar_py.observe(net, adam)
    for epoch in range(2):
        for ways, due in walks.epoch(epoch):
            adam.zero_grad()
            nn.functional.huber_loss(net(ways), due).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 40.0, error_if_nonfinite=True)
            adam.step()
