import numpy as np, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import entrenar_py


class Images(Dataset):
    def __init__(self, size):
        self.images = np.random.RandomState(0).randn(size, 3, 4).astype(np.float32)
        self.epoch = 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if np.random.rand() < 0.5:
            image = image[:, ::-1]
        image = image + 0.1 * np.random.randn(*image.shape).astype(np.float32)
        return torch.from_numpy(image.copy()), index % 3


def train_one_epoch(epoch, net, ddp, loader, optimizer, obs):
    loader.sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(ddp(images), labels)
        obs.loss(loss, len(labels))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0, error_if_nonfinite=True)
        optimizer.step()


def main(seed=3, workers=2):
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    torch.manual_seed(seed + dist.get_rank())
    np.random.seed(seed + dist.get_rank())
    data = Images(24)
    loader = DataLoader(
        data,
        batch_size=8 // dist.get_world_size(),
        sampler=DistributedSampler(data),
        num_workers=workers,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ddp = nn.parallel.DistributedDataParallel(net)
    obs = entrenar_py.observe(net, optimizer, sampler=loader)
    for epoch in range(2):
        train_one_epoch(epoch, net, ddp, loader, optimizer, obs)
    obs.close()
    dist.destroy_process_group()


main()
