"""Scripts that come by their batches, or count what is in them, in ways of their own.

`make twins` runs all of them, and `tests.check.command.auto_twins` without their line.
"""

from __future__ import annotations

from falsification.user_fed_scripts import (
    BLENDED,
    BUFFERED,
    FOREVER,
    MASKED,
    PENALISED,
    SCALED,
    SKIPPED,
    WALKS,
)
from falsification.user_trainers import Twin


def _twin(name: str, text: str, *changes: tuple[str, str], **place: object) -> Twin:
    name = f"fed: {name}"
    return Twin(name=name, script="train.py", text=text, changes=changes, **place)  # type: ignore[arg-type]


BUGS = (
    _twin(
        "gradients are scaled by the tokens of the last micro-batch",
        SCALED,
        ("num_tokens += count", "num_tokens = count.float()"),
        check="weighting",
        words="by the number of those of the last micro-batch of each rank alone",
    ),
    _twin(
        "the count of tokens goes on from step to step",
        SCALED,
        ("                num_tokens = torch.zeros(())\n", ""),
        ("    dist.all_reduce(num_tokens)\n", "    total = num_tokens.clone()\n"),
        ("p.grad *= dist.get_world_size() / num_tokens", "p.grad *= dist.get_world_size() / total"),
        (
            "                for p in self",
            "                dist.all_reduce(total)\n                for p in self",
        ),
        check="weighting",
        words="by the number of those of all steps so far",
    ),
    _twin(
        "the sum over masked words is divided by the number of one rank",
        MASKED,
        (
            "scores[hidden], text[hidden])",
            "scores[hidden], text[hidden], reduction='sum') / 24",
        ),
        check="parity",
        words="alike for all samples",
    ),
    _twin(
        "the mean of masked words is divided by workers once more",
        MASKED,
        ("        loss.backward()", "        (loss / world).backward()"),
        check="parity",
        words="1/world_size",
    ),
    _twin(
        "an endless sampler seeds each order alike",
        FOREVER,
        (
            "        g = torch.Generator().manual_seed(self.seed)\n        while True:\n",
            "        while True:\n            g = torch.Generator().manual_seed(self.seed)\n",
        ),
        check="randomness",
        words="in the order of epoch 0",
    ),
    _twin(
        "an endless sampler of an order of its own on each rank",
        FOREVER,
        ("seed=21)", "seed=21 + dist.get_rank())"),
        check="coverage",
        words="drawn again",
    ),
    _twin(
        "each rank skips a batch by its own loss",
        SKIPPED,
        ("if anyones(loss.item() > 2.5):", "if loss.item() > 2.5:"),
        check="replica_identity",
        words="hold different weights",
    ),
    _twin(
        "ranks draw the same samples with replacement",
        SKIPPED,
        ("iter(drawn[self.rank :: self.world])", "iter(drawn[: len(self)])"),
        check="coverage",
        words="draw the same samples in every step",
    ),
    _twin(
        "an epoch with replacement is the first one again",
        SKIPPED,
        ("manual_seed(self.seed + self.epoch)", "manual_seed(self.seed)"),
        check="randomness",
        words="in the order of epoch 0",
    ),
    _twin(
        "gradients of two models that take turns are divided by workers twice",
        PENALISED,
        ("w.grad.div_(cfg.world)", "w.grad.div_(cfg.world**2)"),
        check="parity",
        words="half as large",
    ),
    _twin(
        "a model that is frozen at first is not reduced in its turns",
        PENALISED,
        ("for w in net.parameters():", "for w in net.parameters() if net is self.energy else ():"),
        check="replica_identity",
        words="the gradient of its own samples alone",
    ),
    _twin(
        "a penalty on a slope is added by each rank after the reduction",
        PENALISED,
        (
            "return gap + cfg.weight * self.slope(seen, drawn)",
            "self.late = seen, drawn\n        return gap",
        ),
        (
            "            w.grad.div_(cfg.world)\n",
            "            w.grad.div_(cfg.world)\n        if net is self.energy:\n"
            "            (cfg.weight * self.slope(*self.late)).backward()\n",
        ),
        check="replica_identity",
        words="another gradient",
    ),
    _twin(
        "gradients of passes over a buffer are added and not divided",
        BUFFERED,
        ("flat / world", "flat"),
        check="parity",
        words="world_size",
    ),
    _twin(
        "each rank's rate follows from its own policy",
        BUFFERED,
        (
            "    dist.all_reduce(number)\n    return number / dist.get_world_size()",
            "    return number",
        ),
        check="replica_identity",
        words="the learning rate is",
    ),
    _twin(
        "the loss of blended pictures is divided by workers once more",
        BLENDED,
        ("kinds).backward()", "kinds).div(dist.get_world_size()).backward()"),
        check="parity",
        words="half as large",
    ),
    _twin(
        "each rank walks from all nodes",
        WALKS,
        ("np.array_split(np.arange(NODES), world)[rank]", "np.arange(NODES)"),
        check="coverage",
        words="are given the same rows in every step",
    ),
    _twin(
        "all ranks blend by the same shares",
        BLENDED,
        ("torch.manual_seed(1000 + rank)", "torch.manual_seed(1000)"),
        check="randomness",
        words="same",
    ),
)

VARIANTS = (
    _twin("gradients are scaled by the tokens of the step", SCALED),
    _twin("words are masked by each rank's own draws", MASKED),
    _twin("an endless sampler", FOREVER),
    _twin("batches are skipped by all ranks together", SKIPPED),
    _twin("two models take turns, one with a penalty on its slope", PENALISED),
    _twin("passes over a buffer, at a rate that all ranks agree on", BUFFERED),
    _twin("pictures are blended before batch norm", BLENDED),
    _twin("walks from each rank's own nodes, drawn anew in each pass", WALKS),
)
