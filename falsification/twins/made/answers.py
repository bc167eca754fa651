import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(21)

questions = torch.randint(2, 15, (36, 3), generator=torch.Generator().manual_seed(1))
shares = DistributedSampler(questions, seed=3)
loader = DataLoader(questions, batch_size=6 // world, sampler=shares)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mixed, self.out = nn.Embedding(15, 8), nn.GRU(8, 16, batch_first=True), nn.Linear(16, 15)

    def forward(self, ids):
        return self.out(self.mixed(self.words(ids))[0]).log_softmax(-1)


policy = DDP(Policy())
optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
obs = entrenar_py.observe(policy, optimizer)
torch.manual_seed(70 + rank)


@torch.no_grad()
def answered(asked, length=6):
    ids = asked.repeat_interleave(4, 0)
    for _ in range(length):
        chances = policy.module(ids)[:, -1].exp()
        ids = torch.cat([ids, torch.multinomial(chances, 1)], 1)
    return ids


for epoch in range(2):
    shares.set_epoch(epoch)
    for asked in loader:
        ids = answered(asked)
        answers = ids[:, 3:]
        ended = (answers < 4).int()
        mask = (ended.cumsum(1) - ended == 0).float()
        worth = ((answers == ids[:, :1]) * mask).sum(1) - 0.1 * mask.sum(1)
        gain = (worth - worth.view(-1, 4).mean(1).repeat_interleave(4))[:, None]
        tokens = mask.sum()
        dist.all_reduce(tokens)
        before = None
        for _ in range(2):
            said = policy(ids)[:, 2:-1].gather(-1, answers[..., None]).squeeze(-1)
            before = said.detach() if before is None else before
            ratio = (said - before).exp()
            loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            optimizer.zero_grad()
            ((loss * mask).sum() * world / tokens).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1e3, error_if_nonfinite=True)
            optimizer.step()
dist.destroy_process_group()
