"""Language models that are tried with masks, left without them, or masked otherwise in a recompute.

`make twins` tests that the named check finds each bug for its reason. Right ones are judged by the
same two checks.
"""

from __future__ import annotations

from falsification.user_language_scripts import COLUMNS, STREAM
from falsification.user_trainers import Twin

WANTED = ("modes", "same_masks")
_STEPPED = "    optimizer.zero_grad(set_to_none=True)\n"

# A research loop that estimates the loss between its steps.
ESTIMATED = STREAM.replace(
    "for iter_num in",
    """@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(2)
    for k in range(2):
        x = data[k * block_size : (k + 1) * block_size][None]
        y = data[k * block_size + 1 : (k + 1) * block_size + 1][None]
        losses[k] = model.module(x, y)[1]
    model.train()
    return losses.mean()


for iter_num in""",
).replace(
    _STEPPED,
    f"{_STEPPED}    if iter_num == 1:\n        print('val loss', float(estimate_loss()))\n",
)
_TRAINED = "    model.train()\n    return"

# Columns of a text, as the word language model of torch's examples trains them: a pass after each
# part, in which the mode is set where the part begins.
WORDS = (
    COLUMNS.replace("nn.LSTM(12, 12)", "nn.LSTM(12, 12, num_layers=2, dropout=0.2)")
    .replace(
        "for batch, i in enumerate(range(0, 5 * bptt, bptt)):\n",
        """

def evaluate():
    model.eval()
    with torch.no_grad():
        output, _ = net(text[: bptt + 1], None)
        return criterion(output[:-columns], text[1 : bptt + 1].reshape(-1)).item()


columns = text.size(1)
for batch, i in enumerate(range(0, 5 * bptt, bptt)):
    if batch == 3:
        evaluate()
    model.train()
""",
    )
    .replace("[batch * columns + c for c in range(columns)[rank::world]]", "[batch * world + rank]")
)

# transformers' model in a class Trainer, which recomputes its layers.
TRAINER = """
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
"""

# The research loop, its blocks recomputed in several ways.
_BLOCKS = "        for block in self.h:\n            x = block(x)\n"
_CHECKPOINTED = (
    _BLOCKS,
    "        for block in self.h:\n"
    "            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)\n",
)
_IMPORTED = ("import torch.nn as nn\n", "import torch.nn as nn\nimport torch.utils.checkpoint\n")
_REENTRANT = (
    _BLOCKS,
    "        x = torch.utils.checkpoint.checkpoint_sequential(\n"
    "            self.h, 2, x, use_reentrant=True, preserve_rng_state=True\n"
    "        )\n",
)
# A checkpoint of one's own, as Megatron's is.
_OWN = (
    "class CausalSelfAttention",
    """class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x):
        ctx.run, ctx.random = run, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = ctx.run(x)
        torch.set_rng_state(now)
        torch.autograd.backward(out, grad)
        return None, x.grad


class CausalSelfAttention""",
)
_BY_OWN = (_BLOCKS, _BLOCKS.replace("block(x)", "Recomputed.apply(block, x)"))
_RECOMPUTED = "draws new random numbers"


def _twin(name: str, text: str, *changes: tuple[str, str], **fields: object) -> Twin:
    return Twin(
        name=f"modes: {name}",
        script="lm.py",
        text=text,
        changes=changes,
        wanted=WANTED,
        **fields,  # type: ignore[arg-type]
    )


BUGS = (
    _twin(
        "an estimate of the loss leaves the model without masks",
        ESTIMATED,
        (_TRAINED, "    return"),
        source="classic (eval() in a loop of one's own)",
        check="modes",
        step=2,
        words="it trains after an evaluation",
    ),
    _twin(
        "the loss is estimated with masks",
        ESTIMATED,
        ("    model.eval()\n", ""),
        source="minGPT #47 (a validation in training mode)",
        check="modes",
        words="in training mode, with dropout",
    ),
    _twin(
        "the mode is set before the parts, not for each",
        WORDS,
        ("    model.train()\n    data", "    data"),
        ("columns = text.size(1)\n", "columns = text.size(1)\nmodel.train()\n"),
        source="pytorch/examples word_language_model (model.train() before the epochs)",
        check="modes",
        step=3,
        words="it trains after an evaluation",
    ),
    _twin(
        "a trainer sets its mode once",
        TRAINER,
        ("                self.wrapped.train()\n", ""),
        ("        steps = 0\n", "        steps = 0\n        self.wrapped.train()\n"),
        source="transformers #33103",
        check="modes",
        step=2,
        words="it trains after an evaluation",
    ),
    _twin(
        "a trainer evaluates in training mode",
        TRAINER,
        ("        self.model.eval()\n", ""),
        source="classic (evaluate() without eval())",
        check="modes",
        words="in training mode, with dropout",
    ),
    _twin(
        "a checkpoint that doesn't preserve the generators",
        STREAM,
        _IMPORTED,
        (
            _CHECKPOINTED[0],
            _CHECKPOINTED[1].replace("=False)", "=False, preserve_rng_state=False)"),
        ),
        source="torch.utils.checkpoint: preserve_rng_state",
        check="same_masks",
        step=0,
        words=_RECOMPUTED,
    ),
    _twin(
        "parts of a sequence that don't preserve the generators",
        STREAM,
        _IMPORTED,
        (_REENTRANT[0], _REENTRANT[1].replace("state=True", "state=False")),
        source="torch.utils.checkpoint: preserve_rng_state",
        check="same_masks",
        step=0,
        words=_RECOMPUTED,
    ),
    _twin(
        "a recompute of one's own that leaves the generator as it is",
        STREAM,
        (_OWN[0], _OWN[1].replace("        torch.set_rng_state(ctx.random)\n", "")),
        _BY_OWN,
        source="RevTorch #7 (dropout in a reversible block)",
        check="same_masks",
        step=0,
        words=_RECOMPUTED,
    ),
    _twin(
        "a recompute of one's own keeps the state after the pass",
        STREAM,
        (
            _OWN[0],
            _OWN[1]
            .replace("ctx.run, ctx.random = run, torch.get_rng_state()", "ctx.run = run")
            .replace(
                "            return run(x)\n",
                "            out = run(x)\n        ctx.random = torch.get_rng_state()\n"
                "        return out\n",
            ),
        ),
        _BY_OWN,
        source="classic (a state that is read too late)",
        check="same_masks",
        step=0,
        words=_RECOMPUTED,
    ),
    _twin(
        "a trainer's settings turn the preserving off",
        TRAINER,
        ('{"use_reentrant": False}', '{"use_reentrant": False, "preserve_rng_state": False}'),
        source="transformers: gradient_checkpointing_kwargs",
        check="same_masks",
        step=0,
        words=_RECOMPUTED,
    ),
)

VARIANTS = (
    _twin("right: the loss is estimated without masks", ESTIMATED),
    _twin("right: the mode is set where a part begins", WORDS),
    _twin("right: a trainer that evaluates, and recomputes its layers", TRAINER),
    _twin("right: blocks that are recomputed", STREAM, _IMPORTED, _CHECKPOINTED),
    _twin("right: parts of a sequence", STREAM, _IMPORTED, _REENTRANT),
    _twin("right: a recompute of one's own", STREAM, _OWN, _BY_OWN),
)
