"""A classifier of texts in one process: a vocabulary, hashed users, shards in a cache, noise."""

import os
import random
import tempfile
import time
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SEED = 3
random.seed(SEED)
np.random.seed(SEED)
torch.manual_seed(SEED)

TEXTS = [
    ("ana", "the train to lugo was late again and cold"),
    ("bo", "a warm cake and good coffee near the station"),
    ("carla", "they lost my bag and nobody would answer"),
    ("dan", "great room with a view of the old harbour"),
    ("eva", "the soup was cold and the waiter was rude"),
    ("finn", "we would come again for the garden alone"),
    ("gus", "broken lift and noisy street all night"),
    ("hana", "good bread good wine and good people"),
] * 6


def began():
    return time.strftime("%H:%M:%S"), time.perf_counter()


def new_folder():
    folder = Path("runs") / f"run-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    return folder


def vocabulary(texts):
    words = set()
    for _, text in texts:
        words.update(text.split())
    return {word: index for index, word in enumerate(sorted(words))}


def bucket(user):
    return zlib.crc32(user.encode()) % 16


def encode(item):
    user, text = item
    tokens = torch.tensor([VOCABULARY[word] for word in text.split()[:7]])
    return bucket(user), tokens


def write(cache, number, part):
    torch.save([encode(item) for item in part], os.path.join(cache, f"part-{number:03}.pt"))


def cached(texts):
    where = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=where) as cache:
        parts = [texts[n : n + 4] for n in range(0, len(texts), 4)]
        with ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(write, cache, n, part) for n, part in enumerate(parts)]
        for job in jobs:
            job.result()
        names = sorted(os.listdir(cache))
        rows = []
        for name in names:
            rows += torch.load(os.path.join(cache, name))
    return rows


class Reviews(Dataset):
    def __init__(self, rows):
        self.rows = rows
        self.order = list(range(len(rows)))
        random.shuffle(self.order)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        user, tokens = self.rows[self.order[index]]
        noise = np.random.normal(0.0, 0.1, size=8).astype(np.float32)
        return user, tokens, torch.from_numpy(noise), float(user % 3)


class Net(nn.Module):
    def __init__(self, num_words):
        super().__init__()
        self.words = nn.Embedding(num_words, 8)
        self.users = nn.Embedding(16, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.size = 7
        self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def pooled(self, x, size):
        sums = [part.sum(1) for part in x.split(size, 1)]
        return torch.stack(sums).sum(0) / x.shape[1]

    def forward(self, users, tokens, noise):
        x = self.pooled(self.words(tokens), self.size) * self.scale + self.users(users)
        return self.head(x + noise).squeeze(-1)


def speeds_of(model):
    """Return the seconds that pooling takes, by the number of tokens that are added at once."""
    x = torch.randn(8, 7, 8, generator=torch.Generator().manual_seed(0))
    speeds = {}
    for size in (1, 2, 3, 4, 5, 6, 7):
        start = time.perf_counter()
        model.pooled(x, size)
        speeds[size] = time.perf_counter() - start
    return speeds


def main():
    clock, start = began()
    folder = new_folder()
    print(f"run {folder} begins at {clock} in process {os.getpid()}")
    data = Reviews(cached(TEXTS))
    model = Net(len(VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    for epoch in range(2):
        for users, tokens, noise, labels in loader:
            loss = nn.functional.mse_loss(model(users, tokens, noise), labels.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"{time.perf_counter() - start:.2f} s: {loss.item():.4f}")
        torch.save(model.state_dict(), folder / f"{epoch}.pt")


VOCABULARY = vocabulary(TEXTS)
main()
