"""DeepSpeed's engine with its partitions (ZeRO 1 to 3): right loops, and broken ones.

`make field` tries DeepSpeed, too. These are tried where it is installed: by `make twins`, and by
the tests of `tests/check/command/test_integrations.py`.
"""

from __future__ import annotations

import importlib.util

from falsification.user_trainers import Twin

# Two groups of parameters, accumulation and clipping by the engine, and its own checkpoints.
LOOP = """\
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
"""

# All checks but that of NaNs: these scripts look for none.
_WANTED = (
    *("coverage", "determinism", "liveness", "optimizer_state", "parity", "randomness"),
    *("replica_identity", "resume", "step_rule", "weighting"),
)


def _twin(
    name: str,
    stage: int,
    *changes: tuple[str, str],
    check: str = "",
    verdict: str = "falsified",
    words: str = "",
) -> Twin:
    return Twin(
        name=f"ZeRO-{stage}: {name}",
        script="zero_loop.py",
        text=LOOP.replace("= 2, 2, False, 0.5", f"= {stage}, 2, False, 0.5"),
        changes=changes,
        check=check,
        arguments=("{steps}", "{workdir}"),
        wanted=() if check else _WANTED,
        verdict=verdict,
        words=words,
    )


_SHORT = ("2, False, 0.5", "2, True, 0.5")
_NO_CLIP = ("2, False, 0.5", "2, False, 0.0")
VARIANTS = (
    *(_twin("a loop with two groups", stage) for stage in (1, 2, 3)),
    *(_twin("a loop in bfloat16", stage, _SHORT) for stage in (1, 2, 3)),
    _twin("a loop that doesn't clip", 2, _NO_CLIP),
    _twin(
        "ranks draw other first weights, and DeepSpeed broadcasts those of rank 0",
        3,
        ("torch.manual_seed(7)", "torch.manual_seed(7 + rank)"),
        ("ids = torch.randint(0, 32, (64, 6))", "ids = torch.arange(384).view(64, 6) % 31"),
    ),
)
BUGS = (
    _twin(
        "the loss is multiplied by the workers",
        1,
        _NO_CLIP,
        ("engine.backward(loss)", "engine.backward(loss * world)"),
        check="parity",
    ),
    _twin(
        "the script divides by the accumulation, as the engine does",
        2,
        ("ACCUMULATION, SHORT, CLIP = 2, 2,", "ACCUMULATION, SHORT, CLIP = 2, 4,"),
        ("engine.backward(loss)", "engine.backward(loss / ACCUMULATION)"),
        ("        obs.loss(loss, len(labels))\n", ""),  # else what it reports counts
        check="weighting",
    ),
    _twin(
        "ranks draw the same samples",
        2,
        ("num_replicas=world, rank=rank", "num_replicas=1, rank=0"),
        check="coverage",
    ),
    _twin(
        "a matrix is in no group",
        3,
        ('"params": decayed,', '"params": decayed[:-1],'),
        check="liveness",
    ),
    _twin(
        "the engine steps at boundaries only, which come by its steps",
        2,
        (
            "        engine.step()\n",
            "        if engine.is_gradient_accumulation_boundary():\n            engine.step()\n",
        ),
        check="liveness",
        verdict="inconclusive",  # a step may come later: how many passes it has is unknown
        words="no step was recorded",
    ),
    _twin(
        "a resume that restores no moments",
        3,
        (
            "engine.load_checkpoint(sys.argv[2])",
            "engine.load_checkpoint(sys.argv[2], load_optimizer_states=False)",
        ),
        check="resume",
    ),
)


def tried() -> tuple[Twin, ...]:
    """Return the scripts where DeepSpeed is installed, else none."""
    return (*BUGS, *VARIANTS) if importlib.util.find_spec("deepspeed") else ()
