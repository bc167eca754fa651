"""Losses that couple samples, in scripts that declare of which samples a loss is (`loss_over`).

Without the declaration these bugs leave F-DP-005 inconclusive, since right losses look the same.
"""

from __future__ import annotations

from dataclasses import replace

from falsification import user_reported
from falsification.user_reported_losses import CONTRAST
from falsification.user_trainers import Twin

_LINES = {
    "tokens.py": "observe(self.model, self.opt",
    "contrast.py": "observe(towers, optim",
    "balanced.py": "observe(ddp, optimizer",
    "margin.py": "observe(self.policy, self.optimizer",
}
# Bug -> its step, and words of its finding.
_PLACES = {
    "padding counts in the loss": (0, "loss"),
    "what is gathered has no gradient": (0, "gradient"),
    "each rank tells its own samples apart only": (0, "gradient"),
    "the balancing loss is divided by the ranks": (0, "loss"),
    "the teacher follows after every micro-batch": (1, "with accumulation=2"),
    "the margin follows each rank's own pairs": (1, "gradient"),
}
# Negatives of all ranks, but not of other micro-batches.
_IN_MICRO_BATCHES = (
    (
        "    obs.samples(ids, epoch=0)\n"
        "    a, b = towers(images[ids], captions[ids])\n"
        "    loss = info_nce(everyones(a), everyones(b))\n"
        "    optim.zero_grad()\n"
        "    (loss * dist.get_world_size()).backward()\n",
        "    optim.zero_grad()\n"
        "    for start in (0, 4):\n"
        "        share = 4 // dist.get_world_size()\n"
        "        first = step * 8 + start + share * dist.get_rank()\n"
        "        part = list(range(first, first + share))\n"
        "        obs.samples(part, epoch=0)\n"
        "        a, b = towers(images[part], captions[part])\n"
        "        loss = info_nce(everyones(a), everyones(b))\n"
        "        (loss * dist.get_world_size() / 2).backward()\n",
    ),
)


def _declared(twin: Twin, over: str) -> Twin:
    line = _LINES[twin.script]
    change = line, f'{line}, loss_over="{over}"'
    name = f'{twin.name}, with loss_over="{over}"'
    return replace(twin, name=name, changes=(*twin.changes, change))


def _in_micro_batches(name: str, *changes: tuple[str, str], **place: object) -> Twin:
    twin = Twin(
        name=name,
        script="contrast.py",
        text=CONTRAST,
        source="SupContrast #26",
        changes=(*_IN_MICRO_BATCHES, *changes),
        **place,  # type: ignore[arg-type]
    )
    return _declared(twin, "micro-batch")


BUGS = (
    *(
        replace(_declared(bug, "batch"), verdict="falsified", step=step, words=words)
        for bug in user_reported.BUGS
        for step, words in (_PLACES.get(bug.name, (None, "")),)
        if words
    ),
    _in_micro_batches(
        "a rank tells its own part of a micro-batch apart only",
        ("info_nce(everyones(a), everyones(b))", "info_nce(a, b)"),
        ("(loss * dist.get_world_size() / 2)", "(loss / 2)"),
        check="parity",
        step=0,
        words="gradient",
    ),
)
VARIANTS = (
    *(_declared(one, "batch") for one in user_reported.VARIANTS if one.script in _LINES),
    _in_micro_batches("negatives of a micro-batch of all ranks"),
)
