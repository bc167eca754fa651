"""DeepSpeed's loader draws its samples in the same order in every epoch."""

import os
import tempfile

import deepspeed
import torch

deepspeed.ops.__compatible_ops__.clear()  # no collectives of its own, which it would compile
os.environ["LOCAL_RANK"] = "0"
folder = tempfile.mkdtemp()
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/x", rank=0, world_size=1)
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
model = torch.nn.Linear(1, 1)
_, _, loader, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    training_data=[*torch.arange(8.0).unsqueeze(1)],
    config={"train_batch_size": 2},
)
first, second = ([batch.flatten().tolist() for batch in loader] for _ in range(2))
assert first == second, (first, second)
print(f"seen: both epochs draw {first}")
