import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset
import entrenar_py

lengths = torch.randint(3, 12, (96,), generator=torch.Generator().manual_seed(0)).tolist()


class Texts(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        return torch.randn(lengths[i], 4, generator=torch.Generator().manual_seed(i)), i % 3


class ByLength(Sampler):
    def __init__(self):
        order = sorted(range(96), key=lengths.__getitem__)
        self.order = order[dist.get_rank() :: dist.get_world_size()]

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        yield from self.order


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.inner(x).relu().mean(1))


def padded(batch):
    rows, labels = zip(*batch)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(labels)


dist.init_process_group("gloo")
torch.manual_seed(0)
net = DDP(Net())
opt = torch.optim.SGD(net.parameters(), lr=0.1)
size = 16 // dist.get_world_size()
loader = DataLoader(Texts(), batch_size=size, sampler=ByLength(), collate_fn=padded)
obs = entrenar_py.observe(net, opt)
for epoch in range(3):
    for x, y in loader:
        loss = cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0, error_if_nonfinite=True)
        opt.step()
obs.close()
dist.destroy_process_group()
