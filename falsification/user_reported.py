"""Bugs that were reported of well-known projects, in scripts of other styles, with right twins.

`make twins` tests that the named check finds each bug at its place and for its reason.
"""

from __future__ import annotations

from falsification.user_reported_data import FILES, RECOMPUTED, STREAM, VALIDATED
from falsification.user_reported_loops import BRANCHES, BUCKETS, MUON, OWNED, TUNED
from falsification.user_reported_losses import BALANCED, CONTRAST, MARGIN, TOKENS, WINDOWS
from falsification.user_reported_parts import CONTEXT, MASTERS, SHARDED
from falsification.user_trainers import Twin

_SCRIPTS = {
    "buckets.py": BUCKETS,
    "owned.py": OWNED,
    "tuned.py": TUNED,
    "branches.py": BRANCHES,
    "muon.py": MUON,
    "tokens.py": TOKENS,
    "windows.py": WINDOWS,
    "contrast.py": CONTRAST,
    "balanced.py": BALANCED,
    "margin.py": MARGIN,
    "stream.py": STREAM,
    "files.py": FILES,
    "validated.py": VALIDATED,
    "recomputed.py": RECOMPUTED,
    "context.py": CONTEXT,
    "sharded.py": SHARDED,
    "masters.py": MASTERS,
}
_ARGUMENTS = {"masters.py": ("{steps}", "{workdir}")}
_TURNED = {"balanced.py": ("accumulation",), "sharded.py": ("accumulation",)}


def _bug(name: str, script: str, source: str, *changes: tuple[str, str], **place: object) -> Twin:
    return Twin(
        name=name,
        script=script,
        text=_SCRIPTS[script],
        source=source,
        changes=changes,
        arguments=_ARGUMENTS.get(script, ()),
        turned=_TURNED.get(script, ()),
        **place,  # type: ignore[arg-type]
    )


# Losses that couple samples rightly look the same to a comparison with one worker.
_COUPLED = "the loss of a batch may not be a sum over its samples"

BUGS = (
    _bug(
        "a bucket is copied out before its reduction has ended",
        "buckets.py",
        "OpenNMT-py #2295",
        (
            "        self.work.wait()\n",
            "",
        ),
        (
            "            p.grad.copy_(piece.view_as(p))\n",
            "            p.grad.copy_(piece.view_as(p))\n        self.work.wait()\n",
        ),
        check="replica_identity",
        step=0,
        words="hold different weights",
    ),
    _bug(
        "the last bucket is never full, and never reduced",
        "buckets.py",
        "DeepSpeed, torch's reducer: a bucket that is flushed when it is full",
        (
            "        if waiting:\n            self.buckets.append(Bucket(waiting))\n",
            "",
        ),
        check="replica_identity",
        step=0,
        tensor="module.0.weight",
        words="the gradient of its own samples alone",
    ),
    _bug(
        "a bucket is reduced twice when nothing overlaps",
        "buckets.py",
        "Megatron-LM #775",
        (
            "        self.work.wait()\n",
            "        self.work.wait()\n        dist.all_reduce(self.data)\n",
        ),
        check="weighting",
        step=0,
        words="2 times the gradient of the mean loss",
    ),
    _bug(
        "a share of the parameters is not sent after the step",
        "owned.py",
        "classic (ZeRO-1 with a partition that nobody gathers)",
        (
            "        dist.broadcast(p.data, src=owner[p])",
            "        dist.broadcast(p.data, src=owner[p]) if p.ndim > 1 else None",
        ),
        check="replica_identity",
        step=0,
        rank=0,
        tensor="0.bias",
        words="it did not move it",
    ),
    _bug(
        "owners step by the gradients of their own samples",
        "owned.py",
        "classic (ZeRO-1 around a model whose gradients nobody reduces)",
        ("        dist.all_reduce(p.grad)\n", "        p.grad.mul_(WORLD)\n"),
        check="weighting",
        step=0,
        words="all ranks move 0.bias by the gradient of rank 1's own samples",
    ),
    _bug(
        "parameters are shared out by whole shares, and the rest is nobody's",
        "owned.py",
        "DeepSpeed, fairscale: partitions that are rounded down",
        (
            "{p: i % WORLD for i, p in enumerate(parameters)}",
            "{p: i % WORLD if i < len(parameters) // WORLD * WORLD else -1 for i, p in "
            "enumerate(parameters)}",
        ),
        (
            "src=owner[p]",
            "src=max(owner[p], 0)",
        ),
        check="liveness",
        tensor="4.weight",
        words="did not move in 3 steps",
    ),
    _bug(
        "each rank clips by the norm of its own share",
        "owned.py",
        "llm.c #309, torchtitan #766",
        (
            "clip_grad_norm_(parameters, MAX_NORM",
            "clip_grad_norm_(local, MAX_NORM",
        ),
        check="step_rule",
        words="longer than clip_norm=0.05",
    ),
    _bug(
        "the hook divides a second time",
        "tuned.py",
        "pytorch DDP communication hooks: allreduce_hook divides before",
        (
            "lambda f: f.value()[0])",
            "lambda f: f.value()[0] / everyone)",
        ),
        check="parity",
        step=0,
        words="half as large (1/world_size)",
    ),
    _bug(
        "the head is replaced after wrapping",
        "tuned.py",
        "pytorch #12603",
        (
            "ddp = DDP(net)\n",
            "ddp = DDP(net, find_unused_parameters=True)\nnet.head = nn.Linear(6, 3)\n",
        ),
        (
            "optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)\n",
            "",
        ),
        (
            "obs = entrenar_py",
            "optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)\nobs = entrenar_py",
        ),
        check="replica_identity",
        step=0,
        tensor="head.weight",
        words="the gradient of its own samples alone",
    ),
    _bug(
        "the backbone was frozen when it was wrapped, and is unfrozen later",
        "tuned.py",
        "pytorch DDP, requires_grad as documented",
        (
            "ddp = DDP(net)\n",
            "net.backbone.requires_grad_(False)\nddp = DDP(net)\n",
        ),
        (
            "    for pixels, wanted in loader:",
            "    net.backbone.requires_grad_(epoch > 0)\n    for pixels, wanted in loader:",
        ),
        check="replica_identity",
        tensor="backbone.0.weight",
        words="the gradient of its own samples alone",
    ),
    _bug(
        "a step in each tensor's hook, before the wrapper reduces",
        "tuned.py",
        "torchtune optimizer_in_bwd, pytorch tutorial",
        (
            "obs = entrenar_py",
            "apart = {p: torch.optim.AdamW([p], lr=1e-2) for p in net.parameters()}\n"
            "for p in net.parameters():\n"
            "    p.register_post_accumulate_grad_hook(lambda p: apart[p].step())\n"
            "optimizer = list(apart.values())\n"
            "obs = entrenar_py",
        ),
        (
            "        optimizer.zero_grad()\n",
            "        ddp.zero_grad()\n",
        ),
        (
            "        optimizer.step()\n",
            "",
        ),
        check="replica_identity",
        step=0,
        tensor="backbone.0.weight",
        words="the gradient of its own samples alone",
    ),
    _bug(
        "gradients that a rank lacks are left out, and others are added up",
        "branches.py",
        "ray #59544",
        (
            "            p.grad = torch.zeros_like(p)\n",
            "            continue\n",
        ),
        check="replica_identity",
        step=0,
        tensor="experts.0.weight",
        words="rank 1 applied no gradient of experts.0.weight",
    ),
    _bug(
        "the last tensors have no owner",
        "muon.py",
        "modded-nanogpt, Muon by ranks",
        (
            "range(0, len(params), world)",
            "range(0, len(params) - world + 1, world)",
        ),
        check="liveness",
        tensor="layers.4",
        words="did not move in 3 steps",
    ),
    _bug(
        "the owner of a tensor keeps its update",
        "muon.py",
        "classic",
        (
            "dist.broadcast(p, src=i)",
            "dist.broadcast(p, src=0)",
        ),
        check="liveness",
        tensor="layers.1",
        words="did not move in 3 steps",
    ),
    _bug(
        "a mean over each rank's own tokens",
        "tokens.py",
        "prime-rl #1960",
        (
            "total * self.world / self.num_tokens",
            "total / kept / GRAD_ACCUM",
        ),
        (
            "                kept = int((labels != IGNORE).sum())\n",
            "",
        ),
        (
            "                loss = total",
            "                kept = int((labels != IGNORE).sum())\n                loss = total",
        ),
        check="parity",
        step=0,
        words="it is right if samples count otherwise",
    ),
    _bug(
        "tokens are counted over micro-batches, and not over ranks",
        "tokens.py",
        "transformers #34242, prime-rl #2358",
        (
            "        dist.all_reduce(self.num_tokens)\n",
            "",
        ),
        (
            "total * self.world / self.num_tokens",
            "total / self.num_tokens",
        ),
        check="parity",
        step=0,
        words="rank 1 in micro-batch 1 0.8 times",
    ),
    _bug(
        "a sum over all tokens is averaged over ranks",
        "tokens.py",
        "verl-SpeCo #29",
        (
            "total * self.world / self.num_tokens",
            "total / self.num_tokens",
        ),
        check="parity",
        step=0,
        words="half as large",
    ),
    _bug(
        "the count of tokens is not set back",
        "tokens.py",
        "torchtune #1917 (review)",
        (
            "        self.num_tokens = sum((labels != IGNORE).sum() for _, _, labels in "
            "batches)\n"
            "        dist.all_reduce(self.num_tokens)\n",
            "        self.num_tokens = self.num_tokens + sum((labels != IGNORE).sum() for "
            "_, _, labels in batches)\n"
            "        dist.all_reduce(self.num_tokens)\n",
        ),
        check="parity",
        step=1,
        words="times as large, in all elements",
    ),
    _bug(
        "padding counts in the loss",
        "tokens.py",
        "classic (labels that are padded with a token)",
        (
            "torch.where(ids == PAD, IGNORE, ids)",
            "ids.clone()",
        ),
        check="parity",
        words="padding up to the longest sample counts",
    ),
    _bug(
        "micro-batches that are left at the end of an epoch go into the next",
        "windows.py",
        "transformers #22098, torchtune #2745",
        (
            "window = min(accumulate, len(loader) - i // accumulate * accumulate)",
            "window = accumulate",
        ),
        (
            " or i + 1 == len(loader)",
            "",
        ),
        check="weighting",
        step=3,
        words="the last of an epoch are left for the next step",
    ),
    _bug(
        "a short window is divided by the length of a full one",
        "windows.py",
        "Lightning #19987",
        (
            "window = min(accumulate, len(loader) - i // accumulate * accumulate)",
            "window = accumulate",
        ),
        check="weighting",
        step=3,
        words="the number is one of full steps alone",
    ),
    _bug(
        "a loss of all ranks' samples is averaged over ranks",
        "contrast.py",
        "lightly #1977, tevatron #30",
        (
            "(loss * dist.get_world_size()).backward()",
            "loss.backward()",
        ),
        check="parity",
        step=0,
        words="half as large (1/world_size)",
    ),
    _bug(
        "what is gathered has no gradient",
        "contrast.py",
        "accelerate #1154, SupContrast #26",
        (
            "    parts[dist.get_rank()] = features\n    return torch.cat(parts)",
            "    return torch.cat(parts)",
        ),
        (
            "info_nce(everyones(a), everyones(b))",
            "(info_nce(a, everyones(b)[: len(a)]) + info_nce(everyones(a)[: len(a)], b)) / 2",
        ),
        check="parity",
        verdict="inconclusive",
        words=_COUPLED,
    ),
    _bug(
        "each rank tells its own samples apart only",
        "contrast.py",
        "SupContrast #26",
        (
            "info_nce(everyones(a), everyones(b))",
            "info_nce(a, b)",
        ),
        (
            "(loss * dist.get_world_size()).backward()",
            "loss.backward()",
        ),
        check="parity",
        verdict="inconclusive",
        words=_COUPLED,
    ),
    _bug(
        "the balancing loss is not divided by the micro-batches",
        "balanced.py",
        "NeMo Automodel #3359",
        (
            "        loss = loss / args.accumulation\n",
            "        loss = (loss - 0.2 * balance) / args.accumulation + 0.2 * balance\n",
        ),
        check="parity",
        step=0,
        tensor="router.weight",
        words="with accumulation=2",
    ),
    _bug(
        "the balancing loss is divided by the ranks",
        "balanced.py",
        "Megatron-LM #3769",
        (
            "+ 0.2 * balance\n        obs",
            "+ 0.2 * balance / world\n        obs",
        ),
        check="parity",
        verdict="inconclusive",
        words=_COUPLED,
    ),
    _bug(
        "the teacher follows after every micro-batch",
        "balanced.py",
        "lightly-train #968, F5-TTS #631",
        (
            "    with torch.no_grad():\n"
            "        for slow, fast in zip(teacher.parameters(), model.parameters()):\n"
            "            slow.lerp_(fast, 0.1)\n",
            "",
        ),
        (
            "        loss.backward()\n",
            "        loss.backward()\n"
            "        with torch.no_grad():\n"
            "            for slow, fast in zip(teacher.parameters(), model.parameters()):\n"
            "                slow.lerp_(fast, 0.1)\n",
        ),
        check="parity",
        verdict="inconclusive",
        words=_COUPLED,
    ),
    _bug(
        "the margin follows each rank's own pairs",
        "margin.py",
        "trl #6123 (review)",
        (
            "seen = mean_of_all(gap.mean())",
            "seen = gap.detach().mean()",
        ),
        check="parity",
        verdict="inconclusive",
        words=_COUPLED,
    ),
    _bug(
        "each rank looks for a plateau of its own loss",
        "margin.py",
        "disruptcnn #3, Lightning #673",
        (
            "self.plateau.step(everyone)",
            "self.plateau.step(loss.detach())",
        ),
        check="replica_identity",
        step=3,
        tensor="0.weight",
        words="the learning rate is 0.1 on rank 1, 0.2 on rank 0",
    ),
    _bug(
        "each rank leaves out a step by its own loss",
        "margin.py",
        "OLMo's and PaLM's skipped spikes, by rank",
        (
            "if self.usual is None or everyone < 1.02 * self.usual:",
            "if self.usual is None or loss < 1.02 * self.usual:",
        ),
        check="replica_identity",
        step=2,
        tensor="0.weight",
    ),
    _bug(
        "a stream that ranks don't split",
        "stream.py",
        "datasets #5360",
        (
            "part, parts = self.rank * workers + worker, self.world * workers",
            "part, parts = worker, workers",
        ),
        check="coverage",
        step=0,
        rank=1,
        words="samples drawn again in epoch 0",
    ),
    _bug(
        "a stream that workers don't split",
        "stream.py",
        "datasets #3423",
        (
            "part, parts = self.rank * workers + worker, self.world * workers",
            "part, parts = self.rank, self.world",
        ),
        check="coverage",
        step=1,
        rank=0,
        words="samples drawn again in epoch 0",
    ),
    _bug(
        "workers that live on don't hear of the epoch",
        "stream.py",
        "pytorch persistent_workers, datasets set_epoch",
        (
            "num_workers=2)",
            "num_workers=2, persistent_workers=True)",
        ),
        check="randomness",
        step=6,
        words="in the order of epoch 0",
    ),
    _bug(
        "each rank reads files of its own, to the end of the shortest",
        "files.py",
        "datasets #6437",
        (
            "    ids = np.concatenate(\n"
            "        [np.arange(STARTS[f], STARTS[f + 1]) for f in "
            "rng.permutation(len(LENGTHS))]\n"
            "    )\n"
            "    return ids[rank::world]\n",
            "    files = rng.permutation(len(LENGTHS))\n"
            "    shares = [np.concatenate([np.arange(STARTS[f], STARTS[f + 1]) for f in "
            "files[r::world]]) for r in range(world)]\n"
            "    return shares[rank][: min(map(len, shares))]\n",
        ),
        check="coverage",
        step=7,
        words="ended without samples",
    ),
    _bug(
        "samples are split by the launcher and again by the library",
        "validated.py",
        "Lightning #15734, accelerate prepare on a DistributedSampler",
        (
            "    sampler = DistributedSampler(data, shuffle=True, seed=11)\n",
            "    data = torch.utils.data.Subset(data, range(dist.get_rank(), len(data), "
            "dist.get_world_size()))\n"
            "    sampler = DistributedSampler(data, shuffle=True, seed=11)\n",
        ),
        check="coverage",
        step=1,
        words="ended without samples",
    ),
    _bug(
        "rank 0 validates, and goes on without dropping units",
        "validated.py",
        "classic (model.train() is forgotten after model.eval())",
        (
            "    model.train()\n",
            "",
        ),
        check="randomness",
        step=4,
        rank=0,
        words="call model.train() after model.eval()",
    ),
    _bug(
        "a validation leaves batch normalisation to the running statistics",
        "validated.py",
        "classic (model.train() is forgotten after model.eval())",
        ("torch.nn.Dropout(0.2)", "torch.nn.BatchNorm1d(12)"),
        ("    model.train()\n", ""),
        (
            "    if rank == 0:\n        print(epoch, validate(model, held_out))\n",
            "    validate(model, held_out)\n",
        ),
        check="randomness",
        step=4,
        words="with batch normalisation by running statistics, as the evaluation before it left it",
    ),
    _bug(
        "units are drawn anew when a layer is computed again",
        "recomputed.py",
        "OLMo-core #828, torchtitan #1323",
        (
            "preserve_rng_state=True",
            "preserve_rng_state=False",
        ),
        check="randomness",
        step=0,
        words="preserve_rng_state=True",
    ),
    _bug(
        "the norm's gradients are not reduced",
        "context.py",
        "Megatron-LM #1446",
        (
            "    for p in net.parameters():\n        dist.all_reduce(p.grad)\n",
            "    for name, p in net.named_parameters():\n"
            "        if 'norm' not in name:\n"
            "            dist.all_reduce(p.grad)\n",
        ),
        check="replica_identity",
        step=0,
        tensor="norm.weight",
    ),
    _bug(
        "torch's gather adds up gradients of another layout",
        "context.py",
        "pytorch #192920: torch.distributed.nn.functional.all_gather, backward with gloo",
        (
            "import torch.nn.functional as F\n",
            "import torch.nn.functional as F\nimport torch.distributed.nn.functional as dnn\n",
        ),
        (
            "Gather.apply(k.contiguous()), Gather.apply(v.contiguous())",
            "torch.cat(dnn.all_gather(k), 1), torch.cat(dnn.all_gather(v), 1)",
        ),
        check="parity",
        step=0,
    ),
    _bug(
        "labels are shifted within each piece",
        "context.py",
        "ChatLearn #343",
        (
            "text[ids, 1:][:, piece]\n",
            "text[ids, :-1][:, piece].roll(-1, 1)\n",
        ),
        check="parity",
        step=0,
    ),
    _bug(
        "each piece counts its positions from zero",
        "context.py",
        "classic (position ids that are made after cutting)",
        (
            "net(tokens, positions)",
            "net(tokens, positions - positions[0])",
        ),
        check="parity",
        step=0,
    ),
    _bug(
        "the mean of the means of unequal pieces",
        "context.py",
        "prime-rl #1960, Megatron-LM #673",
        (
            "    dist.all_reduce(count)\n",
            "    count = count * size\n",
        ),
        check="parity",
        step=0,
    ),
    _bug(
        "each rank clips its shards by their norm",
        "sharded.py",
        "torchtitan #766, pytorch #170862",
        (
            "    total = torch.nn.utils.get_total_norm([p.grad for p in params], "
            "error_if_nonfinite=True)\n"
            "    total = total.full_tensor()\n",
            "    total = torch.stack([p.grad.to_local().norm() for p in params]).norm()\n"
            "    assert total.isfinite()\n",
        ),
        check="step_rule",
        step=0,
        words="clip_norm=0.3",
    ),
    _bug(
        "only the first micro-batch is reduced",
        "sharded.py",
        "classic",
        (
            "micro == ACCUMULATE - 1",
            "micro == 0",
        ),
        check="parity",
        step=0,
        words="with accumulation=2",
    ),
    _bug(
        "masters are made before the weights are read",
        "masters.py",
        "apex #42, SkyRL #2149, Megatron-LM #5071",
        (
            '    opt.masters = kept["masters"]\n',
            "",
        ),
        (
            'kept = torch.load(snapshot) if snapshot.exists() else {"step": 0}\n'
            'if kept["step"]:\n'
            '    net.load_state_dict(kept["net"])\n',
            'kept = torch.load(snapshot) if snapshot.exists() else {"step": 0}\n',
        ),
        (
            'if kept["step"]:\n',
            'if kept["step"]:\n    net.load_state_dict(kept["net"])\n',
        ),
        check="resume",
        step=3,
        tensor="0.weight",
        words="the optimizer steps copies of the weights, which were made before",
    ),
    _bug(
        "the weight decay of the beginning is used again",
        "masters.py",
        "Megatron-LM #7468",
        (
            '        group["weight_decay"] = weight_decay\n',
            "        pass\n",
        ),
        check="resume",
        step=3,
        tensor="0.weight",
        words="what the optimizer was made with (decay, momentum)",
    ),
    _bug(
        "a thread writes weights that are being trained",
        "masters.py",
        "classic (asynchronous checkpoints of live tensors)",
        (
            "        state = copy.deepcopy(state)\n",
            "",
        ),
        (
            "        writer.start()\n        writer.join()\n",
            "",
        ),
        (
            'for step in range(kept["step"], total):\n',
            'for step in range(kept["step"], total):\n    pending = writer\n',
        ),
        (
            "    opt.step()\n",
            "    opt.step()\n    if pending:\n        pending.start()\n        pending.join()\n",
        ),
        check="resume",
        words="its count of steps is 2, and 3 were made",
    ),
    _bug(
        "names have a prefix, and nothing is loaded",
        "masters.py",
        "classic (strict=False)",
        (
            'net.load_state_dict(kept["net"])',
            "net.load_state_dict({'module.' + k: v for k, v in kept['net'].items()}, strict=False)",
        ),
        (
            '    opt.masters = kept["masters"]\n',
            "",
        ),
        check="resume",
        step=3,
        words="is as it was before the first step: it was not restored",
    ),
)

VARIANTS = tuple(_bug(f"{script.removesuffix('.py')}, as it is", script, "") for script in _SCRIPTS)
