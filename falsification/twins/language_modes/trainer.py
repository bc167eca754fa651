import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

import entrenar_py


class Texts(Dataset):
    def __init__(self, num, length=12):
        by = torch.Generator().manual_seed(8)
        self.rows = torch.randint(0, 31, (num, length), generator=by)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        return {"number": at, "input_ids": self.rows[at], "labels": self.rows[at]}


class Trainer:
    def __init__(self, model, train_set, eval_set, eval_every=2):
        self.model, self.eval_every = model, eval_every
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.wrapped = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.sampler = DistributedSampler(train_set, shuffle=True)
        self.train_loader = DataLoader(train_set, batch_size=4, sampler=self.sampler)
        self.eval_loader = DataLoader(eval_set, batch_size=4)
        self.obs = entrenar_py.observe(self.wrapped, self.optimizer)

    def training_step(self, batch):
        self.obs.samples(batch.pop("number").tolist(), epoch=self.epoch)
        loss = self.wrapped(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.inference_mode()
    def evaluate(self):
        self.model.eval()
        total = 0.0
        for batch in self.eval_loader:
            batch.pop("number")
            total += self.model(**batch).loss.item()
        return total / len(self.eval_loader)

    def train(self, epochs):
        steps = 0
        for self.epoch in range(epochs):
            self.sampler.set_epoch(self.epoch)
            for batch in self.train_loader:
                self.wrapped.train()
                self.training_step(batch)
                steps += 1
                if steps % self.eval_every == 0:
                    self.evaluate()
        self.obs.close()


dist.init_process_group("gloo")
torch.manual_seed(1)
config = GPT2Config(vocab_size=31, n_positions=16, n_embd=24, n_layer=2, n_head=2, use_cache=False)
torch.manual_seed(dist.get_rank())
torch.manual_seed(1)
Trainer(GPT2LMHeadModel(config), Texts(32), Texts(8)).train(1)
dist.destroy_process_group()
