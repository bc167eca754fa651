"""The first token's output changes with the last token: the mask of floats is added to scores."""

from types import SimpleNamespace

import torch
from model import MultiheadAttentionLayer

torch.manual_seed(0)
settings = SimpleNamespace(n_embd=16, n_head=2, block_size=8, attn_pdrop=0.0, resid_pdrop=0.0)
layer = MultiheadAttentionLayer(settings).eval()
rows = torch.randn(1, 8, 16)
others = rows.clone()
others[:, -1] = torch.randn(16)
with torch.no_grad():
    change = (layer(rows)[:, 0] - layer(others)[:, 0]).abs().max()
print(f"seen: with another last token the first one's output changes by {float(change):.2f}")
assert change > 0.01
