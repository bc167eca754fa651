"""A small convolutional net in one process, whose loader has workers that augment pictures."""

import os
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, num_pictures):
        source = np.random.default_rng(5)
        self.pictures = source.normal(size=(num_pictures, 1, 12, 12)).astype(np.float32)
        self.labels = source.integers(0, 4, num_pictures)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        picture = self.pictures[index]
        rng = np.random.default_rng((7, index))
        if rng.random() < 0.5:
            picture = picture[:, :, ::-1].copy()
        noise = rng.normal(size=picture.shape).astype(np.float32)
        picture = picture + 0.1 * noise
        for _ in range(index % 7):  # some are larger on disk
            np.linalg.svd(np.ones((60, 60)))
        return torch.from_numpy(picture), int(self.labels[index])


def seed_worker(worker_id):
    np.random.seed(torch.initial_seed() % 2**32)
    print(f"worker {worker_id} is process {os.getpid()} since {time.time():.0f}")


def train():
    torch.manual_seed(1)
    generator = torch.Generator()
    generator.manual_seed(2)
    loader = DataLoader(
        Pictures(64),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        worker_init_fn=seed_worker,
        generator=generator,
        in_order=True,
    )
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for pictures, labels in loader:
        loss = nn.functional.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    train()
