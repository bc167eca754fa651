"""Correct ways to fine-tune that are not ours: no check may report any of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.model import model, objectives, workload
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.settings import Settings

from .finetuning import ROWS, TUNING, finetuned
from .subjects import TRAINING

_batch, _load, _cut = workload.Rows.batch, model.load, sharding.cut
_LONGER = 5  # columns of padding

_WRITTEN = ("F-FT-001", "F-FT-002", "F-FT-003", "F-FT-004", "F-FT-005")
_STEPS = ("F-FT-009", "F-FT-010", "F-FT-014")
_PAIRS = ("F-FT-017", "F-FT-018", "F-FT-019")


def longer(self: workload.Rows, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Fills rows up further than need be."""
    tokens, mask, targets = _batch(self, ids)
    return (
        F.pad(tokens, (0, _LONGER), value=int(tokens[0, -1])),
        F.pad(mask, (0, _LONGER)),
        F.pad(targets, (0, _LONGER), value=objectives.IGNORED),
    )


def on_the_left(self: workload.Rows, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Fills rows up before their first token."""
    tokens, mask, targets = _batch(self, ids)
    shifts = (mask == 0).sum(1).tolist()
    rolled = [
        torch.stack([row.roll(shift) for row, shift in zip(part, shifts, strict=True)])
        for part in (tokens, mask, targets)
    ]
    return rolled[0], rolled[1], rolled[2]


def eager(settings: Settings, pad_token: int) -> nn.Module:
    """Computes attention by products and a softmax, not by one fused kernel."""
    module: Any = _load(settings, pad_token)
    module.get_base_model().set_attn_implementation("eager")
    return module  # type: ignore[no-any-return]


def backwards(ids: sharding.Ids, num_shards: int) -> list[sharding.Ids]:
    """Takes the samples of each shard in the opposite order."""
    return [tuple(reversed(part)) for part in _cut(ids, num_shards)]


def random_copies(found: Samples) -> Samples:
    """Draws which rows are repeated, rather than taking them in turn."""
    counts, rng = Counter(found.labels.tolist()), np.random.default_rng(0)
    most, copies = max(counts.values()), list[int]()
    for label, count in sorted(counts.items()):
        (own,) = np.nonzero(found.labels == label)
        copies += rng.choice(own, most - count).tolist()
    return found.chosen([*range(len(found)), *copies])


VARIANTS = (
    Variant(
        name="ft-longer-padding",
        summary="rows are padded further than the longest one",
        plants={ROWS: longer},
        scenario=finetuned("samples", "gradients", num_steps=1),
        tried=("F-FT-006", *_STEPS),
    ),
    Variant(
        name="ft-left-padding",
        summary="a classifier's rows are padded on the left",
        plants={ROWS: on_the_left},
        scenario=finetuned("samples", "gradients", num_steps=1, options={"task": "classify"}),
        tried=("F-FT-006", *_STEPS),
    ),
    Variant(
        name="ft-eager-attention",
        summary="attention is computed by products and a softmax",
        plants={f"{TUNING}.model.load": eager},
        scenario=finetuned("samples", "merged", "gradients", num_steps=1),
        tried=("F-FT-006", *_WRITTEN, *_STEPS),
    ),
    Variant(
        name="ft-backwards",
        summary="the samples of a shard are added up in the opposite order",
        plants={f"{TRAINING}.sharding.cut": backwards},
        scenario=finetuned("samples", "gradients", num_steps=1),
        tried=("F-FT-006", *_STEPS),
    ),
    Variant(
        name="ft-other-rank",
        summary="a different seed and learning rate, and adapters of rank 5 with an unusual scale",
        plants={},
        scenario=finetuned(
            "samples",
            "merged",
            seed=11,
            learning_rate=0.003,
            weight_decay=0.1,
            clip_norm=0.2,
            options={"task": "classify", "rank": 5, "alpha": 7.5, "class_weights": "inverse"},
        ),
        tried=("F-FT-006", "F-FT-007", *_WRITTEN, "F-FT-010", "F-FT-014"),
    ),
    Variant(
        name="ft-nothing-learned",
        summary="a learning rate of zero: the adapters stay where they began",
        plants={},
        scenario=finetuned("merged", learning_rate=0.0),
        # F-FT-014 stays open: any rule leaves weights where they are at a rate of zero.
        tried=(*_WRITTEN, "F-FT-010"),
    ),
    Variant(
        name="ft-random-copies",
        summary="the repeated rows of the rarer class are drawn at random",
        plants={f"{TUNING}.samples.oversampled": random_copies},
        scenario=finetuned(
            "samples", num_steps=5, options={"task": "classify", "oversample": True}
        ),
        tried=("F-FT-006", "F-FT-007", "F-FT-008", "F-FT-011"),
    ),
    Variant(
        name="ft-stopped-between",
        summary="all weights are trained, and the run is stopped after each step",
        plants={},
        scenario=finetuned(
            num_steps=3,
            stops=(1, 2),
            weight_decay=0.1,
            options={"task": "text", "method": "full", "family": "llama"},
        ),
        tried=("F-FT-011", "F-FT-012", "F-FT-014"),
    ),
    Variant(
        name="ft-left-early",
        summary="a different seed and task, and a worker leaves after the first step",
        plants={},
        scenario=finetuned(
            num_steps=3,
            seed=4,
            dropout=0.3,
            faults=(Fault(kind="leave", rank=1, step=1),),
            options={"task": "text"},
        ),
        tried=("F-FT-013",),
    ),
    Variant(
        name="ft-beside-nf4",
        summary="adapters next to frozen weights in NF4, with a different seed",
        plants={},
        scenario=finetuned("samples", "merged", seed=5, options={"method": "qlora"}),
        tried=("F-FT-006", *_WRITTEN, "F-FT-010", "F-FT-014", "F-FT-015"),
    ),
    Variant(
        name="ft-pairs-backwards",
        summary="the pairs of a shard are added up in the opposite order",
        plants={f"{TRAINING}.sharding.cut": backwards},
        scenario=finetuned("samples", "gradients", num_samples=6, options={"task": "preference"}),
        tried=(*_PAIRS, "F-FT-011"),
    ),
    Variant(
        name="ft-other-beta",
        summary="a different seed, and a beta of 0.7",
        plants={},
        scenario=finetuned(
            *("samples", "gradients"),
            num_samples=6,
            seed=7,
            options={"task": "preference", "beta": 0.7},
        ),
        tried=_PAIRS,
    ),
    Variant(
        name="ft-smoothed-labels",
        summary="pairs with label smoothing, on a model of another family",
        plants={},
        scenario=finetuned(
            *("samples", "gradients"),
            num_samples=6,
            seed=3,
            options={"task": "preference", "label_smoothing": 0.2, "family": "llama"},
        ),
        tried=_PAIRS,
    ),
    Variant(
        name="ft-in-stages",
        summary="the model is in two stages, each in a process, with adapters next to its layers",
        plants={},
        scenario=finetuned(
            options={"task": "text", "family": "llama", "strategy": "pipeline_parallel"}
        ).with_(system="finetuned_by_ranks"),
        tried=("F-FT-016",),
    ),
)
