# Two networks and two optimizers in one record of states, and a generator that yields batches.
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import entrenar_py


class States(dict):
    def save(self, path):
        kept = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in self.items()}
        torch.save(kept, path + ".new")
        os.replace(path + ".new", path)

    def restore(self, path):
        for key, kept in torch.load(path, weights_only=False).items():
            if hasattr(self[key], "load_state_dict"):
                self[key].load_state_dict(kept)
            else:
                self[key] = kept


def batches(generator):
    epoch = 0
    while True:
        order = torch.randperm(24, generator=generator).tolist()
        for at in range(0, 24, 8):
            yield epoch, order[at : at + 8][rank::world]
        epoch += 1


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
maker = nn.Linear(3, 4)
critic = nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(), nn.Linear(5, 1))
both = nn.ModuleList([maker, critic])
for_maker = torch.optim.RMSprop(maker.parameters(), lr=1e-3, momentum=0.5)
for_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
decay = torch.optim.lr_scheduler.StepLR(for_critic, 2, 0.5)
real, noise = torch.randn(24, 4), torch.randn(24, 3)
states = States(
    maker=maker, critic=critic, for_maker=for_maker, for_critic=for_critic, decay=decay, step=0
)
path = os.path.join(sys.argv[2], "states.pth")
if os.path.exists(path):
    states.restore(path)
obs = entrenar_py.observe(both, [for_maker, for_critic], step=states["step"])
stream = batches(torch.Generator().manual_seed(9))
for _ in range(states["step"]):
    next(stream)
while states["step"] < int(sys.argv[1]):
    epoch, ids = next(stream)
    obs.samples(ids, epoch=epoch)
    made = maker(noise[ids])
    loss = (1 - critic(real[ids])).relu().mean() + (1 + critic(made)).relu().mean()
    obs.loss(loss, len(ids))
    both.zero_grad()
    loss.backward()
    for parameter in both.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    for parameter in maker.parameters():
        parameter.grad.neg_()
    for_critic.step()
    for_maker.step()
    decay.step()
    states["step"] += 1
    if rank == 0:
        states.save(path)
    dist.barrier()
obs.close()
dist.destroy_process_group()
