"""DeepSpeed's load_checkpoint leaves its data loader at the start of the epoch."""

import os
import tempfile

import deepspeed
import torch

deepspeed.ops.__compatible_ops__.clear()  # no collectives of its own, which it would compile
os.environ["LOCAL_RANK"] = "0"
folder = tempfile.mkdtemp()
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/x", rank=0, world_size=1)
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


def batches(steps, resume):
    model = torch.nn.Linear(1, 1)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        training_data=[*torch.arange(8.0).unsqueeze(1)],
        config={"train_batch_size": 2},
    )
    if resume:
        engine.load_checkpoint(folder)
    drawn = []
    for _, batch in zip(range(steps), loader, strict=False):
        drawn.append(batch.flatten().tolist())
        engine.backward(engine(batch).mean())
        engine.step()
    engine.save_checkpoint(folder)
    return drawn


first, resumed = batches(2, resume=False), batches(2, resume=True)
assert first == resumed, (first, resumed)
print(f"seen: before the stop {first} are drawn, and again after the resume")
