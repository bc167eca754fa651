import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import entrenar_py

distributed.init_process_group("gloo")
me, everyone = distributed.get_rank(), distributed.get_world_size()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, pixels):
        return self.head(self.backbone(pixels))


def average(state, bucket):
    tensor = bucket.buffer().div_(everyone)
    return distributed.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0])


torch.manual_seed(7)
images = torch.randn(32, 8)
labels = images[:, :3].argmax(1)
net = Classifier()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
ddp = DDP(net)
ddp.register_comm_hook(None, average)
sampler = torch.utils.data.DistributedSampler(images, everyone, me, shuffle=True, seed=3)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(images, labels), batch_size=8 // everyone, sampler=sampler
)
obs = entrenar_py.observe(ddp, optimizer, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for pixels, wanted in loader:
        loss = nn.functional.cross_entropy(ddp(pixels), wanted)
        obs.loss(loss, len(wanted))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e6, error_if_nonfinite=True)
        optimizer.step()
distributed.destroy_process_group()
