import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset
import entrenar_py

class Pieces(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, i):
        notes = torch.randint(0, 40, (33,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": notes[:-1], "position_ids": torch.arange(32) % 16, "labels": notes[1:]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.notes, self.places = nn.Embedding(40, 16), nn.Embedding(16, 16)
        self.mix = nn.MultiheadAttention(16, 2, batch_first=True)
        self.before, self.after, self.head = nn.LayerNorm(16), nn.LayerNorm(16), nn.Linear(16, 40)

    def forward(self, input_ids, position_ids):
        x = self.notes(input_ids) + self.places(position_ids)
        later = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        n = self.before(x)
        x = x + self.mix(n, n, n, attn_mask=later, need_weights=False)[0]
        return self.head(self.after(x))


dist.init_process_group("gloo")
torch.manual_seed(0)
data = Pieces()
net = DDP(Model())
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8 // dist.get_world_size(), sampler=sampler)
obs = entrenar_py.observe(net, opt)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        y = batch.pop("labels").flatten()
        opt.zero_grad()
        cross_entropy(net(**batch).flatten(0, 1), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0, error_if_nonfinite=True)
        opt.step()
obs.close()
dist.destroy_process_group()
