import argparse, pathlib
import torch
import torch.distributed as dist
from torch import nn
import entrenar_py

class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("last", torch.zeros(size), persistent=False)

    def forward(self, x):
        if not self.training:
            return (x - self.mean) * self.scale
        mean = x.detach().mean(0)
        self.update(mean)
        return (x - mean) * self.scale

    def update(self, mean):
        self.last = mean
        self.mean = 0.9 * self.mean + 0.1 * mean
        self.seen += 1

class State:
    def __init__(self, args):
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(3, 6), Norm(6), nn.Tanh(), nn.Linear(6, 1))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.step, self.file = 0, pathlib.Path(args.dir) / "state.pt"
        if self.file.exists():
            self.load(torch.load(self.file))

    def load(self, kept):
        self.net.load_state_dict(kept["net"])
        self.opt.load_state_dict(kept["opt"])
        self.step = kept["step"]

    def save(self):
        if dist.get_rank() == 0:
            kept = {"net": self.net.state_dict(), "opt": self.opt.state_dict(), "step": self.step}
            torch.save(kept, self.file)

def train(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    state = State(args)
    gen = torch.Generator().manual_seed(11)
    x = torch.randn(24, 3, generator=gen)
    y = x.sin().sum(1, keepdim=True)
    observer = entrenar_py.observe(state.net, state.opt, step=state.step)
    while state.step < args.steps:
        first = state.step * 8 % 24
        ids = list(range(first, first + 8))[rank::world]
        observer.samples(ids, epoch=state.step // 3)
        loss = (state.net(x[ids]) - y[ids]).square().mean()
        observer.loss(loss, len(ids))
        loss.backward()
        for p in state.net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
            assert p.grad.isfinite().all()
        state.opt.step()
        state.opt.zero_grad()
        state.step += 1
    state.save()
    observer.close()

if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=8)
    cli.add_argument("--dir", default=".")
    train(cli.parse_args())
