"""Bugs in which rank sees which sample, and in which step."""

from __future__ import annotations

import numpy as np

from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train import reference as coordinator
from entrenar_py.train.arithmetic import sharding

from .subjects import REFERENCE, TEXTBOOK, TRAINING, reference, textbook, visit

_advance, _train = sharding.advance, coordinator.Trainer.train


def padded(ids: sharding.Ids, index: int, num_ranks: int) -> sharding.Ids:
    """Gives every rank the same number of samples, by repeating the first ones if needed."""
    full = [*ids, *ids[: -len(ids) % num_ranks]]
    return full[index::num_ranks]


def rank_shuffled(ids: sharding.Ids, index: int, num_ranks: int) -> sharding.Ids:
    """Gives every rank its part of another permutation."""
    own: list[int] = np.random.default_rng(index).permutation(ids).tolist()
    return sharding.cut(own, num_ranks)[index]


def ceil_cut(ids: sharding.Ids, num_parts: int) -> list[sharding.Ids]:
    """Cuts parts of the rounded-up size; a part that starts past the end gets the last sample."""
    size = -(-len(ids) // num_parts)
    return [ids[part * size : (part + 1) * size] or ids[-1:] for part in range(num_parts)]


def rounded_down(ids: sharding.Ids, index: int, num_ranks: int) -> sharding.Ids:
    """Gives every rank the rounded-down share, and drops the rest."""
    size = len(ids) // num_ranks
    return ids[index * size : (index + 1) * size]


def dropping_last(position: sharding.Position, drawn: int, num_samples: int) -> sharding.Position:
    """Starts a new epoch when the remaining samples would not fill a batch."""
    after = _advance(position, drawn, num_samples)
    short = num_samples - after.offset < drawn
    return sharding.Position(after.epoch + 1, 0) if short else after


def same_every_epoch(scenario: Scenario, epoch: int) -> np.random.Generator:
    """Uses the order of epoch 0 in every epoch."""
    return scenario.rng("order", 0)


def one_too_far(visit: sharding.Ids, position: sharding.Position, batch_size: int) -> sharding.Ids:
    """Makes batches that overlap by one sample."""
    start = max(position.offset - 1, 0)
    return visit[start : position.offset + batch_size]


def one_step_short(self: coordinator.Trainer) -> str:
    """Leaves the last step out, and reports completed."""
    self.plan = self.plan.with_(num_steps=self.plan.num_steps - 1)
    return _train(self)


_PADDED = textbook(world_size=4, num_samples=13, batch_size=13)
_UNSYNCED = textbook(num_samples=8, batch_size=8)
_CEILED = reference(world_size=4, num_shards=4, num_samples=9, batch_size=9)
_UNEVEN = textbook(num_samples=9, batch_size=9)
_TWO_EPOCHS = textbook(num_steps=6)


def _overlap() -> tuple[int, ...]:
    """Return the samples that rank 1 draws although rank 0 has drawn them."""
    ids = visit(_UNSYNCED)
    first, second = rank_shuffled(ids, 0, 2), rank_shuffled(ids, 1, 2)
    return tuple(i for i in second if i in first)


VARIANTS = (
    Variant(
        name="sampler-pad",
        summary="the sampler repeats the first samples until all ranks have the same number",
        source="pytorch #25162",
        plants={f"{TEXTBOOK}.local_batch": padded},
        scenario=_PADDED,
        invariants=("F-DP-002",),
        # 13 samples dealt to 4 ranks: places 13, 14, 15 are filled with samples 0, 1, 2 and
        # belong to ranks 1, 2, 3; rank 1 is the first to draw a sample that rank 0 has.
        place={"step": 0, "rank": 1, "shard": 1, "sample_ids": (visit(_PADDED)[0],)},
    ),
    Variant(
        name="shuffle-unsync",
        summary="ranks shard different permutations, so that shards overlap",
        source="accelerate #2694",
        plants={f"{TEXTBOOK}.local_batch": rank_shuffled},
        scenario=_UNSYNCED,
        invariants=("F-DP-002",),
        place={"step": 0, "rank": 1, "shard": 1, "sample_ids": _overlap()},
    ),
    Variant(
        name="split-ceil",
        summary="slices are rounded up and overrun the batch: the last rank gets a sample twice",
        source="accelerate #2781",
        plants={f"{TRAINING}.sharding.cut": ceil_cut},
        scenario=_CEILED,
        invariants=("F-DP-002",),
        place={"step": 0, "rank": 3, "shard": 3, "sample_ids": (visit(_CEILED)[-1],)},
    ),
    Variant(
        name="split-floor",
        summary="rounded-down slices leave out the remainder of the batch",
        source="classic",
        plants={f"{TEXTBOOK}.local_batch": rounded_down},
        scenario=_UNEVEN,
        invariants=("F-DP-002",),
        place={"step": 0, "expected": "9", "got": "8"},
    ),
    Variant(
        name="last-batch-dropped",
        summary="the short last batch of an epoch is dropped although nothing asks for it",
        source="classic (drop_last)",
        plants={f"{TRAINING}.sharding.advance": dropping_last},
        scenario=reference(),
        invariants=("F-DP-002",),
        place={"step": 1, "sample_ids": tuple(sorted(visit(reference())[16:]))},
    ),
    Variant(
        name="batches-overlap",
        summary="a batch starts with the last sample of the batch before it",
        source="classic (off by one)",
        plants={f"{TRAINING}.sharding.batch": one_too_far},
        scenario=reference(),
        invariants=("F-DP-002",),
        place={"step": 1, "rank": 0, "shard": 0, "sample_ids": (visit(reference())[7],)},
    ),
    Variant(
        name="last-step-missing",
        summary="the loop ends a step before the last, and the run says that it has completed",
        source="classic (off by one)",
        plants={f"{REFERENCE}.Trainer.train": one_step_short},
        scenario=reference(),
        invariants=("F-DP-002",),
        place={"step": 3},
    ),
    Variant(
        name="same-order-every-epoch",
        summary="set_epoch is forgotten: every epoch has the order of the first",
        source="pytorch DistributedSampler, set_epoch as documented",
        plants={f"{TEXTBOOK}.order_rng": same_every_epoch},
        scenario=_TWO_EPOCHS,
        invariants=("F-TI-005",),
        place={"step": 3, "sample_ids": tuple(visit(_TWO_EPOCHS))},
    ),
)
