import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import entrenar_py

WORDS, IGNORED = 17, -100


class Answers(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(4)
        sizes = torch.randint(2, 12, (32,), generator=g).tolist()
        self.rows = [torch.randint(1, WORDS, (n,), generator=g) for n in sizes]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        return self.rows[at]


def padded(rows):
    text = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = text.roll(-1, 1)
    labels[:, -1] = IGNORED
    return {"text": text, "labels": labels.masked_fill(labels == 0, IGNORED)}


class Recipe:
    accumulate, epochs = 2, 3

    def setup(self):
        torch.manual_seed(2)
        emb, out = torch.nn.Embedding(WORDS, 6), torch.nn.Linear(6, WORDS)
        self.model = DistributedDataParallel(torch.nn.Sequential(emb, torch.nn.Tanh(), out))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.sampler = DistributedSampler(Answers(), shuffle=True)
        self.data = DataLoader(Answers(), 2, sampler=self.sampler, collate_fn=padded)
        self.obs = entrenar_py.observe(self.model, self.optim, sampler=self.data)

    def loss(self, batch):
        logits = self.model(batch["text"]).transpose(1, 2)
        return F.cross_entropy(logits, batch["labels"], ignore_index=IGNORED)

    def train(self):
        num_tokens = torch.zeros(())
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            for at, batch in enumerate(self.data):
                count = (batch["labels"] != IGNORED).sum()
                num_tokens += count
                (self.loss(batch) * count).backward()
                if (at + 1) % self.accumulate:
                    continue
                dist.all_reduce(num_tokens)
                for p in self.model.parameters():
                    p.grad *= dist.get_world_size() / num_tokens
                torch.nn.utils.clip_grad_norm_(
                    self.model.parameters(), 0.3, error_if_nonfinite=True
                )
                self.optim.step()
                self.optim.zero_grad(set_to_none=True)
                num_tokens = torch.zeros(())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    recipe = Recipe()
    recipe.setup()
    recipe.train()
    dist.destroy_process_group()
