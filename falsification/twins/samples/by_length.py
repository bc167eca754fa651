import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, DistributedSampler
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(8)
lengths = torch.randint(2, 9, (24,)).tolist()
sounds = [torch.randn(length, 3) for length in lengths]


def collate(sounds):
    sounds = sorted(sounds, key=len, reverse=True)
    pitches = torch.cat([sound.mean(1) for sound in sounds])
    return pad_sequence(sounds, batch_first=True), torch.tensor([*map(len, sounds)]), pitches


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(3, 10, batch_first=True), nn.Linear(10, 1)

    def forward(self, frames, lengths):
        packed = pack_padded_sequence(frames, lengths, batch_first=True)
        heard = nn.utils.rnn.unpack_sequence(self.gru(packed)[0])
        return self.head(torch.cat(heard)).squeeze(1)


sampler = DistributedSampler(sounds, seed=4)
loader = DataLoader(sounds, batch_size=8 // world, sampler=sampler, collate_fn=collate)
model = DDP(Listener())
optimizer = torch.optim.Adamax(model.parameters(), lr=5e-3)
obs = entrenar_py.observe(model, optimizer, sampler=loader)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for frames, lengths, pitches in loader:
        count = torch.tensor(float(len(pitches)))
        dist.all_reduce(count)
        loss = (model(frames, lengths) - pitches).abs().sum() * world / count
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 50.0, error_if_nonfinite=True)
        optimizer.step()
dist.destroy_process_group()
