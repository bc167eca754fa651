"""OpenCLIP's ClipLoss under DDP, by its default: gradients beside those of one process."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from open_clip.loss import ClipLoss
from torch.nn.parallel import DistributedDataParallel


def gradient(model, pairs, loss_fn):
    model.zero_grad()
    image, text = (torch.nn.functional.normalize(model(part), dim=-1) for part in pairs)
    loss_fn(image, text, logit_scale=torch.tensor(10.0)).backward()
    return next(model.parameters()).grad.clone()


def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model, pairs = torch.nn.Linear(6, 4), torch.randn(2, 8, 6)
    single = gradient(model, pairs, ClipLoss())
    ddp, mine = DistributedDataParallel(model), pairs[:, rank::2]
    both = {"local_loss": True, "gather_with_grad": True}
    losses = [ClipLoss(rank=rank, world_size=2, **options) for options in ({}, both)]
    default, local = ((gradient(ddp, mine, loss) / single).mean().item() for loss in losses)
    assert abs(default - 0.5) + abs(local - 1) < 1e-3, (default, local)
    if rank == 0:
        print(f"seen: {default:.3f} of it by default, {local:.3f} with --local-loss and its like")


if __name__ == "__main__":
    mp.spawn(train, (tempfile.mktemp(),), nprocs=2)
