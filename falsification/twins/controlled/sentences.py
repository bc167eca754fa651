import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

class Sentences(Dataset):
    def __init__(self, n=24):
        g = torch.Generator().manual_seed(2)
        sizes = torch.randint(3, 9, (n,), generator=g)
        self.rows = [torch.randint(1, 9, (int(size),), generator=g) for size in sizes]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return F.pad(self.rows[index], (0, 8 - len(self.rows[index])))


class Speller(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.drop, self.head = nn.Embedding(9, 12), nn.Dropout(0.3), nn.Linear(12, 9)

    def forward(self, letters):
        return self.head(self.drop(self.letters(letters)).cumsum(1).tanh())


def train(model, optimizer, loader):
    obs = entrenar_py.observe(model, optimizer, sampler=loader)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for letters in loader:
            wanted = letters[:, 1:]
            count = (wanted != 0).sum()
            dist.all_reduce(count)
            logits = model(letters)[:, :-1]
            spelt = F.cross_entropy(
                logits.transpose(1, 2), wanted, ignore_index=0, reduction="sum"
            )
            own = (wanted != 0).sum()
            obs.loss(spelt / own, own)
            optimizer.zero_grad()
            (spelt / count).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            nn.utils.clip_grad_norm_(model.parameters(), 1e9, error_if_nonfinite=True)
            optimizer.step()


torch.manual_seed(4)
model = Speller()
torch.manual_seed(40 + rank)
data = Sentences()
loader = DataLoader(data, 8 // world, sampler=DistributedSampler(data))
train(model, torch.optim.AdamW(model.parameters(), 1e-2), loader)
