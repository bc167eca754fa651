import os, sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed, torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py

STAGE, ACCUMULATION, SHORT, CLIP = 2, 2, False, 0.5
deepspeed.ops.__compatible_ops__.clear()  # no collectives of its own, which it would compile


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 12)
        self.mix, self.norm, self.out = nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 5)

    def forward(self, ids):
        return self.out(self.norm(torch.relu(self.mix(self.words(ids).mean(1)))))


deepspeed.init_distributed("gloo", verbose=False)
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(7)
ids = torch.randint(0, 32, (64, 6))
data = TensorDataset(ids, ids.sum(1) % 5)
with deepspeed.zero.Init(enabled=STAGE == 3):
    bag = Bag()
plain = [p for name, p in bag.named_parameters() if "bias" in name or "norm" in name]
decayed = [p for name, p in bag.named_parameters() if "bias" not in name and "norm" not in name]
adam = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=3e-3
)
size = 16 // world // ACCUMULATION
engine, optimizer, *_ = deepspeed.initialize(
    model=bag,
    optimizer=adam,
    config={
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": STAGE},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": SHORT},
    },
)
sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=1)
loader = DataLoader(data, batch_size=size, sampler=sampler)
first = 0
if os.path.exists(f"{sys.argv[2]}/latest"):
    _, state = engine.load_checkpoint(sys.argv[2])
    first = state["epoch"] + 1
obs = entrenar_py.observe(engine, optimizer, sampler=loader, step=engine.global_steps)
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for tokens, labels in loader:
        loss = nn.functional.cross_entropy(engine(tokens).float(), labels)
        obs.loss(loss, len(labels))
        engine.backward(loss)
        engine.step()
        if engine.global_steps >= int(sys.argv[1]):
            break
    if engine.global_steps >= int(sys.argv[1]):
        break
    engine.save_checkpoint(sys.argv[2], client_state={"epoch": epoch})
obs.close()
