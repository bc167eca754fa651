"""The samples that an epoch of a run should have."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

from entrenar_py.shared.trace import Selection, Shard, Trace


class Population:
    """The ids of the samples that each epoch of `trace` should have.

    They are the samples that any rank selects, or all ids from 0 on. If the ids are only guessed
    (`is_guessed`), those that were `drawn` in any epoch are likely members, though a curriculum may
    draw different ones in each epoch. Certain members are the samples of the epoch in the run
    `alone`, on one worker. If a sampler of the script repeats most samples in that run, it does so
    on purpose (`is_repeated`). If epochs vary (`is_varied`), selections are ignored.
    """

    def __init__(self, trace: Trace, alone: Trace | None = None) -> None:
        self.is_guessed = trace.traits.population != "known"
        self.is_varied = trace.traits.population == "varied"
        events = () if self.is_varied else trace.of(Selection)
        selected = {id_ for event in events for id_ in event.ids}
        whole = range(trace.scenario.num_samples)
        self.samples: Collection[int] = selected or whole
        self._in_order = sorted(selected) if selected else whole
        self.drawn = {id_ for shard in trace.of(Shard) for id_ in shard.ids}
        self._alone: dict[int, set[int]] = defaultdict(set)  # epoch -> ids
        for shard in () if alone is None else alone.of(Shard):
            self._alone[shard.epoch].update(shard.ids)
        self._cut_alone = () if alone is None else alone.traits.cut
        self.is_repeated = is_from_own_sampler(trace) and _repeats_most(alone)
        self.in_words = "its selection" if selected else f"0 .. {len(self.samples) - 1}"

    def strange(self, ids: Collection[int]) -> tuple[int, ...]:
        """Return the members of `ids` that are not in the data set."""
        return tuple(id_ for id_ in ids if id_ not in self.samples)

    def num_lacking(self, seen: Collection[int]) -> int:
        """Return the number of samples that are not in `seen`."""
        return len(self.samples) - len(seen) + len(self.strange(seen))

    def lacking(self, seen: Collection[int]) -> Iterator[int]:
        """Yield the samples that are not in `seen`, in order."""
        return (id_ for id_ in self._in_order if id_ not in seen)

    def surely_lacking(self, seen: Collection[int]) -> Iterator[int]:
        """Yield, in order, the samples that are not in `seen` and should be.

        If the samples are guessed, only those that were drawn in any epoch should be.
        """
        lacking = self.lacking(seen)
        return (id_ for id_ in lacking if id_ in self.drawn) if self.is_guessed else lacking

    def lacking_beside_alone(self, epoch: int, seen: Collection[int]) -> list[int]:
        """Return, in order, the samples that an epoch has on one worker and lacks here.

        Return [] if it also has samples here that it lacks on one worker: then both may be right.
        """
        whole = self._alone[epoch]
        return sorted(whole.difference(seen)) if whole.issuperset(seen) else []

    def is_cut_wrongly(self, trace: Trace, epoch: int, seen: Collection[int]) -> bool:
        """Return whether an epoch that lacks samples of a known population is wrong.

        It is if the loader ended it. If the script did, it may be meant (`steps_per_epoch`). Then
        the run on one worker decides: it is wrong if that run goes on, and the run on several ends
        all of its epochs early (it may take `len(loader) // world_size` batches).
        """
        cut = trace.traits.cut
        if epoch not in cut:
            return True
        ended = {shard.epoch for shard in trace.of(Shard) if shard.ids}
        whole = self._alone[epoch]
        is_meant = epoch in self._cut_alone and self.num_lacking(whole) > 0
        goes_on = bool(self.lacking_beside_alone(epoch, seen)) and not is_meant
        return goes_on and ended - {max(ended)} <= {*cut}


def _repeats_most(alone: Trace | None) -> bool:
    """Return whether most samples come several times in an epoch of the run on one worker."""
    times = Counter(
        (shard.epoch, id_)
        for shard in (() if alone is None else alone.of(Shard))
        for id_ in shard.ids
    )
    return sum(count > 1 for count in times.values()) * 2 > len(times)


def is_from_own_sampler(trace: Trace) -> bool:
    """Return whether a sampler of the script decides which samples a loader draws."""
    return trace.traits.population == "guessed" and trace.traits.sample_ids == "seen"
