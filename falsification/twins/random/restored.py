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
