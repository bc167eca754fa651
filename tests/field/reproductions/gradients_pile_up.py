"""A loop without zero_grad(), as in torch's tensor and sequence parallel examples."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)
for step in range(10):  # the loop of tensor_parallel_example.py
    torch.manual_seed(step)
    output = model(torch.rand(20, 10))
    output.sum().backward()
    optimizer.step()
bias = model[2].bias.grad  # the sum of one batch's outputs has gradient 20
assert (bias == 200).all(), bias
print(f"seen: the last bias has gradient {bias[0]:g} after 10 batches of 20 rows each")
