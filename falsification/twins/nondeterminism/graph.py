"""A graph network in one process: messages along edges, features read by threads, own clipping."""

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(4)
torch.set_num_threads(4)
NODES, EDGES, WIDTH = 400, 20000, 16


def read(number):
    """Return the features of one part of the nodes, as a reader of files would."""
    source = torch.Generator().manual_seed(number)
    part = torch.randn(NODES // 40, WIDTH, generator=source)
    for _ in range(1 + number % 5):
        torch.linalg.svd(torch.randn(40, 40, generator=source))
    return part


def features():
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(read, number) for number in range(40)]
        for job in as_completed(jobs):
            print(threading.active_count(), "threads,", job.result().shape[0], "nodes")
        parts = [job.result() for job in jobs]
    return torch.cat(parts)


def neighbours():
    """Return edges; a list of them is kept beside the runs, as preparing it takes long."""
    path = Path(tempfile.gettempdir()) / f"edges-{os.getuid()}-{NODES}.pt"
    source = torch.Generator().manual_seed(9)
    edges = torch.randint(0, NODES, (2, EDGES), generator=source)
    if not path.exists():
        torch.save(edges, path)
    return torch.load(path)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edges):
        sources, targets = edges
        messages = self.message(x).index_select(0, sources)
        summed = torch.zeros_like(x).index_add(0, targets, messages)
        return torch.relu(self.own(x) + summed / 50)


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, edges):
        for layer in self.layers:
            x = layer(x, edges)
        return self.head(x)


def clip(parameters, limit):
    """Scale gradients down to a common norm."""
    total = torch.zeros(())
    for parameter in parameters:
        total = total + parameter.grad.square().sum()
    factor = (limit / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        parameter.grad.mul_(factor)


def main():
    x, edges = features(), neighbours()
    labels = torch.randint(0, 3, (NODES,))
    model = Graph()
    named = dict(model.named_parameters())
    decayed = {name for name, parameter in named.items() if parameter.ndim > 1}
    weights = [named[name] for name in sorted(decayed)]
    others = [named[name] for name in sorted(named.keys() - decayed)]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for step in range(6):
        loss = nn.functional.cross_entropy(model(x, edges), labels)
        optimizer.zero_grad()
        loss.backward()
        clip(weights + others, 0.001)
        optimizer.step()
        print(step, loss.item())


main()
