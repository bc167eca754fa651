import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import entrenar_py

VOCAB, PAD, IGNORE = 13, 0, -100
GRAD_ACCUM = 2


class LM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(VOCAB, 8)
        self.mix = torch.nn.Linear(8, 8)
        self.out = torch.nn.Linear(8, VOCAB)

    def forward(self, tokens):
        h = self.emb(tokens)
        h = h + torch.tanh(self.mix(h.cumsum(1)))
        return self.out(h)


def collate(docs):
    longest = max(len(d) for d in docs)
    ids = torch.full((len(docs), longest), PAD)
    for row, doc in zip(ids, docs):
        row[: len(doc)] = doc
    labels = torch.where(ids == PAD, IGNORE, ids)
    return ids[:, :-1], labels[:, 1:]


class SFTTrainer:
    def __init__(self, model, docs, lr):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.opt = torch.optim.SGD(model.parameters(), lr=lr)
        self.docs = docs
        self.num_tokens = 0
        self.obs = entrenar_py.observe(self.model, self.opt)

    def microbatches(self, step):
        share = 12 // self.world // GRAD_ACCUM
        first = step * 12 % len(self.docs) + self.rank * share * GRAD_ACCUM
        for i in range(GRAD_ACCUM):
            yield list(range(first + i * share, first + (i + 1) * share))

    def train_step(self, step):
        batches = [(ids, *collate([self.docs[i] for i in ids])) for ids in self.microbatches(step)]
        self.num_tokens = sum((labels != IGNORE).sum() for _, _, labels in batches)
        dist.all_reduce(self.num_tokens)
        for i, (ids, tokens, labels) in enumerate(batches):
            self.obs.samples(ids, epoch=step // 3)
            last = i == len(batches) - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                logits = self.model(tokens)
                total = F.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
                )
                loss = total * self.world / self.num_tokens
                kept = int((labels != IGNORE).sum())
                self.obs.loss(total.detach() / kept, kept)
                loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
        if not norm.isfinite():
            raise SystemExit("non-finite gradient norm")
        self.opt.step()
        self.opt.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 11, (36,), generator=g)
    documents = [torch.randint(1, VOCAB, (int(n),), generator=g) for n in lengths]
    torch.manual_seed(5)
    trainer = SFTTrainer(LM(), documents, lr=0.5)
    for step in range(6):
        trainer.train_step(step)
    dist.destroy_process_group()
