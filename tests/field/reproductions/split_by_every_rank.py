"""random_split() on each rank without a seed: one rank trains on what another one tests."""

import torch
from torch.utils.data import random_split

splits = []
for _rank in range(2):
    torch.seed()  # as in a process of its own
    train, test = random_split(range(100), [90, 10])  # get_train_objs() in main.py
    splits.append((set(train.indices), set(test.indices)))
leaked = splits[0][0] & splits[1][1]
assert leaked, "both ranks drew the same split"
print(f"seen: {len(leaked)} of rank 1's 10 test samples are training samples of rank 0")
