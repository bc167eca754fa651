"""The scenario and the traits that the files of a run's ranks show it had."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from entrenar_py.rank_files import assembly, shown_optimizer
from entrenar_py.rank_files.rank_trace import RankTrace
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Event, Shard, Traits, Update

SYSTEM = "command"


def of(
    ranks: Sequence[RankTrace], events: Sequence[Event], world_size: int
) -> tuple[Scenario, Traits]:
    """Return scenario and traits of a run of `world_size` ranks.

    Its seed is 0, as no file tells it. `events` are what `assembly.ordered` gives for `ranks`.
    """
    header: Mapping[str, Any] = ranks[0].header if ranks else {}
    shards = [event for event in events if isinstance(event, Shard)]
    updates = [event for event in events if isinstance(event, Update)]
    samples_by_step: Counter[int] = Counter()
    for shard in shards:
        samples_by_step[shard.step] += len(shard.ids)
    last_id = max((id_ for shard in shards for id_ in shard.ids), default=0)
    num_samples = max(header.get("num_samples") or last_id + 1, world_size)
    batch_size = max(samples_by_step.values(), default=1) or 1
    accumulation = 1 + max((shard.shard for shard in shards), default=0)
    num_parts = len({*assembly.places(ranks).values()})
    optimizer = shown_optimizer.of(ranks, updates)
    scenario = Scenario(
        system=SYSTEM,
        workload="own",
        world_size=world_size,
        seed=0,
        num_shards=max(accumulation * num_parts, world_size),
        num_samples=num_samples,
        batch_size=min(batch_size, num_samples),
        num_steps=1 + max((update.step for update in updates), default=0),
        accumulation=accumulation,
        dropout=float(header.get("dropout", 0.0)),
        detail="values" if header.get("values") else "digests",
        optimizer=optimizer.kind,
        learning_rate=optimizer.learning_rate,
        weight_decay=optimizer.weight_decay,
    )
    return scenario, Traits.from_dict({**_of_the_data(ranks, header), **optimizer.traits})


def steps_per_epoch(scenario: Scenario, traits: Traits) -> int:
    """Return how many batches the data set has."""
    batches = scenario.num_samples / scenario.batch_size
    return max(1, int(batches) if traits.drop_last else math.ceil(batches))


def _of_the_data(ranks: Sequence[RankTrace], header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs from the usual in how samples are drawn and computed."""
    # Gradients are recorded as they are applied: a step is no sign of how they were clipped.
    traits: dict[str, Any] = {"clipping": "other"}
    traits |= {name: True for name in ("drop_last", "replacement") if header.get(name)}
    if any(rank.layout is not None for rank in ranks):
        traits["shared"] = True  # ranks that draw the same samples share a shard
    if compressed := next((rank.compression for rank in ranks if rank.compression), ""):
        traits["compressed"] = compressed
    if header.get("batch_norm") and any(rank.local for rank in ranks):
        traits["batch_norm"] = True  # whose statistics forward passes changed
    return traits
