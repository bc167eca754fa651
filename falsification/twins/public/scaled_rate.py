import math, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py

WARMUP, EPOCHS, BATCH = 1, 3, 8


def adjust_learning_rate(optimizer, epoch, base):
    if epoch < WARMUP:
        rate = base * (epoch + 0.1) / WARMUP
    else:
        rate = base * 0.5 * (1 + math.cos(math.pi * (epoch - WARMUP) / (EPOCHS - WARMUP)))
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


dist.init_process_group("gloo")
torch.manual_seed(0)
rows = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(rows, rows[:, :3].argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)
net = DDP(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)))
base = 0.5 * BATCH * dist.get_world_size() / 256
head = {"params": net.module[2].parameters(), "lr_scale": 0.5}
opt = torch.optim.AdamW([{"params": net.module[0].parameters()}, head], lr=base)
obs = entrenar_py.observe(net, opt)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        adjust_learning_rate(opt, epoch + i / len(loader), base)
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
        opt.step()
obs.close()
dist.destroy_process_group()
