"""fully_shard whose weights do not depend on how many ranks there are.

for n in 1 2 3 4; do
    torchrun --standalone --nproc_per_node=$n examples/canonical_reduce_scatter.py
done

Prints the same digest each time, which is also that of canonical_all_reduce.py. Without GPUs give
every run as many threads: OMP_NUM_THREADS=1.
"""

import hashlib
import os

# Before anything uses cuBLAS; safest where the process is started.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import entrenar_py

MICRO_BATCHES, SAMPLES = 8, 16  # of every step, and of a micro-batch: the same for any world size

torch.use_deterministic_algorithms(True)
num_ranks = int(os.environ["WORLD_SIZE"])
on_gpus = torch.cuda.device_count() >= num_ranks
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpus else "gloo")
mesh = init_device_mesh(device.type, (num_ranks,))
torch.manual_seed(0)
layers = (torch.nn.Linear(10, 64), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(64, 1))
model = torch.nn.Sequential(*layers).to(device)
for layer in (model[0], model[3]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
reducer = entrenar_py.canonical_reduce_scatter(model, micro_batches=MICRO_BATCHES)

for step in range(20):
    draws = torch.Generator().manual_seed(step)
    inputs = torch.randn(MICRO_BATCHES, SAMPLES, 10, generator=draws)  # every rank cuts out its own
    for batch in reducer.fold(inputs[list(reducer.shards)].to(device)):
        torch.manual_seed(step * MICRO_BATCHES + reducer.shard)  # dropout, by step and shard
        targets = batch.sum(1, keepdim=True)
        loss = torch.nn.functional.mse_loss(model(batch), targets)  # not divided by anything
        loss.backward()  # type: ignore[no-untyped-call]
    reducer.clip_grad_norm_(1.0)
    optimizer.step()

weights = [one.full_tensor() for one in model.parameters() if isinstance(one, DTensor)]
if dist.get_rank() == 0:
    digest = hashlib.sha256(b"".join(one.detach().cpu().numpy().tobytes() for one in weights))
    print(digest.hexdigest()[:16], f"on {num_ranks} ranks")
dist.destroy_process_group()
