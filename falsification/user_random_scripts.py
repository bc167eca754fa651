"""Scripts that draw random numbers, in the styles in which people write them: all are right."""

from __future__ import annotations

# A Trainer with _run_batch, as in torch's tutorials; noise and timesteps are drawn in the loop.
DIFFUSION = """\
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py

SEED, STEPS = 7, 50


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(STEPS, 8)
        self.inner = nn.Sequential(nn.Linear(14, 16), nn.SiLU(), nn.Linear(16, 6))

    def forward(self, noisy, t):
        return self.inner(torch.cat([noisy, self.time(t)], 1))


class Trainer:
    def __init__(self, net, loader):
        self.net, self.loader, self.ddp = net, loader, DDP(net)
        self.opt = torch.optim.SGD(net.parameters(), lr=0.05)
        self.obs = entrenar_py.observe(net, self.opt, sampler=loader)

    def _run_batch(self, x):
        t = torch.randint(0, STEPS, (len(x),))
        noise = torch.randn_like(x)
        keep = (1 - t / STEPS).sqrt()[:, None]
        noisy = keep * x + (1 - keep**2).sqrt() * noise
        loss = (self.ddp(noisy, t) - noise).square().mean()
        self.obs.loss(loss, len(x))
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1e9, error_if_nonfinite=True)
        self.opt.step()

    def train(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for (x,) in self.loader:
                self._run_batch(x)
        self.obs.close()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    data, net = TensorDataset(torch.randn(24, 6)), Denoiser()
    torch.manual_seed(SEED + rank)
    loader = DataLoader(data, batch_size=8 // world, sampler=DistributedSampler(data))
    trainer = Trainer(net, loader)
    trainer.train(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

# Functions and a batch by hand, as in nanoGPT; patches are masked in the forward pass.
MASKED = """\
import os, torch, torch.distributed as dist
from torch import nn
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1337)
data = torch.randn(20, 6, 4)


class MAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 8), nn.Linear(8, 4)
        self.mask_token = nn.Parameter(torch.zeros(8))

    def forward(self, patches):
        order = torch.rand(patches.shape[:2]).argsort(1)
        masked = (order < 3)[..., None]
        hidden = torch.where(masked, self.mask_token, self.encode(patches))
        error = (self.decode(hidden.tanh()) - patches).square() * masked
        return error.sum((1, 2)).mean()


model = MAE()
torch.manual_seed(1337 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ddp = nn.parallel.DistributedDataParallel(model)
obs = entrenar_py.observe(model, optimizer)


def get_batch(it):
    ids = [i % 20 for i in range(it * 4, it * 4 + 4)][rank::world]
    return ids, data[ids]


for it in range(10):
    ids, x = get_batch(it)
    obs.samples(ids, epoch=it // 5)
    loss = ddp(x)
    obs.loss(loss, len(ids))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if not all(p.grad.isfinite().all() for p in model.parameters()):
        raise SystemExit("gradients are not finite")
    optimizer.step()
obs.close()
dist.destroy_process_group()
"""

# A data set of its own that augments with numpy, in the loader's workers.
AUGMENTED = """\
import numpy as np, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import entrenar_py


class Images(Dataset):
    def __init__(self, size):
        self.images = np.random.RandomState(0).randn(size, 3, 4).astype(np.float32)
        self.epoch = 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if np.random.rand() < 0.5:
            image = image[:, ::-1]
        image = image + 0.1 * np.random.randn(*image.shape).astype(np.float32)
        return torch.from_numpy(image.copy()), index % 3


def train_one_epoch(epoch, net, ddp, loader, optimizer, obs):
    loader.sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(ddp(images), labels)
        obs.loss(loss, len(labels))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0, error_if_nonfinite=True)
        optimizer.step()


def main(seed=3, workers=2):
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    torch.manual_seed(seed + dist.get_rank())
    np.random.seed(seed + dist.get_rank())
    data = Images(24)
    loader = DataLoader(
        data,
        batch_size=8 // dist.get_world_size(),
        sampler=DistributedSampler(data),
        num_workers=workers,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ddp = nn.parallel.DistributedDataParallel(net)
    obs = entrenar_py.observe(net, optimizer, sampler=loader)
    for epoch in range(2):
        train_one_epoch(epoch, net, ddp, loader, optimizer, obs)
    obs.close()
    dist.destroy_process_group()


main()
"""

# Every rank draws the indices and the noise of the whole batch, and takes its part.
WHOLE_BATCH = """\
import torch, torch.distributed as dist
from torch import nn
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = torch.randn(32, 5)
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5))
ddp = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
obs = entrenar_py.observe(net, optimizer)


def batches(num_epochs, size=8):
    for epoch in range(num_epochs):
        order = torch.randperm(32)
        for chosen in order.split(size):
            noise = torch.randn(size, 5)
            mine = slice(rank * size // world, (rank + 1) * size // world)
            yield epoch, chosen[mine], noise[mine]


for epoch, chosen, noise in batches(2):
    clean = data[chosen]
    obs.samples(chosen.tolist(), epoch=epoch)
    loss = nn.functional.mse_loss(ddp(clean + 0.3 * noise), clean)
    obs.loss(loss, len(chosen))
    optimizer.zero_grad()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    optimizer.step()
obs.close()
dist.destroy_process_group()
"""

# torch's tutorial of elastic training: it goes on from snapshot.pt in its working folder, if any.
SNAPSHOT = """\
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py


class Trainer:
    def __init__(self, model, data, optimizer, save_every, snapshot_path):
        self.rank, self.model, self.data = int(os.environ["RANK"]), model, data
        self.optimizer, self.save_every = optimizer, save_every
        self.epochs_run, self.snapshot_path = 0, snapshot_path
        if os.path.exists(snapshot_path):
            snapshot = torch.load(snapshot_path, weights_only=True)
            model.load_state_dict(snapshot["model"])
            self.epochs_run = snapshot["epochs"]
        self.ddp = DDP(model)
        self.obs = entrenar_py.observe(model, optimizer, sampler=data)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.ddp(source), targets)
        self.obs.loss(loss, len(source))
        loss.backward()
        if any(not p.grad.isfinite().all() for p in self.model.parameters()):
            raise RuntimeError("the gradient is not finite")
        self.optimizer.step()

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self.data.sampler.set_epoch(epoch)
            for source, targets in self.data:
                self._run_batch(source, targets)
            if self.rank == 0 and epoch % self.save_every == 0:
                state = {"model": self.model.state_dict(), "epochs": epoch + 1}
                torch.save(state, self.snapshot_path)


def main(save_every=1, total_epochs=3, batch_size=8, snapshot_path="snapshot.pt"):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(24, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    share = batch_size // dist.get_world_size()
    loader = DataLoader(data, batch_size=share, sampler=DistributedSampler(data))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = Trainer(model, loader, optimizer, save_every, snapshot_path)
    trainer.train(total_epochs)
    trainer.obs.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

# A loop that saves every rank's generator, and restores it before its next draw.
RESTORED = """\
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py

STEPS, HOME = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(24, 4)
data = TensorDataset(x)
net = nn.Linear(4, 4)
torch.manual_seed(rank)
opt = torch.optim.Adam(net.parameters(), 1e-2)
path, done, rng = os.path.join(HOME, "ckpt.pt"), 0, None
if os.path.exists(path):
    ck = torch.load(path, weights_only=True)
    net.load_state_dict(ck["net"])
    opt.load_state_dict(ck["opt"])
    done = ck["step"]
    rng = ck["rng"][rank]
ddp = nn.parallel.DistributedDataParallel(net)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8 // world, sampler=sampler)
obs = entrenar_py.observe(net, opt, sampler=loader, step=done)
step = 0
for epoch in range(100):
    sampler.set_epoch(epoch)
    if step == done and rng is not None:  # the loader draws a seed of its own
        torch.set_rng_state(rng)
        rng = None
    for (a,) in loader:
        if step < done:
            step += 1
            continue
        if step >= STEPS:
            break
        if rng is not None:
            torch.set_rng_state(rng)
            rng = None
        noise = torch.randn_like(a)
        loss = (ddp(a + noise) - noise).square().mean()
        obs.loss(loss, len(a))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 9.0, error_if_nonfinite=True)
        opt.step()
        step += 1
        states = [torch.zeros_like(torch.get_rng_state()) for _ in range(world)]
        dist.all_gather(states, torch.get_rng_state())
        if rank == 0:
            torch.save(
                {"net": net.state_dict(), "opt": opt.state_dict(), "step": step, "rng": states},
                path + ".new",
            )
            os.replace(path + ".new", path)
        dist.barrier()
    if step >= STEPS:
        break
obs.close()
dist.destroy_process_group()
"""
