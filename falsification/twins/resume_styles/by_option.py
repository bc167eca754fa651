# Goes on from a file that its option names, and keeps weights for others in a second file.
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--output-dir", default="out")
parser.add_argument("--resume", default="", metavar="PATH", help="a checkpoint (last.pt)")
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(4)
data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
net = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.7**epoch)
first = 0
if args.resume:
    kept = torch.load(args.resume, weights_only=True)
    net.load_state_dict(kept["net"])
    optimizer.load_state_dict(kept["optimizer"])
    schedule.load_state_dict(kept["schedule"])
    first = kept["epoch"] + 1
obs = entrenar_py.observe(model, optimizer)
sampler = DistributedSampler(data, seed=6)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(first, args.epochs):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0, error_if_nonfinite=True)
        optimizer.step()
    schedule.step()
    if dist.get_rank() == 0:
        os.makedirs(args.output_dir, exist_ok=True)
        kept = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        kept["schedule"] = schedule.state_dict()
        torch.save(kept, f"{args.output_dir}/last.pt")
        torch.save(net.state_dict(), f"{args.output_dir}/weights.pt")
    dist.barrier()
obs.close()
dist.destroy_process_group()
