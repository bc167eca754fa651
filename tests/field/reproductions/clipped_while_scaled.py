"""clip_grad_norm_ before GradScaler.unscale_: the gradient is clipped to a 65,536th of the norm."""

import torch


def moved(scaled):
    """Return how far one step of SGD with rate 1 moves the weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)  # its scale is 2^16 at the start
    scaler.scale(model(torch.randn(16, 8)).square().mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as in _run_batch() of trainer.py
    scaler.step(optimizer)
    after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return (after - before).norm().item()


plain, scaled = moved(scaled=False), moved(scaled=True)
assert scaled < plain / 1000, (plain, scaled)
print(f"seen: clipped to 1, a step moves the weights by {plain:.2g}; with scaling by {scaled:.2g}")
