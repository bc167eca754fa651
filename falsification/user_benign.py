"""Correct variants of users' scripts: no check may report any of these.

`make twins` runs all of them.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

# The changes that add micro-batches to the script that resumes.
RESUMED_IN_MICRO_BATCHES = (
    ("given = cli", 'cli.add_argument("--accumulation", type=int, default=1)\ngiven = cli'),
    ("GLOBAL_BATCH // dist", "GLOBAL_BATCH // given.accumulation // dist"),
    ("divmod(step, len(loader))", "divmod(step * given.accumulation, len(loader))"),
    ("        optimizer.zero_grad()\n        loss.b", "        (loss / given.accumulation).b"),
    (
        "        torch.nn.utils",
        "        if (index + 1) % given.accumulation:\n            continue\n"
        "        torch.nn.utils",
    ),
    ("        schedule.step()\n", "        optimizer.zero_grad()\n        schedule.step()\n"),
)

# The changes that add a moving average of a weight, in a buffer.
AVERAGED = (
    (
        "        schedule.step()\n",
        "        schedule.step()\n        model.average.lerp_(model[0].weight.detach(), 0.1)\n",
    ),
    (
        "ddp = Dist",
        'model.register_buffer("average", model[0].weight.detach().clone())\nddp = Dist',
    ),
)

# The changes that add up micro-batches in buffers beside the parameters, as Megatron-LM does.
SUMS_OF_ITS_OWN = (
    (
        "            (loss / MICRO_BATCHES).backward()\n        if last:\n",
        "            (loss / MICRO_BATCHES).backward()\n"
        "        for parameter, held in zip(model.parameters(), main, strict=True):\n"
        "            held += parameter.grad\n"
        "            parameter.grad = None\n"
        "        if last:\n"
        "            for parameter, held in zip(model.parameters(), main, strict=True):\n"
        "                dist.all_reduce(held)\n"
        "                parameter.grad = held / dist.get_world_size()\n"
        "                held.zero_()\n",
    ),
    ("with nullcontext() if last else ddp.no_sync():", "with ddp.no_sync():"),
    ("ddp = Dist", "main = [torch.zeros_like(one) for one in model.parameters()]\nddp = Dist"),
)

# The changes that move a step's passes into a closure, in which the first pass comes, too.
CLOSURE = (
    ("in loader:\n        loss", "in loader:\n\n      def closure():\n        loss"),
    (
        "        optimizer.step()\n",
        "        return loss\n\n      optimizer.step(closure)\n",
    ),
)

VARIANTS = (
    Twin(
        name="micro-batches are added up in buffers of its own",
        script="accumulation.py",
        changes=SUMS_OF_ITS_OWN,
    ),
    Twin(
        name="each pass comes in the closure of the optimizer's step",
        script="ddp.py",
        changes=CLOSURE,
    ),
    Twin(
        name="under autocast, in bfloat16",
        script="ddp.py",
        changes=(
            (
                "loss = torch.nn.functional.mse_loss(ddp(inputs.to(device)), targets.to(device))",
                'with torch.autocast("cpu", torch.bfloat16):\n            '
                "loss = torch.nn.functional.mse_loss(ddp(inputs), targets)",
            ),
        ),
    ),
    Twin(
        name="weights in bfloat16",
        script="ddp.py",
        changes=(
            ("model.to(device)", "model.to(device, torch.bfloat16)"),
            (
                "ddp(inputs.to(device)), targets.to(device))",
                "ddp(inputs.bfloat16()), targets.bfloat16())",
            ),
        ),
    ),
    Twin(
        name="AdamW on weights in bfloat16",
        script="ddp.py",
        changes=(
            ("model.to(device)", "model.to(device, torch.bfloat16)"),
            (
                "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
                "torch.optim.AdamW(model.parameters(), lr=0.01)",
            ),
            (
                "ddp(inputs.to(device)), targets.to(device))",
                "ddp(inputs.bfloat16()), targets.bfloat16())",
            ),
        ),
    ),
    Twin(
        name="all knobs under autocast, in bfloat16",
        script="knobs.py",
        turned=("accumulation", "clip", "loss_scale", "permute", "strategy"),
        changes=(
            (
                "                errors = (ddp or model)(inputs) - targets\n",
                '                with torch.autocast("cpu", torch.bfloat16):\n'
                "                    errors = (ddp or model)(inputs).float() - targets\n",
            ),
        ),
    ),
    Twin(
        name="all knobs with AdamW",
        script="knobs.py",
        turned=("accumulation", "clip", "loss_scale", "permute", "strategy"),
        changes=(
            (
                "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
                "torch.optim.AdamW(model.parameters(), lr=0.01)",
            ),
        ),
    ),
    Twin(
        name="all knobs",
        script="knobs.py",
        turned=("accumulation", "clip", "loss_scale", "permute", "strategy"),
        changes=(),
    ),
    Twin(
        name="every micro-batch is synchronised",
        script="knobs.py",
        turned=("accumulation",),
        changes=(("last = number == len(micro_batches)", "last = True"),),
    ),
    Twin(
        name="Adam with a decay that is part of the gradient, in views of buckets",
        script="ddp.py",
        changes=(
            (
                "DistributedDataParallel(model)",
                "DistributedDataParallel(model, gradient_as_bucket_view=True, "
                "find_unused_parameters=True)",
            ),
            (
                "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
                "torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)",
            ),
        ),
    ),
    Twin(
        name="Nesterov's momentum, dampening, and decay of some tensors",
        script="ddp.py",
        changes=(
            (
                "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
                'torch.optim.SGD([{"params": [model[0].weight], "weight_decay": 0.1}, '
                '{"params": [model[0].bias, *model[2].parameters()]}], '
                "lr=0.05, momentum=0.8, nesterov=True)",
            ),
        ),
    ),
    Twin(
        name="activations are computed again in the backward pass",
        script="ddp.py",
        changes=(
            (
                "model = torch.nn.Sequential(",
                "import torch.utils.checkpoint as again\n"
                "class Again(torch.nn.Linear):\n"
                "    def forward(self, x):\n"
                "        return again.checkpoint(super().forward, x, use_reentrant=False)\n"
                "model = torch.nn.Sequential(",
            ),
            ("torch.nn.Linear(4, 8)", "Again(4, 8)"),
        ),
    ),
    Twin(
        name="samples in their own order, in every epoch",
        script="ddp.py",
        changes=(("DistributedSampler(data)", "DistributedSampler(data, shuffle=False)"),),
    ),
    Twin(
        name="stopped and resumed in micro-batches",
        script="resume.py",
        turned=("accumulation",),
        changes=RESUMED_IN_MICRO_BATCHES,
    ),
    Twin(
        name="a moving average of a weight, stopped and resumed",
        script="resume.py",
        changes=AVERAGED,
    ),
    Twin(
        name="running means of each rank's own samples, moved in the forward pass",
        script="ddp.py",
        changes=(
            (
                "model = torch.nn.Sequential(",
                "class Watched(torch.nn.Tanh):\n"
                "    def __init__(self):\n"
                "        super().__init__()\n"
                '        self.register_buffer("mean", torch.zeros(8))\n'
                "    def forward(self, x):\n"
                "        self.mean.data.lerp_(x.detach().mean(0), 0.1)\n"
                "        return super().forward(x)\n"
                "model = torch.nn.Sequential(",
            ),
            ("torch.nn.Tanh()", "Watched()"),
        ),
    ),
    Twin(
        name="a cycle of rates and momentum",
        script="ddp.py",
        changes=(
            (
                "obs = ent",
                "cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)\n"
                "obs = ent",
            ),
            ("        optimizer.step()\n", "        optimizer.step()\n        cycle.step()\n"),
        ),
    ),
    Twin(
        name="a layer whose rate is zero in the first epoch",
        script="ddp.py",
        changes=(
            (
                "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
                "torch.optim.Adam([{'params': model[2].parameters()}, "
                "{'params': model[0].parameters(), 'lr': 0.0}], lr=0.05, weight_decay=0.1, "
                "decoupled_weight_decay=True)",
            ),
            (
                "    sampler.set_epoch(epoch)\n",
                "    sampler.set_epoch(epoch)\n"
                "    optimizer.param_groups[1]['lr'] = 0.05 * epoch\n",
            ),
        ),
    ),
    Twin(
        name="a layer that is unfrozen after an epoch",
        script="ddp.py",
        changes=(
            ("ddp = Dist", "model[0].requires_grad_(False)\nddp = Dist"),
            (
                "    sampler.set_epoch(epoch)\n",
                "    sampler.set_epoch(epoch)\n"
                "    if epoch == 1:\n"
                "        model[0].requires_grad_(True)\n"
                "        ddp = DistributedDataParallel(model)\n",
            ),
        ),
    ),
    Twin(
        name="a layer that every second step leaves out, with AdamW",
        script="ddp.py",
        changes=(
            (
                "model = torch.nn.Sequential(",
                "class Now(torch.nn.Linear):\n"
                "    steps = 0\n"
                "    def forward(self, x):\n"
                "        self.steps += 1\n"
                "        return x + super().forward(x) if self.steps % 2 else x\n"
                "model = torch.nn.Sequential(",
            ),
            ("torch.nn.Tanh()", "torch.nn.Tanh(), Now(8, 8)"),
            (
                "DistributedDataParallel(model)",
                "DistributedDataParallel(model, find_unused_parameters=True)",
            ),
            (
                "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
                "torch.optim.AdamW(model.parameters(), lr=0.01)",
            ),
        ),
    ),
    Twin(
        name="a fused optimizer that unscales the gradients itself",
        script="ddp.py",
        changes=(
            ("lr=0.05, momentum=0.9)", "lr=0.05, momentum=0.9, fused=True)"),
            ("obs = ent", "scaler = torch.amp.GradScaler(device.type)\nobs = ent"),
            ("        loss.backward()\n", "        scaler.scale(loss).backward()\n"),
            ("model.parameters(), 1.0, error", "model.parameters(), 1e9, error"),
            (
                "        optimizer.step()\n",
                "        scaler.step(optimizer)\n        scaler.update()\n",
            ),
        ),
    ),
    Twin(
        name="sharpness-aware: the gradient at weights that are moved, of the same samples",
        script="ddp.py",
        changes=(
            (
                "        norm = ",
                "        moved = [p.grad / 100 for p in model.parameters()]\n"
                "        torch._foreach_add_([*model.parameters()], moved)\n"
                "        optimizer.zero_grad()\n"
                "        torch.nn.functional.mse_loss("
                "ddp(inputs.to(device)), targets.to(device)).backward()\n"
                "        torch._foreach_sub_([*model.parameters()], moved)\n"
                "        norm = ",
            ),
            (
                "\nobs = ent",
                "\ntorch._foreach_add_ = torch.no_grad()(torch._foreach_add_)\n"
                "torch._foreach_sub_ = torch.no_grad()(torch._foreach_sub_)\nobs = ent",
            ),
        ),
    ),
    Twin(
        name="batch normalisation by each rank's own samples",
        script="ddp.py",
        changes=(("torch.nn.Tanh()", "torch.nn.BatchNorm1d(8)"),),
    ),
    Twin(
        name="samples are drawn with replacement, by each rank for itself",
        script="ddp.py",
        changes=(
            (
                "sampler: DistributedSampler[TensorDataset] = DistributedSampler(data)\n",
                "sampler = torch.utils.data.WeightedRandomSampler(\n"
                "    torch.ones(32), 32 // dist.get_world_size(),\n"
                "    generator=torch.Generator().manual_seed(dist.get_rank()))\n",
            ),
            ("    sampler.set_epoch(epoch)\n", ""),
        ),
    ),
)
