"""Scripts at an end: of a loader that is read ahead, and of a training whose best weights are kept.

`make twins` tests that each bug is found at its place, and that the right scripts are left alone.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

# Windows of batches are fetched, since their labels are counted before the first pass.
TAGGER = """\
import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

import entrenar_py

WINDOW, EPOCHS = 2, 2


class Ahead:
    # Knows that a batch is the last one, as it has looked for another.
    def __init__(self, loader):
        self.loader, self.ended = loader, False

    def __iter__(self):
        self.ended, batches = False, iter(self.loader)
        batch = next(batches)
        for following in batches:
            yield batch
            batch = following
        self.ended = True
        yield batch


class Engine:
    def __init__(self, net, loader):
        self.ddp, self.loader = nn.parallel.DistributedDataParallel(net), Ahead(loader)
        self.opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
        self.calls = 0

    def learn(self, loss_of, batch):
        self.calls += 1
        self.is_full = self.calls % WINDOW == 0 or self.loader.ended
        if self.is_full:
            loss_of(self.ddp, batch).backward()
            nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0, error_if_nonfinite=True)
            self.opt.step()
            self.opt.zero_grad()
        else:
            with self.ddp.no_sync():
                loss_of(self.ddp, batch).backward()


def rows(count):
    draw = torch.Generator().manual_seed(3)
    for length in torch.randint(3, 11, (count,), generator=draw).tolist():
        tokens = torch.randint(1, 30, (length,), generator=draw)
        yield tokens, torch.where(tokens % 4 == 0, -100, tokens % 3)


def collate(batch):
    tokens, labels = zip(*batch)
    return pad_sequence(tokens, True), pad_sequence(labels, True, -100)


dist.init_process_group("gloo")
torch.manual_seed(8)
net = nn.Sequential(nn.Embedding(30, 12), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 3))
data = [*rows(48)]
sampler = DistributedSampler(data)
loader = DataLoader(data, 3, sampler=sampler, collate_fn=collate)
engine = Engine(net, loader)
obs = entrenar_py.observe(engine.ddp, engine.opt, sampler=loader)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    batches = iter(engine.loader)
    while window := [*itertools.islice(batches, WINDOW)]:
        known = sum((labels != -100).sum() for _, labels in window)
        dist.all_reduce(known)

        def loss_of(ddp, batch):
            scores = ddp(batch[0]).flatten(0, 1)
            loss = F.cross_entropy(scores, batch[1].flatten(), reduction="sum")
            return loss * dist.get_world_size() / known

        for batch in window:
            engine.learn(loss_of, batch)
obs.close()
dist.destroy_process_group()
"""

# Early stopping by a held-out part. The best weights are tested once training is over.
FORECASTER = """\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py


class Patience:
    def __init__(self, path):
        self.path, self.best, self.left = path, float("inf"), 3

    def __call__(self, score, net):
        if score < self.best:
            self.best, self.left = score, 3
            if dist.get_rank() == 0:
                torch.save(net.state_dict(), self.path)
        else:
            self.left -= 1
        return self.left == 0


class Experiment:
    def __init__(self, folder):
        torch.manual_seed(2)
        self.path = os.path.join(folder, "best.pt")
        self.net = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 2))
        self.ddp = nn.parallel.DistributedDataParallel(self.net)
        series = torch.sin(torch.arange(100) / 5) + 0.1 * torch.randn(100)
        windows = series.unfold(0, 10, 1)
        self.held_out = windows[64:]
        self.data = TensorDataset(windows[:64, :8], windows[:64, 8:])
        torch.manual_seed(2 + dist.get_rank())

    def score(self):
        self.net.eval()
        with torch.no_grad():
            mean = (self.net(self.held_out[:, :8]) - self.held_out[:, 8:]).square().mean()
        self.net.train()
        return mean.item()

    def fit(self):
        opt = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        sampler = DistributedSampler(self.data)
        loader = DataLoader(self.data, batch_size=8, sampler=sampler)
        patience = Patience(self.path)
        obs = entrenar_py.observe(self.ddp, opt, sampler=loader)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for x, y in loader:
                opt.zero_grad(set_to_none=True)
                loss = (self.ddp(x) - y).square().mean()
                obs.loss(loss, len(x))
                loss.backward()
                nn.utils.clip_grad_norm_(self.net.parameters(), 9.0, error_if_nonfinite=True)
                opt.step()
            if patience(self.score(), self.net):
                break
        obs.close()
        dist.barrier()

    def test(self):
        self.net.load_state_dict(torch.load(self.path))
        print("test", self.score())


dist.init_process_group("gloo")
os.makedirs("kept", exist_ok=True)
experiment = Experiment("kept")
experiment.fit()
experiment.test()
dist.destroy_process_group()
"""

_BY_COUNT = (" == 0 or self.loader.ended", " == 0")
_LEARNED = "            engine.learn(loss_of, batch)\n"
_AVERAGED = (
    _BY_COUNT,
    ("WINDOW, EPOCHS = 2, 2", "WINDOW, EPOCHS = 2, 6"),
    (
        "engine = Engine(net, loader)\n",
        "mean = torch.optim.swa_utils.AveragedModel(net)\nengine = Engine(net, loader)\n",
    ),
)
_TO_MEAN = f"{_LEARNED}    if epoch > 1:\n        mean.update_parameters(net)\n"

BUGS = (
    Twin(
        name="ends: rank 0 goes on from the mean of the last epochs' weights",
        script="tagger.py",
        text=TAGGER,
        source="classic (an average that is swapped in, and not swapped back)",
        changes=(
            *_AVERAGED,
            (
                _LEARNED,
                f"{_TO_MEAN}        if dist.get_rank() == 0:\n"
                "            net.load_state_dict(mean.module.state_dict())\n",
            ),
        ),
        check="replica_identity",
        words="outside of the optimizer",
    ),
    Twin(
        name="ends: an engine steps with each batch of a window once the loader has ended",
        script="tagger.py",
        text=TAGGER,
        source="accelerate (sync_with_dataloader, and a window that is fetched before)",
        changes=(),
        check="weighting",
        step=3,
        words="each divide their losses by the",
    ),
)

OPEN = (
    Twin(
        name="ends: a resume that looks in another folder, and a test of the best weights",
        script="forecaster.py",
        text=FORECASTER,
        source="classic (a path that is composed twice)",
        changes=(
            (
                "experiment.fit()\n",
                'if os.path.exists("kept/kept/best.pt"):\n'
                '    experiment.net.load_state_dict(torch.load("kept/kept/best.pt"))\n'
                "experiment.fit()\n",
            ),
        ),
        check="resume",
        verdict="inconclusive",
        words="with its initial weights",
    ),
)

VARIANTS = (
    Twin(
        name="ends: an engine that counts batches alone steps once in a window",
        script="tagger.py",
        text=TAGGER,
        changes=(_BY_COUNT,),
    ),
    Twin(
        name="ends: a mean of the last epochs' weights, from the third one on",
        script="tagger.py",
        text=TAGGER,
        changes=(*_AVERAGED, (_LEARNED, _TO_MEAN)),
    ),
    Twin(
        name="ends: the best weights are loaded for a test alone",
        script="forecaster.py",
        text=FORECASTER,
        changes=(),
    ),
)
