import os, sys

import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import entrenar_py


class Tokens(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        row = torch.randint(20, (7,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row[:-1], "labels": row[1:]}


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.mix = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels):
        h = self.embed(input_ids)
        h = h + self.mix(h.cumsum(1) / torch.arange(1, h.shape[1] + 1).view(1, -1, 1).to(h.dtype))
        logits = self.head(self.norm(h)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Trainer:
    def __init__(self, steps, folder):
        self.steps, self.folder, self.step, self.epoch = steps, folder, 0, 0
        self.policy = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32)
        wrap = ModuleWrapPolicy({nn.Sequential})  # the tied head and table stay in one wrapper
        self.model = FullyShardedDataParallel(
            Causal(), auto_wrap_policy=wrap, mixed_precision=self.policy, use_orig_params=False,
            device_id=torch.device("cpu"),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, 12)
        self.sampler = DistributedSampler(Tokens(), seed=4)
        size = 8 // dist.get_world_size()
        self.loader = DataLoader(Tokens(), batch_size=size, sampler=self.sampler)
        if os.path.exists(os.path.join(folder, "meta.pt")):
            self.load()
        self.observation = entrenar_py.observe(
            self.model, self.optimizer, sampler=self.loader, scheduler=self.scheduler,
            step=self.step,
        )

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self):
        dcp.save(self.state(), checkpoint_id=os.path.join(self.folder, "shards"))
        if dist.get_rank() == 0:
            meta = {"step": self.step, "scheduler": self.scheduler.state_dict()}
            torch.save(meta, os.path.join(self.folder, "meta.pt"))
        dist.barrier()

    def load(self):
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(self.folder, "shards"))
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )
        meta = torch.load(os.path.join(self.folder, "meta.pt"))
        self.step = meta["step"]
        self.scheduler.load_state_dict(meta["scheduler"])

    def train(self):
        per_epoch = len(self.loader)
        self.model.train()
        while self.step < self.steps:
            self.sampler.set_epoch(self.step // per_epoch)
            done = self.step % per_epoch
            for number, batch in enumerate(self.loader):
                if number < done or self.step == self.steps:
                    continue
                loss = self.model(**batch)
                self.observation.loss(loss, len(batch["labels"]))
                loss.backward()
                self.model.clip_grad_norm_(1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad(set_to_none=True)
                self.step += 1
        self.save()


dist.init_process_group("gloo")
torch.manual_seed(7)
trainer = Trainer(int(sys.argv[1]), sys.argv[2])
trainer.train()
trainer.observation.close()
dist.destroy_process_group()
