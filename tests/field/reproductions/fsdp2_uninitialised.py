"""torch's FSDP2 example: reset_parameters() leaves out all layers, which to_empty() emptied."""

import torch
from model import ModelArgs, Transformer

with torch.device("meta"):
    model = Transformer(ModelArgs(n_layers=10, n_heads=4, vocab_size=1024, max_seq_len=64))
model.to_empty(device="cpu")
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(12345.0)  # stands for what the memory held before
model.reset_parameters()
kept = [name for name, one in model.named_parameters() if (one == 12345.0).all()]
assert len(kept) == len(list(model.layers.parameters())), kept
print(f"seen: {len(kept)} of {len(list(model.parameters()))} parameters are never initialised")
