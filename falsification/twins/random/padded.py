import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import entrenar_py

PAD = 9


class Texts(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(3)
        self.rows = [
            torch.randint(0, 9, (int(torch.randint(3, 9, (), generator=g)),), generator=g)
            for _ in range(n)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i]}


def collate(features):
    longest = max(len(f["input_ids"]) for f in features)
    ids = torch.full((len(features), longest), PAD)
    for row, f in zip(ids, features):
        row[: len(f["input_ids"])] = f["input_ids"]
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "labels": ids.masked_fill(ids == PAD, -100),
    }


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(10, 8, padding_idx=PAD), nn.Linear(8, 10)

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        h = self.emb(input_ids) * attention_mask[..., None]
        logits = self.head(h[:, :-1].tanh())
        return {
            "loss": nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
        }


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = LM()
    data = Texts(24)
    loader = DataLoader(data, 8 // world, sampler=DistributedSampler(data), collate_fn=collate)
    ddp = nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    obs = entrenar_py.observe(model, opt, sampler=loader)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            mine = (batch["labels"][:, 1:] != -100).sum()
            total = mine.clone()
            dist.all_reduce(total)
            out = ddp(**batch)
            obs.loss(out["loss"] / mine, mine)
            opt.zero_grad()
            (out["loss"] * world / total).backward()
            if not all(p.grad.isfinite().all() for p in model.parameters()):
                raise SystemExit(3)
            opt.step()
    obs.close()
    dist.destroy_process_group()


main()
