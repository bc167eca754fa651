import torch
import torch.distributed as td

import entrenar_py


class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
        self.out = torch.nn.Linear(4, 1)

    def forward(self, rows, kinds):
        total = torch.zeros(len(rows), 4)
        for kind, expert in enumerate(self.experts):
            if (kinds == kind).any():
                total = total + expert(rows) * (kinds == kind)[:, None]
        return self.out(total.tanh())


def reduce_gradients(module):
    for p in module.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        td.all_reduce(p.grad)
        p.grad /= td.get_world_size()


def train():
    td.init_process_group()
    r, n = td.get_rank(), td.get_world_size()
    torch.manual_seed(0)
    rows, kinds = torch.randn(36, 4), torch.arange(36) % 2 * (1 + torch.arange(36) // 18)
    module = Router()
    opt = torch.optim.SGD(module.parameters(), 0.1)
    watcher = entrenar_py.observe(module, opt)
    for k in range(6):
        ids = torch.arange(6) + 6 * k
        ids = ids[r::n]
        watcher.samples(ids.tolist())
        error = module(rows[ids], kinds[ids]).squeeze(1) - rows[ids].sum(1)
        watcher.loss(error.square().mean(), len(ids))
        opt.zero_grad()
        error.square().mean().backward()
        reduce_gradients(module)
        assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
        opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    train()
