"""The samples that each epoch of a run should have, and ranks that split the data otherwise."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from entrenar_py.check import evidence
from entrenar_py.check.evidence.needs import ALONE, REPEATED, SHORTENED, Traces
from entrenar_py.shared.trace import Selection, Shard, Trace
from entrenar_py.shared.verdict import Tally

TELLING_MIN = 16  # fewer samples of a shuffled epoch may be the first ones by chance


class Population:
    """The numbers of the samples of `trace`, in which each epoch should have all.

    These are the samples that any rank selects, or all from 0 on. If they are only guessed
    (`is_guessed`), those that are `drawn` in any epoch are likely, though a curriculum may draw
    others in each; certain are those that the epoch has on one worker, in the run `alone`. If they
    vary (`is_varied`), none is.
    """

    def __init__(self, trace: Trace, alone: Trace | None = None) -> None:
        self.is_guessed = trace.traits.population == "guessed"
        self.is_varied = trace.traits.population == "varied"
        events = () if self.is_varied else trace.of(Selection)
        selected = {id_ for event in events for id_ in event.ids}
        whole = range(trace.scenario.num_samples)
        self.samples: Collection[int] = selected or whole
        self._in_order = sorted(selected) if selected else whole
        self.drawn = {id_ for shard in trace.of(Shard) for id_ in shard.ids}
        self._alone: dict[int, set[int]] = defaultdict(set)  # by epoch
        for shard in () if alone is None else alone.of(Shard):
            self._alone[shard.epoch].update(shard.ids)
        self.in_words = "its selection" if selected else f"0 .. {len(self.samples) - 1}"

    def strange(self, ids: Collection[int]) -> tuple[int, ...]:
        """Return those of `ids` that are not in the data set."""
        return tuple(id_ for id_ in ids if id_ not in self.samples)

    def num_lacking(self, seen: Collection[int]) -> int:
        """Return how many samples are not in `seen`."""
        return len(self.samples) - len(seen) + len(self.strange(seen))

    def lacking(self, seen: Collection[int]) -> Iterator[int]:
        """Yield the samples that are not in `seen`, in order."""
        return (id_ for id_ in self._in_order if id_ not in seen)

    def surely_lacking(self, seen: Collection[int]) -> Iterator[int]:
        """Yield the samples that are not in `seen` and should be, in order."""
        lacking = self.lacking(seen)
        return (id_ for id_ in lacking if id_ in self.drawn) if self.is_guessed else lacking

    def lacking_beside_alone(self, epoch: int, seen: Collection[int]) -> list[int]:
        """Return the samples that an epoch lacks of those that it has on one worker, in order.

        If it has others in their place, both may be right: there are none.
        """
        whole = self._alone[epoch]
        return sorted(whole.difference(seen)) if whole.issuperset(seen) else []


def compare_selections(tally: Tally, trace: Trace) -> None:
    """Check that ranks which select samples of a data set select the same ones, or disjoint ones.

    If more than half of them agree, the first of the others is named.
    """
    chosen = {event.rank: frozenset(event.ids) for event in trace.of(Selection)}
    if len(chosen) < 2 or trace.traits.population == "varied":
        return
    (usual, count), *_ = Counter(chosen.values()).most_common()
    first = min(chosen)
    model = usual if 2 * count > len(chosen) else chosen[first]
    holder = min(rank for rank, ids in chosen.items() if ids == model)
    for rank, ids in sorted(chosen.items()):
        both = model & ids
        tally.check(
            ids == model or not both,
            f"rank {rank} trains on other samples than rank {holder}: {len(both)} samples are in "
            f"the data of both, {len(model - ids)} only in that of rank {holder}, "
            f"{len(ids - model)} only in that of rank {rank}; split the data with the same seed on "
            "all ranks",
            step=-1,
            rank=rank,
            sample_ids=tuple(sorted(model ^ ids)),
            scenario=trace.scenario,
        )


def has_parts(trace: Trace) -> bool:
    """Return whether ranks select different samples."""
    return len({event.ids for event in trace.of(Selection)}) > 1


def in_epochs(runs: Traces) -> list[Trace]:
    """Return the runs of a user's trainer, and their witnesses, whose samples come in epochs.

    They don't if samples are drawn with replacement, from data that varies, or are known only by
    their content.
    """
    needs = (ALONE, REPEATED, SHORTENED)
    witnesses = [trace for need in needs for trace in runs.witnesses.get(need, ())]
    return [
        trace
        for trace in (*runs, *witnesses)
        if trace.scenario.workload == "own"
        and not trace.traits.replacement
        and trace.traits.population != "varied"
        and trace.traits.sample_ids != "content"
        and any(shard.ids for shard in trace.of(Shard))
    ]


def has_ended_epoch(trace: Trace) -> bool:
    """Return whether `trace` shows an epoch up to its end: all its samples, or the next one's.

    If the script reports no epochs, a sample that comes again begins the next one. Where only the
    samples that were drawn say how many there are, and they are shuffled, all numbers from 0 on are
    an epoch: within one, some would be lacking.
    """
    drawn: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for shard in trace.of(Shard):
        if shard.ids:
            drawn[shard.epoch][shard.step].extend(shard.ids)
    if len(drawn) > 1:
        return True
    population = Population(trace)
    for by_step in drawn.values():
        ids = [id_ for of_step in by_step.values() for id_ in of_step]
        if trace.traits.epochs == "untold" and len(ids) > len({*ids}):
            return True
        is_known = not population.is_guessed or (len(ids) >= TELLING_MIN and not _blocks(by_step))
        if is_known and not population.num_lacking({*ids}):
            return True
    return False


def is_endless(trace: Trace) -> bool:
    """Return whether a sampler of the script's goes on in one pass, once all samples have come."""
    if trace.scenario.workload != "own" or trace.traits.population != "guessed":
        return False
    seen = set[int]()
    for _, shards in sorted(evidence.shards(trace).items()):
        drawn = [id_ for shard in shards if not shard.epoch for id_ in shard.ids]
        if len({*drawn}) < len(drawn) or not seen.isdisjoint(drawn):
            return len(seen.union(drawn)) >= trace.scenario.num_samples
        seen.update(drawn)
    return False


def count_on(traces: Collection[Trace]) -> bool:
    """Return whether samples are numbered from step to step, in runs on several numbers of workers.

    They are those of a stream (tasks, games, noise), which has no epochs: nobody says how many
    samples there are, each step has the next ones, and the same ones whatever draws them.
    """
    by_run = []
    for trace in traces:
        drawn: dict[int, list[int]] = defaultdict(list)
        for shard in trace.of(Shard):
            drawn[shard.step].extend(shard.ids)
        if trace.traits.population != "guessed" or len(drawn) < 2:
            return False
        by_run.append(_blocks(drawn))
    are_alike = all(
        one[step] == other[step]
        for one in by_run
        for other in by_run
        for step in one.keys() & other.keys()
    )
    return all(by_run) and are_alike and len({trace.scenario.world_size for trace in traces}) > 1


def _blocks(by_step: Mapping[int, Sequence[int]]) -> dict[int, range]:
    """Return the samples of each step, if they follow on those of the step before; else {}."""
    blocks: dict[int, range] = {}
    begin = 0
    for step, ids in sorted(by_step.items()):
        blocks[step] = range(begin, begin + len(ids))
        if sorted(ids) != [*blocks[step]]:
            return {}
        begin += len(ids)
    return blocks
