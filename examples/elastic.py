"""Training that goes on when ranks die, with weights that don't depend on it.

torchrun --standalone --nproc_per_node=4 -m entrenar_py.supervise examples/elastic.py

Kill ranks while it runs (`pkill -KILL -n -f examples/elastic.py` ends the newest one): the digest
is the same each time, and that of `python examples/elastic.py`, which trains in one process. With
GPUs, CUBLAS_WORKSPACE_CONFIG=:4096:8 has to be in the environment.
"""

import hashlib
import os
import sys

import torch

import entrenar_py

MICRO_BATCHES, SAMPLES, STEPS = 8, 64, 300  # of a step, of a micro-batch, of the run

torch.set_num_threads(1)  # the same for any number of ranks
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))  # one GPU for each rank
    torch.cuda.set_device(device)
layers = (
    torch.nn.Linear(256, 512),
    torch.nn.Dropout(0.1),
    torch.nn.Tanh(),
    torch.nn.Linear(512, 1),
)
model = torch.nn.Sequential(*layers).to(device)  # not wrapped
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
trainer = entrenar_py.elastic(
    model, optimizer, micro_batches=MICRO_BATCHES, schedulers=[scheduler], deadline_s=10
)
seat = os.environ.get("RANK", "0")
print(f"seat {seat}: trains from step {trainer.step}, as rank {trainer.rank}", file=sys.stderr)

for step in trainer.steps(STEPS):
    draws = torch.Generator().manual_seed(step)
    inputs = torch.randn(MICRO_BATCHES, SAMPLES, 256, generator=draws)  # the same on all ranks
    for micro_batch in trainer.fold(list(inputs)):  # a rank gets its own micro-batches
        batch = micro_batch.to(device)
        loss = torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
        loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not trainer.commit():
        print(f"seat {seat}: repeats step {step} on {trainer.world_size} ranks", file=sys.stderr)

if trainer.rank == 0:
    weights = [one.detach().cpu().numpy().tobytes() for one in model.parameters()]
    print(hashlib.sha256(b"".join(weights)).hexdigest()[:16], f"on {trainer.world_size} ranks")
