"""Right trainers of which a comparison presupposes too much, and bugs in them that are to be found.

The scripts are written by hand, in many styles, and declare nothing. `make twins` runs all.
"""

from __future__ import annotations

from falsification.user_presupposed_scripts import (
    BUCKETS,
    DIVERGING,
    EXPERT_EACH,
    HOROVOD,
    MASTERS,
    PRE_HOOK,
    SHARDED_MODULE,
    STAGES,
    TENSOR_PARALLEL,
    UNSEEDED,
    WRAPPED,
    ZERO_1,
    ZERO_1_FLAT,
)
from falsification.user_trainers import Twin


def _right(name: str, text: str, *changes: tuple[str, str], **fields: object) -> Twin:
    return Twin(name=name, script="train.py", text=text, changes=changes, **fields)  # type: ignore[arg-type]


VARIANTS = (
    _right("a wrapper of one's own around the model, with several workers only", WRAPPED),
    _right(
        "a wrapper that puts its part into the middle of names",
        WRAPPED,
        (
            "model = Replicated(net) if world > 1 else net\n",
            "model = net\nif world > 1:\n    net[0], net[2] = map(Replicated, (net[0], net[2]))\n",
        ),
    ),
    _right("tensor parallelism in plain tensors", TENSOR_PARALLEL),
    _right("stages in plain tensors", STAGES),
    _right("an expert on each rank, under the same name", EXPERT_EACH),
    _right("a module that keeps a flat shard", SHARDED_MODULE),
    _right("an optimizer that reduces and shards (ZeRO-1)", ZERO_1),
    _right("a flat partition with an inner optimizer (ZeRO-1), which skips a NaN", ZERO_1_FLAT),
    _right(
        "a flat partition (ZeRO-1) whose skipped steps are reported",
        ZERO_1_FLAT,
        ("        if self.overflow:\n", "        if self.overflow:\n            obs.skipped()\n"),
    ),
    _right("an optimizer that reduces in its step", HOROVOD),
    _right("gradients reduced in a hook of the optimizer", PRE_HOOK),
    _right("weights in bfloat16, with masters in float32", MASTERS),
    _right("gradients reduced in buckets, by hooks", BUCKETS),
    _right("a script without a seed", UNSEEDED),
    Twin(
        name="knobs of a script whose weights are not seeded",
        script="knobs.py",
        changes=(("sampler: Dist", "torch.seed()\nsampler: Dist"),),
        turned=("accumulation", "clip", "loss_scale", "permute"),
    ),
    _right(
        "a script with seeded weights, and an order of its own in every run",
        UNSEEDED,
        ("    net = build", "    torch.manual_seed(1)\n    net = build"),
        ("random.shuffle(order)", "random.SystemRandom().shuffle(order)"),
    ),
)


def _bug(name: str, text: str, *changes: tuple[str, str], **fields: object) -> Twin:
    return _right(name, text, *changes, **fields)


BUGS = (
    _bug("a training that diverges", DIVERGING, check="finiteness", step=2),
    _bug(
        "a wrapper of one's own sums, and does not divide",
        WRAPPED,
        ("p.grad /= self.world", "pass"),
        check="parity",
        step=0,
        tensor="inner.0.weight",
    ),
    _bug(
        "a wrapper of one's own leaves out the last parameter",
        WRAPPED,
        (
            "in self.inner.parameters():\n            dist.all_r",
            "in self.inner[0].parameters():\n            dist.all_r",
        ),
        check="replica_identity",
        step=0,
        rank=1,
        tensor="inner.2.weight",
    ),
    _bug(
        "norms drift apart under tensor parallelism in plain tensors",
        TENSOR_PARALLEL,
        ("dist.all_reduce(squares)", "pass"),
        check="replica_identity",
        step=0,
        rank=1,
        tensor="bias",
    ),
    _bug(
        "a sharded optimizer forgets to gather the last parameter",
        ZERO_1,
        (
            "            dist.all_gather(parts, mine)",
            "            if p is not last:\n                dist.all_gather(parts, mine)",
        ),
        check="replica_identity",
        step=0,
        rank=1,
        tensor="2.bias",
    ),
    _bug(
        "a flat partition (ZeRO-1) whose overflow each rank decides for itself",
        ZERO_1_FLAT,
        ("        dist.all_reduce(bad, dist.ReduceOp.MAX)\n", ""),
        (
            "        dist.all_reduce(g)\n",
            "        g = g.nan_to_num()\n        dist.all_reduce(g)\n",
        ),
        check="finiteness",
        step=4,
        rank=1,
    ),
    _bug(
        "a flat partition (ZeRO-1) gathered by all ranks but the last",
        ZERO_1_FLAT,
        (
            "        for p in self.params:\n            p.data",
            "        for p in self.params[self.rank:]:\n            p.data",
        ),
        check="replica_identity",
        step=0,
        rank=1,
    ),
    _bug(
        "an optimizer that reduces divides twice",
        HOROVOD,
        ("p.grad.div_(size)", "p.grad.div_(size * size)"),
        check="parity",
        step=0,
        words="averaged gradient is not",
    ),
    _bug(
        "an optimizer that reduces only its first group",
        HOROVOD,
        ("for group in self.param_groups:", "for group in self.param_groups[:1]:"),
        check="replica_identity",
        step=0,
        rank=1,
        tensor="head.weight",
    ),
    _bug(
        "only the first rank writes its masters back",
        MASTERS,
        (
            "    for p, m in zip(net.parameters(), masters):\n        p.data",
            "    for p, m in zip(net.parameters(), masters if rank == 0 else ()):\n        p.data",
        ),
        check="replica_identity",
        step=0,
        rank=1,
    ),
    _bug(
        "masters are never written back",
        MASTERS,
        ("        p.data.copy_(m)\n", "        pass\n"),
        check="liveness",
        words="did not move",
    ),
    _bug(
        "ranks that draw weights of their own and broadcast none",
        BUCKETS,
        ("            dist.broadcast(p.data, 0)\n", "            pass\n"),
        check="replica_identity",
        step=-1,
        rank=1,
    ),
    _bug(
        "two trainings that nothing synchronises, of their own weights",
        BUCKETS,
        ("            dist.broadcast(p.data, 0)\n", "            pass\n"),
        ("dist.all_reduce(flat)", "flat.mul_(self.world)"),
        check="replica_identity",
        step=-1,
        rank=1,
    ),
)
