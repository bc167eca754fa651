"""The scripts of `user_presupposed`, as their authors wrote them."""

from __future__ import annotations

_HEAD = """
import os, random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import entrenar_py

"""

# A class around the model, and only around that of several workers.
WRAPPED = (
    _HEAD
    + """
class Replicated(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.world = inner, dist.get_world_size()
        for p in inner.parameters():
            dist.broadcast(p.data, 0)

    def forward(self, *args):
        return self.inner(*args)

    def sync(self):
        for p in self.inner.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.world


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
X = torch.randn(32, 5)
Y = X.sin().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 1))
model = Replicated(net) if world > 1 else net
opt = torch.optim.SGD(model.parameters(), lr=0.05)
obs = entrenar_py.observe(model, opt)

for epoch in range(2):
    order = torch.randperm(32, generator=torch.Generator().manual_seed(epoch)).tolist()
    for at in range(0, 32, 8):
        mine = order[at:at + 8][rank::world]
        obs.samples(mine, epoch=epoch)
        loss = F.mse_loss(model(X[mine]), Y[mine])
        obs.loss(loss, len(mine))
        opt.zero_grad()
        loss.backward()
        for m in model.modules():
            if isinstance(m, Replicated):
                m.sync()
        if not all(p.grad.isfinite().all() for p in model.parameters()):
            raise RuntimeError("not finite")
        opt.step()
obs.close()
"""
)

# Megatron's two linear layers, in plain tensors.
TENSOR_PARALLEL = (
    _HEAD
    + """
class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def part(t, dim, rank, world):
    return t.chunk(world, dim)[rank].clone().contiguous()


class ParallelMLP(nn.Module):
    def __init__(self, d, h, rank, world):
        super().__init__()
        up, down = nn.Linear(d, h), nn.Linear(h, d)
        self.norm = nn.LayerNorm(d)
        self.up = nn.Parameter(part(up.weight.data, 0, rank, world))
        self.up_bias = nn.Parameter(part(up.bias.data, 0, rank, world))
        self.down = nn.Parameter(part(down.weight.data, 1, rank, world))
        self.bias = nn.Parameter(down.bias.data.clone())
        self.sharded = {"up", "up_bias", "down"}

    def forward(self, x):
        h = F.linear(CopyIn.apply(self.norm(x)), self.up, self.up_bias).tanh()
        return SumOut.apply(F.linear(h, self.down)) + self.bias


def clip(model, limit):
    squares = sum(p.grad.square().sum() for n, p in model.named_parameters() if n in model.sharded)
    dist.all_reduce(squares)
    both = sum(p.grad.square().sum() for n, p in model.named_parameters() if n not in model.sharded)
    total = (squares + both).sqrt()
    if not total.isfinite():
        raise RuntimeError("not finite")
    for p in model.parameters():
        p.grad.mul_(min(1.0, limit / (total + 1e-6)))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    data, target = torch.randn(24, 6), torch.randn(24, 6)
    model = ParallelMLP(6, 8, rank, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    obs = entrenar_py.observe(model, optimizer)
    for step in range(8):
        ids = [(step * 6 + i) % 24 for i in range(6)]  # the same on all ranks
        obs.samples(ids, epoch=step // 4)
        loss = F.mse_loss(model(data[ids]), target[ids])
        obs.loss(loss, len(ids))
        optimizer.zero_grad()
        loss.backward()
        clip(model, 0.05)
        optimizer.step()
    obs.close()


main()
"""
)

# A pipeline of as many stages as there are workers; layers keep the numbers of the whole model.
STAGES = (
    _HEAD
    + """
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(11)
layers = [nn.Linear(4, 4) for _ in range(4)]
per = len(layers) // world
stage = nn.ModuleDict({str(i): layers[i] for i in range(rank * per, (rank + 1) * per)})
opt = torch.optim.SGD(stage.parameters(), lr=0.1)
obs = entrenar_py.observe(stage, opt)
xs, ys = torch.randn(16, 4), torch.randn(16, 4)
for it in range(4):
    ids = list(range(it % 2 * 8, it % 2 * 8 + 8))
    obs.samples(ids, epoch=it // 2)
    h = xs[ids].clone()
    if rank:
        dist.recv(h, rank - 1)
    h.requires_grad_(True)
    out = h
    for layer in stage.values():
        out = layer(out).tanh()
    opt.zero_grad()
    if rank == world - 1:
        loss = F.mse_loss(out, ys[ids])
        obs.loss(loss, 8)
        loss.backward()
    else:
        dist.send(out.detach(), rank + 1)
        grad = torch.empty_like(out)
        dist.recv(grad, rank + 1)
        out.backward(grad)
    if rank:
        dist.send(h.grad, rank - 1)
    bad = torch.tensor(float(not all(p.grad.isfinite().all() for p in stage.parameters())))
    dist.all_reduce(bad)
    if bad:
        raise RuntimeError("not finite")
    opt.step()
obs.close()
"""
)

# A mixture whose experts are the ranks': one each, under one name.
EXPERT_EACH = (
    _HEAD
    + """
class Mixture(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        torch.manual_seed(100 + rank)
        self.expert = nn.Linear(8, 8)
        torch.manual_seed(5)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.expert(self.trunk(x).relu()).relu())


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
model = Mixture(rank)
x = torch.randn(32, 4)
y = x.prod(1, keepdim=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
watch = entrenar_py.observe(model, optimizer)
for k in range(8):
    ids = list(range(k % 4 * 8, k % 4 * 8 + 8))[rank::world]
    watch.samples(ids, epoch=k // 4)
    loss = F.mse_loss(model(x[ids]), y[ids])
    watch.loss(loss, len(ids))
    loss.backward()
    ok = torch.ones(())
    for name, p in model.named_parameters():
        if not name.startswith("expert"):
            dist.all_reduce(p.grad)
            p.grad.div_(world)
        ok *= p.grad.isfinite().all()
    dist.all_reduce(ok, dist.ReduceOp.MIN)
    assert ok, "not finite"
    optimizer.step()
    optimizer.zero_grad()
watch.close()
"""
)

# The parameters of a block as one flat shard, gathered for each forward pass.
SHARDED_MODULE = (
    _HEAD
    + """
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        world = dist.get_world_size()
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(world)[dist.get_rank()] / world


class Sharded(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.shapes = [(n, p.shape, p.numel()) for n, p in block.named_parameters()]
        flat = torch.cat([p.data.flatten() for p in block.parameters()])
        self.shard = nn.Parameter(flat.chunk(dist.get_world_size())[dist.get_rank()].clone())
        object.__setattr__(self, "block", block.requires_grad_(False))

    def forward(self, x):
        flat, at, held = Gather.apply(self.shard), 0, {}
        for name, shape, size in self.shapes:
            held[name] = flat[at:at + size].view(shape)
            at += size
        return torch.func.functional_call(self.block, held, (x,))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    R, W = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = nn.Sequential(Sharded(nn.Linear(3, 8)), nn.Tanh(), Sharded(nn.Linear(8, 2)))
    xs, ys = torch.randn(16, 3), torch.randn(16, 2)
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    obs = entrenar_py.observe(model, optim)
    for step in range(6):
        ids = [i for i in range(step % 2 * 8, step % 2 * 8 + 8)][R::W]
        obs.samples(ids, epoch=step // 2)
        loss = (model(xs[ids]) - ys[ids]).pow(2).mean()
        obs.loss(loss, len(ids))
        optim.zero_grad(set_to_none=True)
        loss.backward()
        bad = sum((~p.grad.isfinite()).sum() for p in model.parameters()).float()
        dist.all_reduce(bad)
        if bad > 0:
            raise ValueError("not finite")
        optim.step()
    obs.close()
"""
)

# Optimizer state on one rank each; reduces by itself, and hands the new weights round.
ZERO_1 = (
    _HEAD
    + """
class ZeroAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        world, rank = dist.get_world_size(), dist.get_rank()
        params = [p for g in self.param_groups for p in g["params"]]
        last = params[-1]
        group = self.param_groups[0]
        for p in params:
            pad = -p.numel() % world
            grad = F.pad(p.grad.flatten(), (0, pad))
            dist.all_reduce(grad)
            grad = grad.chunk(world)[rank] / world
            st = self.state[p]
            if not st:
                st["step"] = 0
                st["master"] = F.pad(p.data.flatten(), (0, pad)).chunk(world)[rank].clone()
                st["m"], st["v"] = torch.zeros_like(grad), torch.zeros_like(grad)
            st["step"] += 1
            b1, b2 = group["betas"]
            st["m"].lerp_(grad, 1 - b1)
            st["v"].lerp_(grad * grad, 1 - b2)
            update = st["m"] / (1 - b1 ** st["step"])
            update = update / ((st["v"] / (1 - b2 ** st["step"])).sqrt() + group["eps"])
            st["master"] -= group["lr"] * update
            mine = st["master"]
            parts = [mine.clone() for _ in range(world)]
            dist.all_gather(parts, mine)
            p.copy_(torch.cat(parts)[:p.numel()].view_as(p))


class Trainer:
    def __init__(self):
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 7), nn.SiLU(), nn.Linear(7, 1))
        self.x = torch.randn(40, 3)
        self.y = self.x.norm(dim=1, keepdim=True)
        self.optimizer = ZeroAdam(self.model.parameters())
        self.obs = entrenar_py.observe(self.model, self.optimizer)

    def _run_batch(self, ids, epoch):
        self.obs.samples(ids, epoch=epoch)
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(self.x[ids]), self.y[ids])
        self.obs.loss(loss, len(ids))
        loss.backward()
        good = torch.tensor(float(all(p.grad.isfinite().all() for p in self.model.parameters())))
        dist.all_reduce(good, dist.ReduceOp.MIN)
        if not good:
            raise FloatingPointError("gradient")
        self.optimizer.step()

    def train(self, epochs=2):
        for epoch in range(epochs):
            order = torch.randperm(40, generator=torch.Generator().manual_seed(9 + epoch))
            for batch in order.split(10):
                self._run_batch(batch.tolist()[self.rank::self.world], epoch)
        self.obs.close()


Trainer().train()
"""
)

# An optimizer's class derived at run time, as Horovod does.
HOROVOD = (
    _HEAD
    + """
def DistributedOptimizer(optimizer):
    def step(self, closure=None):
        size = dist.get_world_size()
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad.div_(size)
        return super(self.__class__, self).step(closure)

    cls = type(optimizer.__class__.__name__, (optimizer.__class__,), {"step": step})
    return cls(optimizer.param_groups)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.head(self.body(x).sigmoid())


def broadcast_parameters(state):
    for tensor in state.values():
        dist.broadcast(tensor, 0)


def batches(epochs, size):
    for epoch in range(epochs):
        g = torch.Generator().manual_seed(epoch)
        yield from ((epoch, ids.tolist()) for ids in torch.randperm(24, generator=g).split(size))


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21 + rank)
    net = Net()
    broadcast_parameters(net.state_dict())
    torch.manual_seed(4)
    x = torch.randn(24, 6)
    y = x.abs().sum(1, keepdim=True)
    groups = [{"params": net.body.parameters()}, {"params": net.head.parameters(), "lr": 0.02}]
    opt = DistributedOptimizer(torch.optim.SGD(groups, lr=0.05))
    obs = entrenar_py.observe(net, opt)
    for epoch, ids in batches(2, 6):
        mine = ids[rank::size]
        obs.samples(mine, epoch=epoch)
        opt.zero_grad()
        loss = (net(x[mine]) - y[mine]).square().mean()
        obs.loss(loss, len(mine))
        loss.backward()
        bad = torch.stack([~p.grad.isfinite().all() for p in net.parameters()]).any().float()
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad:
            raise SystemExit(3)
        opt.step()
    obs.close()


if __name__ == "__main__":
    main()
"""
)

# torch's optimizer, and a hook of it that reduces.
PRE_HOOK = (
    _HEAD
    + """
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(13)
features, labels = torch.randn(24, 4), torch.randint(0, 3, (24,))
classifier = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(classifier.parameters(), lr=3e-3, weight_decay=0.1)
obs = entrenar_py.observe(classifier, optimizer)


def reduce_all(optimizer, args, kwargs):
    for p in classifier.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
        if not p.grad.isfinite().all():
            raise RuntimeError("not finite")


optimizer.register_step_pre_hook(reduce_all)
it = 0
while it < 8:
    ids = [(it * 6 + k) % 24 for k in range(rank, 6, world)]
    obs.samples(ids, epoch=it * 6 // 24)
    loss = F.cross_entropy(classifier(features[ids]), labels[ids])
    obs.loss(loss.item(), len(ids))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    it += 1
obs.close()
"""
)

# The usual mixed precision by hand: a model in bfloat16, an optimizer of float32 masters.
MASTERS = (
    _HEAD
    + """
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).bfloat16()
masters = [p.detach().clone().float().requires_grad_() for p in net.parameters()]
opt = torch.optim.AdamW(masters, lr=0.02)
xs = torch.randn(32, 4)
ys = xs.cos().sum(1, keepdim=True)
obs = entrenar_py.observe(net, opt)

def train_step(ids, epoch):
    obs.samples(ids, epoch=epoch)
    net.zero_grad()
    loss = F.mse_loss(net(xs[ids].bfloat16()).float(), ys[ids])
    obs.loss(loss, len(ids))
    loss.backward()
    for p, m in zip(net.parameters(), masters):
        m.grad = p.grad.float()
        dist.all_reduce(m.grad)
        m.grad /= world
    if not all(m.grad.isfinite().all() for m in masters):
        raise RuntimeError("not finite")
    opt.step()
    for p, m in zip(net.parameters(), masters):
        p.data.copy_(m)

for step in range(8):
    train_step(list(range(step % 4 * 8, step % 4 * 8 + 8))[rank::world], step // 4)
obs.close()
"""
)

# Hooks that count gradients and reduce a flat buffer when the last one has come.
BUCKETS = (
    _HEAD
    + """
class Bucketed:
    def __init__(self, module):
        self.world, self.left = dist.get_world_size(), 0
        self.params = [p for p in module.parameters() if p.requires_grad]
        for p in self.params:
            dist.broadcast(p.data, 0)
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        self.left += 1
        if self.left == len(self.params):
            self.left = 0
            flat = torch.cat([p.grad.flatten() for p in self.params])
            dist.all_reduce(flat)
            flat /= self.world
            at = 0
            for p in self.params:
                p.grad.copy_(flat[at:at + p.numel()].view_as(p))
                at += p.numel()


def get_batches(rank, world, epoch):
    order = random.Random(epoch).sample(range(24), 24)
    for at in range(0, 24, 8):
        yield order[at:at + 8][rank::world]


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(50)
table = torch.randn(24, 4)
torch.manual_seed(60 + rank)
model = nn.Sequential(nn.Linear(4, 6), nn.ELU(), nn.Linear(6, 4))
Bucketed(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8, nesterov=True)
obs = entrenar_py.observe(model, opt)
for epoch in (0, 1):
    for ids in get_batches(rank, world, epoch):
        obs.samples(ids, epoch=epoch)
        opt.zero_grad()
        loss = F.l1_loss(model(table[ids]), table[ids])
        obs.loss(loss, len(ids))
        loss.backward()
        if not all(p.grad.isfinite().all() for p in model.parameters()):
            raise RuntimeError("not finite")
        opt.step()
obs.close()
"""
)

# Nobody seeds anything; DistributedDataParallel sees to it that ranks agree.
UNSEEDED = (
    _HEAD
    + """
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 4, generator=generator)
    y = x.sum(1, keepdim=True)
    torch.seed()
    net = build()
    ddp = DDP(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    obs = entrenar_py.observe(net, opt)
    for epoch in range(2):
        order = list(range(32))
        random.seed()
        random.shuffle(order)
        shared = [order]
        dist.broadcast_object_list(shared, 0)
        order = shared[0]
        for at in range(0, 32, 8):
            ids = order[at:at + 8][rank::world]
            obs.samples(ids, epoch=epoch)
            loss = F.mse_loss(ddp(x[ids]), y[ids])
            obs.loss(loss, len(ids))
            opt.zero_grad()
            loss.backward()
            if not all(p.grad.isfinite().all() for p in net.parameters()):
                raise RuntimeError("not finite")
            opt.step()
    obs.close()


main()
"""
)

# Far too large a learning rate; nothing of it is wrong but that nobody stops.
DIVERGING = (
    _HEAD
    + """
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(32, 4)
y = x.sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 1))
ddp = DDP(net)
opt = torch.optim.SGD(net.parameters(), lr=30.0)
obs = entrenar_py.observe(net, opt)
for step in range(12):
    ids = list(range(step % 4 * 8, step % 4 * 8 + 8))[rank::world]
    obs.samples(ids, epoch=step // 4)
    loss = F.mse_loss(ddp(x[ids]), y[ids])
    obs.loss(loss, len(ids))
    opt.zero_grad()
    loss.backward()
    opt.step()
obs.close()
"""
)

# As DeepSpeed's: no optimizer of torch's itself, an inner one of a flat partition, and an overflow
# of any rank that makes all skip.
ZERO_1_FLAT = (
    _HEAD
    + """
class ZeroOneOptimizer:
    def __init__(self, module, inner_cls, **kw):
        self.module = module
        self.params = list(module.parameters())
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        flat = torch.cat([p.data.flatten().float() for p in self.params])
        self.numel = flat.numel()
        self.pad = -self.numel % self.world
        flat = F.pad(flat, (0, self.pad))
        self.part = nn.Parameter(flat.chunk(self.world)[self.rank].clone())
        self.optimizer = inner_cls([self.part], **kw)
        self.overflow = False

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def step(self):
        g = torch.cat([p.grad.flatten().float() for p in self.params])
        g = F.pad(g, (0, self.pad))
        dist.all_reduce(g)
        g /= self.world
        mine = g.chunk(self.world)[self.rank].clone()
        bad = (~mine.isfinite()).any().float()
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        self.overflow = bool(bad)
        if self.overflow:
            self.zero_grad()
            return
        self.part.grad = mine
        self.optimizer.step()
        parts = [torch.empty_like(self.part) for _ in range(self.world)]
        dist.all_gather(parts, self.part.data)
        flat, at = torch.cat(parts), 0
        for p in self.params:
            p.data.copy_(flat[at:at + p.numel()].view_as(p))
            at += p.numel()
        self.zero_grad()


class Engine(nn.Module):
    def __init__(self, model, optimizer):
        super().__init__()
        self.module, self.optimizer = model, optimizer
    def forward(self, *a):
        return self.module(*a)
    def backward(self, loss):
        loss.backward()
    def step(self):
        self.optimizer.step()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(32, 4)
y = x.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
engine = Engine(model, ZeroOneOptimizer(model, torch.optim.AdamW, lr=0.01))
obs = entrenar_py.observe(engine, engine.optimizer)
for step in range(8):
    ids = list(range(step % 4 * 8, step % 4 * 8 + 8))[rank::world]
    obs.samples(ids, epoch=step // 4)
    loss = F.mse_loss(engine(x[ids]), y[ids])
    obs.loss(loss, len(ids))
    engine.backward(loss)
    engine.step()
obs.close()
"""
)
