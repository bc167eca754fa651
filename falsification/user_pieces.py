"""Models that are cut by hand, in plain tensors: right scripts, and broken ones.

`make twins` tests that each bug is found, and that the right scripts are left alone.
"""

from __future__ import annotations

from falsification.user_pieces_scripts import (
    COUNTED_STAGES,
    CUT_DECODER,
    EXPERTS,
    FLAT_SHARDS,
    TABLES,
)
from falsification.user_together import HYBRID
from falsification.user_trainers import Twin

_TEXTS = {
    "decoder.py": CUT_DECODER,
    "tables.py": TABLES,
    "experts_by_hand.py": EXPERTS,
    "counted.py": COUNTED_STAGES,
    "flat.py": FLAT_SHARDS,
    "hybrid.py": HYBRID,
}


# All checks but that of NaNs: these scripts look for none.
_WANTED = (
    *("coverage", "determinism", "liveness", "optimizer_state", "parity", "randomness"),
    *("replica_identity", "resume", "step_rule", "weighting"),
)


def _twin(script: str, name: str, *changes: tuple[str, str], check: str = "") -> Twin:
    return Twin(
        name=f"pieces: {name}",
        script=script,
        text=_TEXTS[script],
        changes=changes,
        check=check,
        wanted=() if check else _WANTED,
    )


_LIST_OF_EXPERTS = (
    (
        "self.experts = nn.Parameter(everyone[self.first :][: EXPERTS // world].clone())",
        "mine = everyone[self.first :][: EXPERTS // world]\n"
        "        self.experts = nn.ParameterList(matrix.clone() for matrix in mine)",
    ),
)
_INTERLEAVED = (
    ("mine = range(rank * self.per, (rank + 1) * self.per)", "mine = range(rank, TABLES, world)"),
    (
        "mine = Exchange.apply(sent).transpose(0, 1).reshape(b, -1)",
        "mine = Exchange.apply(sent).view(self.world, b, self.per, WIDTH)\n"
        "        mine = mine.permute(1, 2, 0, 3).reshape(b, -1)",
    ),
)

_TWO_SHARDS = (
    "    mesh = init_device_mesh",
    "    size = min(2, world)\n    mesh = init_device_mesh",
)

VARIANTS = (
    _twin("hybrid.py", "replicas of two shards on four ranks", _TWO_SHARDS),
    _twin("decoder.py", "a decoder cut by heads and by vocabulary"),
    _twin("tables.py", "tables on one rank each"),
    _twin("tables.py", "tables dealt out by turns", *_INTERLEAVED),
    _twin("experts_by_hand.py", "experts of a stack on one rank each"),
    _twin("experts_by_hand.py", "experts of a list, counted from zero", *_LIST_OF_EXPERTS),
    _twin("counted.py", "stages that count their layers from zero"),
    _twin("flat.py", "flat shards with padding"),
)

BUGS = (
    _twin(
        "hybrid.py",
        "samples are split along one axis of two, seen on four ranks only",
        _TWO_SHARDS,
        (
            "DistributedSampler(data, seed=4)",
            'DistributedSampler(data, size, mesh["shard"].get_local_rank(), seed=4)',
        ),
        check="coverage",
    ),
    _twin(
        "hybrid.py",
        "four ranks draw as two, by odd and even ones",
        _TWO_SHARDS,
        (
            "DistributedSampler(data, seed=4)",
            "DistributedSampler(data, size, dist.get_rank() % 2, seed=4)",
        ),
        check="coverage",
    ),
    _twin(
        "hybrid.py",
        "four ranks draw by an order of each replica",
        _TWO_SHARDS,
        (
            "DistributedSampler(data, seed=4)",
            'DistributedSampler(data, seed=4 + mesh["replicate"].get_local_rank())',
        ),
        check="coverage",
    ),
    _twin(
        "decoder.py",
        "q, k and v are cut as one block",
        ("self.qkv_weight = shard(qkv.weight, blocks=3)", "self.qkv_weight = shard(qkv.weight)"),
        check="parity",
    ),
    _twin(
        "decoder.py",
        "tokens of another rank's vocabulary are rank 0's first row",
        ("leave(rows.masked_fill(outside[..., None], 0.0))", "leave(rows)"),
        check="parity",
    ),
    _twin(
        "decoder.py",
        "a bias of cut rows is added by each rank",
        (
            "return leave(F.linear(hidden, self.down)) + self.down_bias",
            "return leave(F.linear(hidden, self.down, self.down_bias))",
        ),
        check="parity",
    ),
    _twin(
        "decoder.py",
        "gradients of what enters the heads are not added up",
        ("qkv = F.linear(enter(x)", "qkv = F.linear(x"),
        check="replica_identity",
    ),
    _twin(
        "decoder.py",
        "the sum of cut rows is added up again in the backward pass",
        (
            "    def backward(ctx, grad):\n        return grad\n",
            "    def backward(ctx, grad):\n        grad = grad.clone()\n"
            "        dist.all_reduce(grad)\n        return grad\n",
        ),
        check="parity",
    ),
    _twin(
        "tables.py",
        "gradients of tables are not divided",
        (
            "            dist.all_reduce(p.grad)\n        p.grad /= world",
            "            dist.all_reduce(p.grad)\n            p.grad /= world",
        ),
        check="parity",
    ),
    _twin(
        "tables.py",
        "gradients of tables are not sent back",
        (
            "        dist.all_to_all_single(out, grad)\n        return out",
            "        return grad",
        ),
        check="parity",
    ),
    _twin(
        "tables.py",
        "gradients are received into memory of another order",
        (
            "        grad = grad.contiguous()\n        out = torch.empty_like(grad)\n"
            "        dist.all_to_all_single(out, grad)\n",
            "        out = torch.empty_like(grad)\n"
            "        dist.all_to_all_single(out, grad.contiguous())\n",
        ),
        check="parity",
    ),
    _twin(
        "tables.py",
        "tables of other ranks than the first are not trained",
        (
            "SGD(model.parameters(), lr=0.3)",
            "SGD((model.top if rank else model).parameters(), lr=0.3)",
        ),
        check="parity",
    ),
    _twin(
        "experts_by_hand.py",
        "gradients of different experts are added up",
        (
            '            if "experts" not in name:\n                dist',
            "            if True:\n                dist",
        ),
        check="parity",
    ),
    _twin(
        "experts_by_hand.py",
        "gradients of experts are not divided",
        (
            "                dist.all_reduce(p.grad)\n            p.grad.div_(",
            "                dist.all_reduce(p.grad)\n                p.grad.div_(",
        ),
        check="parity",
    ),
    _twin(
        "experts_by_hand.py",
        "the gate's gradients are taken for an expert's",
        ('if "experts" not in name:', 'if "experts" not in name and "gate" not in name:'),
        check="replica_identity",
    ),
    _twin(
        "counted.py",
        "the first stage keeps its gradients",
        (
            "    optimizer.zero_grad()\n",
            "    if rank == world - 1:\n        optimizer.zero_grad()\n",
        ),
        check="parity",
    ),
    _twin(
        "counted.py",
        "slopes come in the order of a stack",
        ("for given, out in kept:", "for given, out in kept if rank else kept[::-1]:"),
        check="parity",
    ),
    _twin(
        "flat.py",
        "shards have the sum of gradients",
        ("grad.div(world).chunk(world)[rank]", "grad.chunk(world)[rank]"),
        check="parity",
    ),
    _twin(
        "flat.py",
        "each rank keeps its own gradient",
        ("        dist.all_reduce(grad)\n", ""),
        check="parity",
    ),
    _twin(
        "flat.py",
        "the shard of another rank is stepped",
        ("chunk(world)[rank]\n\n\nclass Sharded", "chunk(world)[rank - 1]\n\n\nclass Sharded"),
        check="parity",
    ),
)
