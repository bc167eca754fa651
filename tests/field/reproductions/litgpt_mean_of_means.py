"""litgpt's fine-tuning averages micro-batches that have unequal numbers of tokens, all alike."""

import torch
from litgpt.utils import chunked_cross_entropy

torch.manual_seed(0)
logits = torch.randn(4, 8, 10)
targets = torch.randint(10, (4, 8))
targets[2:, 4:] = -100  # two short samples, filled up


def gradient(micro_batch_size):
    leaf = logits.clone().requires_grad_(True)
    parts = [*zip(leaf.split(micro_batch_size), targets.split(micro_batch_size), strict=True)]
    for part, wanted in parts:  # as in litgpt/finetune/full.py
        (chunked_cross_entropy(part, wanted) / len(parts)).backward()
    return leaf.grad


whole, cut = gradient(4), gradient(2)
factors = [float((cut[row, 0] / whole[row, 0]).mean()) for row in (0, 2)]
assert abs(factors[0] - 0.75) < 1e-4
assert abs(factors[1] - 1.5) < 1e-4
print(
    "seen: in two micro-batches instead of one, a token of a long sample counts "
    f"{factors[0]:.2f} times as much, one of a short sample {factors[1]:.2f} times"
)
