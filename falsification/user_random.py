"""Scripts that draw random numbers outside of dropout, right and with bugs of their streams.

`make twins` tests that each bug is found at its place, and that the right scripts are left alone.
"""

from __future__ import annotations

from falsification.user_random_loops import (
    ADVERSARIAL,
    ENDLESS,
    EVALUATED,
    MIXED,
    PADDED,
    TWO_VIEWS,
)
from falsification.user_random_scripts import (
    AUGMENTED,
    DIFFUSION,
    MASKED,
    RESTORED,
    SNAPSHOT,
    WHOLE_BATCH,
)
from falsification.user_trainers import Twin

_OWN_GENERATOR = (
    ("        self.epoch = 0\n", "        self.rng = np.random.default_rng(0)\n"),
    ("if np.random.rand()", "if self.rng.random()"),
    ("np.random.randn(*image.shape)", "self.rng.normal(size=image.shape)"),
)
_BY_SAMPLE = (
    (
        "        image = self.images[index]\n",
        "        rng = np.random.default_rng((7, self.epoch, index))\n"
        "        image = self.images[index]\n",
    ),
    ("if np.random.rand()", "if rng.random()"),
    ("np.random.randn(*image.shape)", "rng.normal(size=image.shape)"),
    (
        "    loader.sampler.set_epoch(epoch)\n",
        "    loader.sampler.set_epoch(epoch)\n    loader.dataset.epoch = epoch\n",
    ),
)


def _init(seed: str) -> tuple[tuple[str, str], ...]:
    """Return the change that has loaders seed numpy with `seed` in each worker."""
    before = "        num_workers=workers,\n"
    init = f"        worker_init_fn=lambda worker: np.random.seed({seed}),\n"
    return ((before, before + init),)


VARIANTS = (
    Twin(name="diffusion: noise and timesteps by rank", script="d.py", text=DIFFUSION, changes=()),
    Twin(
        name="diffusion on four ranks",
        script="d.py",
        text=DIFFUSION,
        changes=(),
        world_size=4,
    ),
    Twin(name="masked patches, drawn in the model", script="m.py", text=MASKED, changes=()),
    Twin(name="augmentation by loaders' workers", script="a.py", text=AUGMENTED, changes=()),
    Twin(
        name="augmentation in the main process",
        script="a.py",
        text=AUGMENTED,
        changes=(("workers=2", "workers=0"),),
    ),
    Twin(
        name="augmentation by worker_init_fn, seeded as torch's page on it says",
        script="a.py",
        text=AUGMENTED,
        changes=_init("torch.initial_seed() % 2**32"),
    ),
    Twin(
        name="augmentation drawn by sample and epoch",
        script="a.py",
        text=AUGMENTED,
        changes=_BY_SAMPLE,
    ),
    Twin(
        name="noise for the whole batch on all ranks",
        script="w.py",
        text=WHOLE_BATCH,
        changes=(),
    ),
    Twin(
        name="a number for the batch, the same on all ranks",
        script="w.py",
        text=WHOLE_BATCH,
        changes=(("noise = torch.randn(size, 5)", "noise = torch.rand(1).expand(size, 5)"),),
    ),
    Twin(
        name="noise of the targets, drawn by rank in the loss",
        script="d.py",
        text=DIFFUSION,
        changes=(
            (
                "        t = torch.randint(0, STEPS, (len(x),))\n",
                "        t = torch.zeros(len(x)).long()\n",
            ),
            ("        noise = torch.randn_like(x)\n", "        noise = torch.zeros_like(x)\n"),
            (
                "        loss = (self.ddp(noisy, t) - noise)",
                "        loss = (self.ddp(noisy, t) - torch.randn_like(x))",
            ),
        ),
    ),
    Twin(
        name="noise on the gradients, the same on all ranks",
        script="w.py",
        text=WHOLE_BATCH,
        changes=(
            (
                "    optimizer.step()\n",
                "    for p in net.parameters():\n"
                "        p.grad += 0.01 * torch.randn_like(p)\n"
                "    optimizer.step()\n",
            ),
        ),
    ),
    Twin(
        name="layers left out by Python's generator, alike on all ranks",
        script="w.py",
        text=WHOLE_BATCH,
        changes=(
            ("import torch, torch", "import random, torch, torch"),
            (
                "net = nn.Sequential(nn.Linear(5, 8)",
                "random.seed(5)\n\n\nclass Perhaps(nn.Linear):\n"
                "    def forward(self, x):\n"
                "        return x + super().forward(x) * (random.random() < 0.5)\n\n\n"
                "net = nn.Sequential(nn.Linear(5, 8), Perhaps(8, 8)",
            ),
        ),
    ),
    Twin(name="snapshot.pt in the working folder", script="s.py", text=SNAPSHOT, changes=()),
    Twin(name="evaluation and samples by rank", script="e.py", text=EVALUATED, changes=()),
    Twin(name="texts, padded to the longest", script="p.py", text=PADDED, changes=()),
    Twin(name="two models, and noise by rank", script="g.py", text=ADVERSARIAL, changes=()),
    Twin(name="mixup, dropout and micro-batches", script="x.py", text=MIXED, changes=()),
    Twin(name="a loader without end, ids by hand", script="c.py", text=ENDLESS, changes=()),
    Twin(name="two views of each sample", script="v.py", text=TWO_VIEWS, changes=()),
    Twin(
        name="noise, resumed with every rank's generator",
        script="r.py",
        text=RESTORED,
        changes=(),
        arguments=("{steps}", "{workdir}"),
    ),
)

BUGS = (
    Twin(
        name="the generator is restored after the next epoch's loader has drawn a seed",
        script="r.py",
        text=RESTORED,
        source="classic (a resume at the end of an epoch)",
        changes=(("    if step == done and rng is not None:", "    if False:"),),
        arguments=("{steps}", "{workdir}"),
        check="resume",
        step=6,
        words="between steps 5 and 6 this generator draws, too",
    ),
    Twin(
        name="diffusion: every rank draws the same noise",
        script="d.py",
        text=DIFFUSION,
        source="classic (torch.manual_seed(seed) on every rank)",
        changes=(("    torch.manual_seed(SEED + rank)\n", "    torch.manual_seed(SEED)\n"),),
        check="randomness",
        step=0,
        rank=1,
        words="between the batch and the forward pass",
    ),
    Twin(
        name="diffusion: a layer's gradient is not averaged",
        script="d.py",
        text=DIFFUSION,
        changes=(
            (
                "self.ddp = net, loader, DDP(net)",
                "self.ddp = net, loader, self._wrapped(net)",
            ),
            (
                "    def _run_batch",
                "    def _wrapped(self, net):\n"
                "        ignore = DDP._set_params_and_buffers_to_ignore_for_model\n"
                '        ignore(net, ["inner.0.bias"])\n'
                "        return DDP(net)\n\n"
                "    def _run_batch",
            ),
        ),
        check="replica_identity",
        step=0,
        rank=1,
        tensor="inner.0.bias",
    ),
    Twin(
        name="masks: every rank masks the same patches",
        script="m.py",
        text=MASKED,
        source="classic (the seed lacks the rank)",
        changes=(("torch.manual_seed(1337 + rank)", "torch.manual_seed(1337)"),),
        check="randomness",
        step=0,
        rank=1,
        words="in the model's forward pass",
    ),
    Twin(
        name="augmentation: workers have copies of one generator",
        script="a.py",
        text=AUGMENTED,
        source="pytorch #5059 (numpy in loaders' workers)",
        changes=_OWN_GENERATOR,
        check="randomness",
        step=0,
        rank=0,
        words="worker 1 of rank 0's loader",
    ),
    Twin(
        name="augmentation: every worker is seeded alike",
        script="a.py",
        text=AUGMENTED,
        source="pytorch #5059 (numpy in loaders' workers)",
        changes=_init("0"),
        check="randomness",
        step=0,
        rank=0,
        words="numpy's generator",
    ),
    Twin(
        name="augmentation: every epoch is seeded alike",
        script="a.py",
        text=AUGMENTED,
        source="pytorch #5059 (numpy in loaders' workers)",
        changes=_init("1000 * dist.get_rank() + worker"),
        check="randomness",
        step=3,
        words="begun in step 0",
    ),
    Twin(
        name="augmentation: all ranks have the same seed",
        script="a.py",
        text=AUGMENTED,
        source="classic (the seed lacks the rank)",
        changes=(("torch.manual_seed(seed + dist.get_rank())", "torch.manual_seed(seed)"),),
        check="randomness",
        step=0,
        rank=1,
        words="rank 0's loader",
    ),
    Twin(
        name="RNG-RESTORE: every rank resumes with the first rank's generator",
        script="r.py",
        text=RESTORED,
        changes=(('ck["rng"][rank]', 'ck["rng"][0]'),),
        arguments=("{steps}", "{workdir}"),
        check="resume",
        rank=1,
        words="rank 1 has rank 0's",
    ),
    Twin(
        name="RNG-RESTORE: the generator is restored before the loader draws its seed",
        script="r.py",
        text=RESTORED,
        changes=(
            (
                "ddp = nn",
                "if rng is not None:\n    torch.set_rng_state(rng)\n    rng = None\nddp = nn",
            ),
        ),
        arguments=("{steps}", "{workdir}"),
        check="resume",
        words="other random numbers are drawn",
    ),
    Twin(
        name="mixup: all ranks mix alike",
        script="x.py",
        text=MIXED,
        changes=(
            ("    torch.manual_seed(seed + rank)\n    np.random.seed(seed + rank)\n", ""),
            ("nn.Dropout(0.1), ", ""),
        ),
        check="randomness",
        step=0,
        rank=1,
        words="between the batch and the forward pass",
    ),
    Twin(
        name="a loader without end, whose workers have copies of one generator",
        script="c.py",
        text=ENDLESS,
        changes=(("torch.randn(2), self", "torch.from_numpy(self.rng.randn(2)).float(), self"),),
        check="randomness",
        step=0,
        rank=0,
        words="worker 1 of rank 0's loader",
    ),
)
