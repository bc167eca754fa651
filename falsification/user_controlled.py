"""Scripts that draw at random or couple samples, whose bugs show once that is controlled.

In their plain runs on several workers and on one, dropout draws other masks, or the loss of a share
is another one than that of a batch. `make twins` tests that each bug is found at its place, and
that the right scripts are left alone.
"""

from __future__ import annotations

from dataclasses import replace

from falsification.user_trainers import Twin

_HEAD = """\
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
"""

# Sentences of unequal lengths and dropout; gradients are reduced by hand.
SENTENCES = (
    _HEAD
    + """
class Sentences(Dataset):
    def __init__(self, n=24):
        g = torch.Generator().manual_seed(2)
        sizes = torch.randint(3, 9, (n,), generator=g)
        self.rows = [torch.randint(1, 9, (int(size),), generator=g) for size in sizes]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return F.pad(self.rows[index], (0, 8 - len(self.rows[index])))


class Speller(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.drop, self.head = nn.Embedding(9, 12), nn.Dropout(0.3), nn.Linear(12, 9)

    def forward(self, letters):
        return self.head(self.drop(self.letters(letters)).cumsum(1).tanh())


def train(model, optimizer, loader):
    obs = entrenar_py.observe(model, optimizer, sampler=loader)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for letters in loader:
            wanted = letters[:, 1:]
            count = (wanted != 0).sum()
            dist.all_reduce(count)
            logits = model(letters)[:, :-1]
            spelt = F.cross_entropy(
                logits.transpose(1, 2), wanted, ignore_index=0, reduction="sum"
            )
            own = (wanted != 0).sum()
            obs.loss(spelt / own, own)
            optimizer.zero_grad()
            (spelt / count).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            nn.utils.clip_grad_norm_(model.parameters(), 1e9, error_if_nonfinite=True)
            optimizer.step()


torch.manual_seed(4)
model = Speller()
torch.manual_seed(40 + rank)
data = Sentences()
loader = DataLoader(data, 8 // world, sampler=DistributedSampler(data))
train(model, torch.optim.AdamW(model.parameters(), 1e-2), loader)
"""
)

# A Trainer that leaves the loss to the model, as transformers' does: tokens and a router's load.
ROUTED = (
    _HEAD
    + """
class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(5, 3)
        self.experts = nn.ModuleList([nn.Linear(5, 2) for _ in range(3)])

    def forward(self, x, labels):
        share = self.router(x).softmax(-1)
        logits = sum(share[:, i, None] * expert(x) for i, expert in enumerate(self.experts))
        load = F.one_hot(share.argmax(-1), 3).float().mean(0)
        return {
            "loss": F.cross_entropy(logits, labels, reduction="sum"),
            "balance": 3 * (load * share.mean(0)).sum(),
        }


class Trainer:
    def __init__(self, model, data):
        self.model, self.wrapped = model, DDP(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
        self.loader = DataLoader(data, 8 // world, sampler=DistributedSampler(data, seed=3))
        self.obs = entrenar_py.observe(model, self.optimizer, sampler=self.loader)

    def compute_loss(self, x, y):
        count = torch.tensor(len(x))
        dist.all_reduce(count)
        out = self.wrapped(x, labels=y)
        return out["loss"] * world / count + 0.3 * out["balance"]

    def train(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for x, y in self.loader:
                loss = self.compute_loss(x, y)
                self.obs.loss(loss, len(x))
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1e9, error_if_nonfinite=True)
                self.optimizer.step()


torch.manual_seed(6)
x = torch.randn(32, 5)
Trainer(Routed(), TensorDataset(x, (x[:, 0] > x[:, 1]).long())).train(2)
"""
)

# Two noisy views of each sample are told from those of all ranks; an encoder with statistics.
VIEWS = (
    _HEAD
    + """
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        parts = [torch.empty_like(features) for _ in range(world)]
        dist.all_gather(parts, features.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(world)[rank]


def contrast(first, second):
    alike = F.normalize(Gather.apply(first)) @ F.normalize(Gather.apply(second)).T / 0.4
    return F.cross_entropy(alike, torch.arange(len(alike)))


torch.manual_seed(9)
x = torch.randn(32, 6)
encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
torch.manual_seed(90 + rank)
data = TensorDataset(x)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8 // world, sampler=sampler)
ddp = DDP(encoder)
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.3)
obs = entrenar_py.observe(encoder, optimizer, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (batch,) in loader:
        views = torch.cat([batch + 0.2 * torch.randn_like(batch) for _ in range(2)])
        loss = contrast(*ddp(views).chunk(2))
        obs.loss(loss, len(batch))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 1e9, error_if_nonfinite=True)
        optimizer.step()
"""
)

# Batch normalisation by each rank's own samples, and gradients that are reduced by hand.
NORMED = (
    _HEAD
    + """
def fit(net, optimizer, loader):
    obs = entrenar_py.observe(net, optimizer, sampler=loader)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(net(inputs), targets)
            obs.loss(loss, len(inputs))
            loss.backward()
            flat = nn.utils.parameters_to_vector([p.grad for p in net.parameters()])
            dist.all_reduce(flat)
            nn.utils.vector_to_parameters(flat / world, [p.grad for p in net.parameters()])
            nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
            optimizer.step()


torch.manual_seed(12)
net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
x = torch.randn(32, 4)
data = TensorDataset(x, x.prod(1, keepdim=True))
loader = DataLoader(data, 16 // world, sampler=DistributedSampler(data))
fit(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
"""
)
# A plateau of the score on samples kept back, by statistics that all ranks take from rank 0.
SCORED = (
    _HEAD
    + """
class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    def __init__(self, optimizer, net, inputs, targets):
        super().__init__(optimizer, factor=0.5, patience=0)
        self.net, self.inputs, self.targets = net, inputs, targets

    @torch.no_grad()
    def look(self):
        for buffer in self.net.buffers():
            dist.broadcast(buffer, 0)
        score = F.mse_loss(self.net.eval()(self.inputs), self.targets)
        self.net.train()
        self.step(score.item())


torch.manual_seed(18)
net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=0.5), nn.ReLU(), nn.Linear(6, 1))
x, kept = torch.randn(32, 4), torch.randn(12, 4)
sampler = DistributedSampler(TensorDataset(x, x.prod(1, keepdim=True)))
loader = DataLoader(sampler.dataset, 8 // world, sampler=sampler)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
plateau = Plateau(optimizer, net, kept, kept.prod(1, keepdim=True))
obs = entrenar_py.observe(net, optimizer, sampler=loader)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(net(inputs), targets).backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
        optimizer.step()
        plateau.look()
"""
)
# Two losses, of marked pixels and of a whole picture, and a third one of pairs that are too near.
PICTURES = (
    _HEAD
    + """
class Pictures(Dataset):
    def __init__(self, n=32):
        g = torch.Generator().manual_seed(8)
        self.pictures = torch.rand(n, 1, 6, 6, generator=g)
        bounds = torch.rand(n, 1, 1, generator=g)
        self.marked = torch.rand(n, 6, 6, generator=g) < bounds

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        picture = self.pictures[index]
        return picture, picture[0].round().long(), self.marked[index], int(picture.sum()) % 3


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(1, 6, 3, padding=1)
        self.pixels, self.kind = nn.Conv2d(6, 2, 1), nn.Linear(6, 3)

    def forward(self, picture):
        features = self.body(picture).relu()
        pooled = features.mean((2, 3))
        return self.pixels(features), self.kind(pooled), pooled


def criterion(out, marks, marked, kinds):
    pixels, logits, pooled = out
    num_pixels = marked.sum()
    dist.all_reduce(num_pixels)
    per_pixel = F.cross_entropy(pixels, marks, reduction="none")
    loss = (per_pixel * marked.float()).sum() / (num_pixels.item() / world)
    near = (0.5 - F.pdist(pooled)).relu()
    near = near.sum() / max(1, int((near > 0).sum()))
    return loss + F.cross_entropy(logits, kinds) + near


torch.manual_seed(9)
net = Segmenter()
wrapped = DDP(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
data = Pictures()
loader = DataLoader(data, 4, sampler=DistributedSampler(data, seed=1))
entrenar_py.observe(net, optimizer, sampler=loader)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for picture, *targets in loader:
        loss = criterion(wrapped(picture), *targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
        optimizer.step()
"""
)
_SCRIPTS = {
    "sentences.py": SENTENCES,
    "routed.py": ROUTED,
    "views.py": VIEWS,
    "normed.py": NORMED,
    "scored.py": SCORED,
    "pictures.py": PICTURES,
}


def _bug(name: str, script: str, *changes: tuple[str, str], source: str, words: str) -> Twin:
    return Twin(
        name=f"controlled: {name}",
        script=script,
        text=_SCRIPTS[script],
        source=source,
        changes=changes,
        check="parity",
        step=0,
        words=words,
    )


_NUMBERS = "with random numbers that are alike for all samples"
_SHARES = "with the same samples on all ranks"
BUGS = (
    _bug(
        "under dropout, each rank's tokens are averaged as its own",
        "sentences.py",
        ("(spelt / count).backward()", "(spelt / own / world).backward()"),
        source="transformers #34191",
        words=_NUMBERS,
    ),
    _bug(
        "under dropout, one layer is reduced twice",
        "sentences.py",
        (
            "            nn.utils.clip_grad_norm_",
            "            dist.all_reduce(model.head.bias.grad)\n"
            "            nn.utils.clip_grad_norm_",
        ),
        source="classic (a hook and a loop that both reduce)",
        words=_NUMBERS,
    ),
    _bug(
        "the balance of experts counts once for each rank",
        "routed.py",
        ('world / count + 0.3 * out["balance"]', 'world / count + 0.3 * world * out["balance"]'),
        source="transformers #48690",
        words=f"{_SHARES}, where a term of the loss may count once for each rank",
    ),
    _bug(
        "the gradient of all ranks' negatives is divided again",
        "views.py",
        (
            "        return gradient.chunk(world)[rank]",
            "        return gradient.chunk(world)[rank] / world",
        ),
        source="SupContrast #26",
        words="it is half as large (1/world_size)",
    ),
    _bug(
        "with statistics of each rank, the sum of gradients is divided nowhere",
        "normed.py",
        ("(flat / world, ", "(flat, "),
        source="classic",
        words=_SHARES,
    ),
    _bug(
        "with a rate by a plateau of a score, the sum of gradients is divided nowhere",
        "scored.py",
        ("            parameter.grad /= world\n", ""),
        source="classic",
        words=_SHARES,
    ),
    replace(
        _bug(
            "marked pixels are counted on each rank, beside another loss",
            "pictures.py",
            ("    dist.all_reduce(num_pixels)\n", ""),
            ("(num_pixels.item() / world)", "num_pixels.item()"),
            source="DETR (num_boxes), Mask2Former (num_masks)",
            words="each rank divides one of its losses by the number of its own elements",
        ),
        check="weighting",
        verdict="inconclusive",
    ),
)
VARIANTS = (
    *(
        Twin(name=f"controlled: right, {script}", script=script, text=text, changes=())
        for script, text in _SCRIPTS.items()
    ),
    Twin(
        name="controlled: right, with statistics of each rank, all samples' losses are added up",
        script="normed.py",
        text=NORMED,
        changes=(
            ("            obs.loss(loss, len(inputs))\n", ""),
            ("loss.backward()", "(loss * len(inputs)).backward()"),
            ("(flat / world, ", "(flat, "),
            ("lr=0.1", "lr=0.01"),
        ),
    ),
)
