"""F-TI-005: random streams that must differ do differ, and those that must agree do agree."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from entrenar_py.check import evidence
from entrenar_py.check.causes import presuppositions, state
from entrenar_py.check.causes.random_draws import CONTENTS_BOUND_MOVED, PLACES, are_alike, named
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import plans
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.clauses.coverage import in_epochs, is_endless
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, facts, missing
from entrenar_py.check.evidence.needs import ALONE, SHORTENED, Traces
from entrenar_py.shared.faults import OF_LOADERS
from entrenar_py.shared.trace import Drawn, Shard, Start, Trace, Update
from entrenar_py.shared.verdict import MEANING, Finding, Tally

# Shorter orders are not compared. Two shuffled orders of 10 samples are equal once in 10! = 3.6e6.
ORDER_LENGTH_MIN = 10
CHANCE_MAX = 1e6  # an event with a chance of one in this many doesn't happen
# Workloads in which dropout draws random numbers.
DRAWING = ("mlp", "decoder", "decoder_full", "own")


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that dropout differs by step and shard, orders by epoch, and first weights agree."""
    tally = missing.tally_for(invariant, runs)
    for trace in runs:
        state.tell_peculiar(tally, trace)
    runs = evidence.usable_runs(runs, tally)
    alone = next(iter(runs.of(ALONE)), None)
    for trace in runs:
        if trace.of(Drawn):
            judge_streams(tally, trace, alone)
        else:
            _dropout_differs(tally, trace)
        modes_alike(tally, trace)
        if trace.traits.population != "varied":  # two different data sets may have the same order
            _orders_differ(tally, trace)
        compared = Compared(runs=runs, model=trace, trace=trace)
        left = presuppositions.comparable(tally, presuppositions.RANKS, compared)
        if left is not None:
            _initial_agrees(tally, left.trace)
    for trace in runs.witnesses.get(SHORTENED, ()):
        if trace.traits.population != "varied":
            _orders_differ(tally, trace)
        between = Tally(tally.invariant, observed=tally.observed)
        modes_alike(between, trace)  # an evaluation runs between epochs
        tally.take(between)
    _same_for_any_worker_count(tally, runs)
    if lacks_second_epoch(runs):
        why = "no two epochs were seen, so it is unknown whether each has its own order"
        missing.ask(tally, why, facts.EPOCH_END)
    return tally.finding(
        nothing="no random draws, no second epoch and no second worker were seen: "
        + missing.told(
            tally,
            trace="record Start.weights on two ranks, Shard.draws under dropout, or Shard.ids over "
            "two epochs",
            script="run it with two workers or more (--world-size), or for more than one epoch",
        )
    )


def _dropout_differs(tally: Tally, trace: Trace) -> None:
    """Check that no two shards use the same mask, and that every shard with samples draws one."""
    owner: dict[str, Shard] = {}
    drew = any(shard.draws is not None for shard in trace.of(Shard))
    if trace.scenario.dropout and not drew and trace.scenario.workload in DRAWING:
        why = f"dropout={trace.scenario.dropout} and no shard drew a random number"
        missing.ask(tally, why, facts.DRAWS)
    for shard in trace.of(Shard):
        if not shard.ids or not drew:
            continue
        if shard.draws is None:
            message = f"shard {shard.shard} drew no random numbers, others did"
            tally.check(False, message, **evidence.place(trace, shard))
            continue
        first = owner.setdefault(shard.draws, shard)
        same_place = (first.step, first.shard) == (shard.step, shard.shard)
        tally.check(
            first is shard or same_place,
            f"shard {shard.shard} of step {shard.step} draws the same random numbers as shard "
            f"{first.shard} of step {first.step} (rank {first.rank})",
            **evidence.place(trace, shard),
        )


@dataclass(frozen=True)
class _Orders:
    """The `orders` of samples by epoch, and the epochs that are `shuffled`.

    An epoch is not shuffled if its sample ids grow from step to step, or within each rank, or
    within each loader worker of a rank (loader workers take turns with batches). `first_step` maps
    epochs to steps.
    """

    orders: Mapping[int, Sequence[int]]
    shuffled: Collection[int]
    first_step: Mapping[int, int]
    of_ranks: Mapping[tuple[int, int], Sequence[int]]  # (epoch, rank) -> order

    def are_alike(self, before: int, after: int, common: int) -> bool:
        """Return whether two epochs have the same order, or the same order within each rank.

        Only the first `common` samples are compared. Ranks are compared separately because a script
        that skips steps may have samples of several passes in a step.
        """
        if self.orders[before][:common] == self.orders[after][:common]:
            return True
        ranks = {rank for epoch, rank in self.of_ranks if epoch == after}
        pairs = [[self.of_ranks.get((e, rank), ()) for e in (before, after)] for rank in ranks]
        known = [(one[: len(other)], other[: len(one)]) for one, other in pairs]
        is_telling = sum(len(one) for one, _ in known) >= ORDER_LENGTH_MIN
        return is_telling and all(len(one) > 0 and one == other for one, other in known)

    def pairs(self) -> list[tuple[int, int, int]]:
        """Return (epoch, next epoch, number of samples to compare) for the epochs to compare."""
        known = [(before, after) for before, after in pairwise(sorted(self.orders))]
        sized = [(*pair, min(len(self.orders[epoch]) for epoch in pair)) for pair in known]
        return [
            (before, after, common)
            for before, after, common in sized
            if common >= ORDER_LENGTH_MIN and before in self.shuffled
        ]


def _orders_of(trace: Trace) -> _Orders:
    orders: dict[int, list[int]] = {}
    by_rank: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    once: dict[tuple[int, int], list[tuple[int, ...]]] = {}  # without the samples that pad an epoch
    seen: dict[int, set[int]] = defaultdict(set)
    reached: dict[int, int] = {}
    mixed: set[int] = set()
    first_step: dict[int, int] = {}
    for step, shards in sorted(evidence.shards(trace).items()):
        for shard in shards:
            orders.setdefault(shard.epoch, []).extend(shard.ids)
            by_rank.setdefault((shard.epoch, shard.rank), []).append(shard.ids)
            new = tuple(id_ for id_ in shard.ids if id_ not in seen[shard.epoch])
            once.setdefault((shard.epoch, shard.rank), []).append(new)
            first_step.setdefault(shard.epoch, step)
        for epoch in {shard.epoch for shard in shards}:
            ids = {i for shard in shards if shard.epoch == epoch for i in shard.ids} - seen[epoch]
            if ids and min(ids) <= reached.get(epoch, -1):
                mixed.add(epoch)
            reached[epoch] = max(ids, default=reached.get(epoch, -1))
            seen[epoch] |= ids
    shuffled = mixed & {epoch for (epoch, _), drawn in once.items() if not in_turns(drawn)}
    of_ranks = {place: [*chain.from_iterable(drawn)] for place, drawn in by_rank.items()}
    return _Orders(orders, shuffled, first_step, of_ranks)


def _drawn_orders(trace: Trace) -> list[_Orders]:
    """Return the orders of a run's epochs.

    Return [] if its script draws no order, or counts wrong batches.

    A script that continues in an endless pass may count batches to know when an epoch ends. If the
    harness shortens or merges its loaders, the script counts too many, and its epochs are unknown.
    """
    if not is_endless(trace):
        return [] if trace.traits.ordered else [_orders_of(trace)]
    counts_others = any(fault.kind in OF_LOADERS for fault in trace.scenario.faults)
    return [] if trace.traits.ordered or counts_others else [*_passes(trace)]


def _orders_differ(tally: Tally, trace: Trace) -> None:
    """Check that two epochs of a shuffled data set have different orders."""
    for seen, before, after, common in _pairs(trace):
        tally.check(
            not seen.are_alike(before, after, common),
            f"epoch {after} visits its samples in the order of epoch {before}, {MEANING}"
            "sampler.set_epoch(epoch) is never called",
            step=seen.first_step[after],
            sample_ids=tuple(seen.orders[after][:common]),
            scenario=trace.scenario,
        )


def _pairs(trace: Trace) -> Iterator[tuple[_Orders, int, int, int]]:
    """Yield the orders and the epochs of each pair to compare, as `_Orders.pairs` does.

    A pass before the weights are put back, such as a range test of rates, is no epoch.
    """
    anew = evidence.begins_anew(trace)
    for seen in _drawn_orders(trace):
        for before, after, common in seen.pairs():
            if not anew & {*range(seen.first_step[before] + 1, seen.first_step[after] + 1)}:
                yield seen, before, after, common


def _passes(trace: Trace) -> Iterator[_Orders]:
    """Yield the orders within one endless pass: a sample that comes again is in the next epoch.

    Ranks may take turns sample by sample, or batch by batch: both are tried.
    """
    drawn: list[tuple[int, int, int, int]] = []  # (step, rank, place, sample)
    for step, shards in sorted(evidence.shards(trace).items()):
        for shard in shards:
            drawn += [(step, shard.rank, place, id_) for place, id_ in enumerate(shard.ids)]
    for turns in (drawn, sorted(drawn, key=lambda one: (one[0], one[2], one[1]))):
        orders: dict[int, list[int]] = defaultdict(list)
        first_step: dict[int, int] = {}
        times = Counter[int]()
        for step, _, _, id_ in turns:
            orders[times[id_]].append(id_)
            first_step.setdefault(times[id_], step)
            times[id_] += 1
        shuffled = {n for n, ids in orders.items() if ids != sorted(ids)}
        yield _Orders(orders, shuffled, first_step, {})


def lacks_second_epoch(runs: Traces) -> bool:
    """Return whether samples are shuffled, but no run of a user's trainer shows two epochs."""
    large = [t for t in in_epochs(runs) if t.scenario.num_samples >= ORDER_LENGTH_MIN]
    draw = any(one.shuffled for trace in large for one in _drawn_orders(trace))
    return draw and not any(True for trace in large for _ in _pairs(trace))


def in_turns(drawn: Sequence[tuple[int, ...]]) -> bool:
    """Return whether the ids of micro-batches grow, over all or for each worker of a loader.

    The workers of a loader take turns. With several of them, ids must also grow within each
    micro-batch. And there must be so many ids that a shuffle hardly leaves them in order: a few
    micro-batches may look ordered by chance.
    """

    def grows(batches: Sequence[tuple[int, ...]]) -> bool:
        ids = [*chain.from_iterable(batches)]
        return ids == sorted(ids)

    if grows(drawn):
        return True
    # In a large epoch the number of orders has millions of digits, so logarithms are compared.
    is_telling = sum(math.lgamma(len(ids) + 1) for ids in drawn) > math.log(CHANCE_MAX)
    most = len(drawn) // 2
    return is_telling and any(
        all(grows(drawn[worker::workers]) for worker in range(workers))
        for workers in range(2, most + 1)
    )


def _initial_agrees(tally: Tally, trace: Trace) -> None:
    starts = [start for start in trace.of(Start) if start.step == 0 and not start.resumed]
    known = [start for start in starts if start.weights]
    first = evidence.updates(trace).get(0, {})
    unknown = (first.keys() | {start.rank for start in starts}) - {start.rank for start in known}
    if unknown and len(first) > 1:
        why = f"initial weights of {missing.named(unknown)} were not recorded"
        missing.ask(tally, why, facts.START_WEIGHTS)
    for start in known[1:]:
        message = f"rank {start.rank} starts from different weights than rank {known[0].rank}"
        place = {**evidence.place(trace, start), "step": -1}
        closeness.compare_exact(tally, known[0].weights, start.weights, message, **place)


def _same_for_any_worker_count(tally: Tally, runs: Traces) -> None:
    """Check that streams keyed by shard do not depend on the number of workers."""
    base, alone = runs.base, runs.of(ALONE)
    if base is None or not evidence.is_as_trained(base):
        return
    comparable = [
        trace
        for trace in (*alone, base)
        if trace.draws_by_shard and trace.scenario.num_shards == base.scenario.num_shards
    ]
    model = {
        (shard.step, shard.shard): shard.draws
        for trace in comparable[:1]
        for shard in trace.of(Shard)
        if shard.draws is not None
    }
    for trace in comparable[1:]:
        for shard in trace.of(Shard):
            expected = model.get((shard.step, shard.shard))
            if expected is not None and shard.draws is not None:
                message = "the random numbers of a shard depend on the number of workers"
                tally.equal(expected, shard.draws, message, **evidence.place(trace, shard))


def _absent(traces: Sequence[Trace]) -> str:
    """Return why nothing random must differ or agree: no draws on one worker, and no shuffling.

    Return "" if a run draws, or shuffles, or has several workers.
    """
    draws = any(
        trace.of(Drawn)
        or trace.scenario.dropout
        or any(shard.draws is not None for shard in trace.of(Shard))
        or (trace.traits.sample_ids != "content" and any(o.shuffled for o in _drawn_orders(trace)))
        for trace in traces
    )
    return "" if draws else evidence.started_alone(traces)


# --- streams of a user's script -------------------------------------------------------------------

# Checks that the random streams of a user's script differ where they must.
#
# Numbers for samples (masks, noise, augmentation) must differ between ranks that have different
# samples, between the workers of a loader, and between epochs. Numbers for the whole batch may be
# the same on all ranks, and must be if each rank uses its own part of them.

_IN_THE_MODEL = "forward"
_JUDGED = ("batch", "forward", "loss", "loader")
_OWN_SEEDS = "seed each rank differently, torch.manual_seed(seed + rank)"
_OWN_GENERATOR = (
    "let an evaluation draw from a generator of its own, torch.Generator().manual_seed(seed)"
)
_Place = tuple[int, int | None, str, str]  # step, micro-batch, place of the draw, generator


def judge_streams(tally: Tally, trace: Trace, alone: Trace | None) -> None:
    """Judge the streams of a run. `alone` is the same training on one worker, or None."""
    _masks_on_every_rank(tally, trace)
    _recomputed_alike(tally, trace)
    drawn = [event for event in trace.standing.of(Drawn) if event.where in _JUDGED]
    main = [event for event in drawn if event.worker is None]
    streams = _Streams(trace, main, alone)
    _ranks_differ(tally, trace, main, streams)
    _passes_differ(tally, trace, main, streams)
    _workers_differ(tally, trace, [event for event in drawn if event.worker is not None], alone)


def _masks_on_every_rank(tally: Tally, trace: Trace) -> None:
    """Check that no rank skips dropout in every step while another rank never does."""
    if not trace.scenario.dropout:
        return
    by_rank: dict[int, list[Shard]] = {}
    for shard in trace.of(Shard):
        if shard.ids:
            by_rank.setdefault(shard.rank, []).append(shard)
    always = [rank for rank, shards in by_rank.items() if all(s.draws for s in shards)]
    for shards in by_rank.values():
        never = all(shard.draws is None for shard in shards)
        tally.check(
            not (always and never),
            f"rank {shards[0].rank} drew no random numbers in the forward pass, but rank "
            f"{always[0] if always else ''} did in every pass: dropout is off on rank "
            f"{shards[0].rank}",
            **evidence.place(trace, shards[0]),
        )


def modes_alike(tally: Tally, trace: Trace) -> None:
    """Check that all ranks train in the same mode, set by `train()` or `eval()`, and keep it.

    Dropout and running statistics depend on the mode.
    """
    if not (left_out := _what_evaluation_stops(trace)):
        return
    off: dict[int, dict[int, Shard]] = {}  # step -> rank -> its first shard in evaluation mode
    trained: dict[int, set[int]] = {}
    for shard in trace.standing.of(Shard):
        if shard.evaluating:
            off.setdefault(shard.step, {}).setdefault(shard.rank, shard)
        else:
            trained.setdefault(shard.step, set()).add(shard.rank)
    for step, by_rank in sorted(off.items()):
        others = trained.get(step, set()) - by_rank.keys()
        if others:
            shard = by_rank[min(by_rank)]
            tally.check(
                False,
                f"rank {shard.rank} trains in evaluation mode, {left_out}, and rank "
                f"{min(others)} doesn't: call model.train() after model.eval()",
                **evidence.place(trace, shard),
            )
    if off and trained and min(off) > min(trained):
        _mode_left(tally, trace, off, max(trained), left_out)


def _what_evaluation_stops(trace: Trace) -> str:
    """Return what a model leaves out in evaluation mode; "" if both modes train the same way."""
    if trace.scenario.dropout:
        return "with dropout off"
    is_normalised = any(update.local for update in trace.of(Update))
    return "with batch normalisation by running statistics" if is_normalised else ""


def _mode_left(
    tally: Tally, trace: Trace, off: Mapping[int, Mapping[int, Shard]], last: int, left_out: str
) -> None:
    """Judge a model that is in evaluation mode in all steps after step `last`.

    A script may switch to this mode on purpose at some step, but not by an evaluation.
    """
    first = min(off)
    if first <= last:
        return
    words = f"the model is in evaluation mode from step {first} on, {left_out}"
    if all(shard.evaluated for shard in off[first].values()):
        shard = off[first][min(off[first])]
        message = f"{words}, as the evaluation before it left it: call model.train() after it"
        tally.check(False, message, **evidence.place(trace, shard))
    else:
        tally.miss(f"{words}: call model.train() after model.eval()")


def _recomputed_alike(tally: Tally, trace: Trace) -> None:
    """Check that a layer that is computed again draws the same numbers as before."""
    for event in trace.standing.of(Drawn):
        if event.where == "recomputed":
            tally.check(
                False,
                f"rank {event.rank} draws new random numbers when a layer is recomputed in the "
                f"backward pass, from {named(event.generator)}: the gradient uses different "
                "masks from the loss; let the checkpoint restore the generators "
                "(preserve_rng_state=True)",
                step=event.step,
                rank=event.rank,
                scenario=trace.scenario,
            )


def _ranks_differ(tally: Tally, trace: Trace, drawn: Sequence[Drawn], streams: _Streams) -> None:
    """Check that ranks with different samples don't draw the same numbers for them."""
    there: dict[_Place, list[Drawn]] = {}
    unclear: set[str] = set()
    blamed: set[tuple[int, int, str, str]] = set()
    for event in drawn:
        before = there.setdefault(_place(event), [])
        peers = [peer for peer in before if streams.are_others(peer, event)]
        before.append(event)
        # The state after the draw decides, because the generator may have been seeded here, by rank
        # or not.
        peer = next((peer for peer in peers if peer.after == event.after), None)
        if peer is None:
            tally.compared += bool(peers)
            continue
        parted = streams.parted(event)
        if parted is None and not streams.is_by_sample(event):
            if event.where == _IN_THE_MODEL:
                unclear.add(event.generator)
            continue
        if not streams.are_surely_others(peer, event):
            tally.miss(
                f"ranks {peer.rank} and {event.rank} draw the same random numbers "
                f"{PLACES[event.where]}, and their samples are not known: right if they share "
                "the samples, as parts of one model do, else wrong; call obs.samples(ids)"
            )
            continue
        # The first finding on two ranks is also the earliest. Later draws have been the same since
        # then, or since both were seeded again. So the beginning is searched for only once.
        pair = peer.rank, event.rank, event.where, event.generator
        since = event if pair in blamed else _begin_alike(trace, peer, event)
        blamed.add(pair)
        tally.check(
            False,
            f"rank {event.rank} draws the same random numbers as rank {peer.rank}, for other "
            f"samples ({PLACES[event.where]}, from {named(event.generator)}): "
            f"{_OWN_SEEDS if parted is None else _seeded_alike(parted)}",
            step=since.step,
            rank=since.rank,
            shard=_shard(trace, since),
            scenario=trace.scenario,
        )
    for generator in sorted(unclear):
        tally.note(
            f"all ranks draw the same numbers in the forward pass, from {named(generator)}: right "
            "for a number that the whole batch shares, wrong for masks of samples"
        )


def _seeded_alike(parted: int) -> str:
    return (
        f"in step {parted} each rank drew its own numbers, and since then the generator has had "
        f"the same seed on both; {_OWN_GENERATOR}"
    )


class _Streams:
    """The known random draws of a run: the samples that they are for, and whether each has its own.

    A stream is a place and a generator. `alone` is the same training on one worker, or None.
    """

    def __init__(self, trace: Trace, drawn: Iterable[Drawn], alone: Trace | None) -> None:
        self._trace, self._alone = trace, alone
        self._shards: dict[tuple[int, int], list[Shard]] = {}
        for shard in trace.standing.of(Shard):
            self._shards.setdefault((shard.step, shard.rank), []).append(shard)
        self._by_sample: dict[tuple[str, str], bool] = {}
        # Stream -> the first step in which ranks can be compared, if they drew their own numbers in
        # it.
        self._parted: dict[tuple[str, str], int | None] = {}
        first: dict[_Place, Drawn] = {}
        for event in drawn:
            peer = first.setdefault(_place(event), event)
            if peer is not event:
                is_apart = not {peer.before, peer.after} & {event.before, event.after}
                stream = event.where, event.generator
                self._parted.setdefault(stream, event.step if is_apart else None)

    def is_by_sample(self, event: Drawn) -> bool:
        """Return whether numbers are drawn for each sample, as far as `alone` shows."""
        stream = event.where, event.generator
        if stream not in self._by_sample:
            self._by_sample[stream] = _is_by_sample(self._trace, event, self._alone)
        return self._by_sample[stream]

    def parted(self, event: Drawn) -> int | None:
        """Return the first step of the event's stream if ranks drew their own numbers in that step.

        Return None otherwise, and for draws in that step. Numbers for the whole batch would be the
        same on all ranks in each step.
        """
        step = self._parted.get((event.where, event.generator))
        return step if step is not None and step < event.step else None

    def are_others(self, event: Drawn, other: Drawn) -> bool:
        """Return whether two ranks draw for different samples, or for unknown ones."""
        if event.part == other.part:
            return False
        mine, theirs = self.samples(event), self.samples(other)
        return mine is None or theirs is None or not _are_the_same(mine, theirs)

    def are_surely_others(self, event: Drawn, other: Drawn) -> bool:
        """Return whether two ranks that seem to draw for different samples certainly do."""
        is_known = None not in (self.samples(event), self.samples(other))
        return is_known or self._trace.traits.arranged != "guessed"

    def samples(self, event: Drawn) -> Shard | None:
        """Return the micro-batch for which numbers were drawn; None if its samples are unknown."""
        of_rank = self._shards.get((event.step, event.rank), [])
        shard = dict(enumerate(of_rank)).get(-1 if event.micro_batch is None else event.micro_batch)
        return shard if shard is not None and shard.ids else None


def _are_the_same(shard: Shard, other: Shard) -> bool:
    known = len(shard.contents) == len(shard.ids) and len(other.contents) == len(other.ids)
    pairs = zip(shard.contents, other.contents, strict=True) if known else ()
    return shard.ids == other.ids and all(
        are_alike(mine, theirs, CONTENTS_BOUND_MOVED) for mine, theirs in pairs
    )


def _begin_alike(trace: Trace, peer: Drawn, event: Drawn) -> Drawn:
    """Return the draw with which a rank began to draw the numbers of `peer`, as it does in `event`.

    For samples of different lengths, ranks draw different counts from one stream. Then their
    generators end in the same state only in some steps.
    """
    chain = {_place(drawn): drawn.before for drawn in _unbroken(trace, peer)}
    first = event
    for drawn in _unbroken(trace, event):
        if drawn.where == event.where and chain.get(_place(drawn)) == drawn.before:
            first = drawn
    return first


def _place(drawn: Drawn) -> _Place:
    return drawn.step, drawn.micro_batch, drawn.where, drawn.generator


def _unbroken(trace: Trace, event: Drawn) -> Iterator[Drawn]:
    """Yield a rank's draws, backwards from `event` to where its generator was seeded."""
    due = event.after
    for drawn in reversed(trace.standing.of(Drawn)):
        is_its = (drawn.rank, drawn.generator) == (event.rank, event.generator)
        if not is_its or drawn.worker is not None or drawn.step > event.step:
            continue
        if drawn.after == due:
            due = drawn.before
            yield drawn
        elif due != event.after:
            return


def _is_by_sample(trace: Trace, event: Drawn, alone: Trace | None) -> bool:
    """Return whether numbers are drawn for each sample, as far as is known.

    Dropout's numbers are. Other numbers are if one worker draws more of them from the same state,
    since it has more samples: its generator then ends in a different state.
    """
    if _is_mask(trace, event):
        return True
    if alone is None or alone.scenario.world_size == trace.scenario.world_size:
        return False
    first, here = _states(alone, event), _states(trace, event)
    return any(first[before] != here[before] for before in first.keys() & here.keys())


def _states(trace: Trace, event: Drawn) -> dict[str, str]:
    return {
        other.before: other.after
        for other in trace.standing.of(Drawn)
        if (other.where, other.generator) == (event.where, event.generator)
        and (other.worker is None) == (event.worker is None)
    }


def _devices(event: Drawn) -> tuple[str, ...]:
    return (event.generator,) if event.generator.startswith("cuda") else ()


def _passes_differ(tally: Tally, trace: Trace, drawn: Iterable[Drawn], streams: _Streams) -> None:
    """Check that no rank draws the same numbers again in a later step for different samples.

    For dropout masks the state after the draw decides, whatever the samples. Other numbers may be
    for the whole batch, or may follow from the sample that is drawn last.
    """
    seen: dict[tuple[str, ...], Drawn] = {}
    for event in drawn:
        is_mask = _is_mask(trace, event)
        stream = str(event.rank), event.generator, event.after
        key = (*stream, "mask") if is_mask else (*stream, event.where, event.before)
        earlier = seen.setdefault(key, event)
        if not is_mask and not _are_repeated(streams, earlier, event):
            continue
        here, there = (event.step, event.micro_batch), (earlier.step, earlier.micro_batch)
        tally.check(
            earlier is event or here == there,
            f"rank {event.rank} draws the same random numbers in step {event.step} as in step "
            f"{earlier.step}, {PLACES[event.where]}: the generator was seeded again; "
            f"{_OWN_GENERATOR}",
            step=event.step,
            rank=event.rank,
            scenario=trace.scenario,
        )


def _is_mask(trace: Trace, event: Drawn) -> bool:
    is_torch_s = event.generator in ("torch", *_devices(event))
    return bool(trace.scenario.dropout) and event.where == _IN_THE_MODEL and is_torch_s


def _are_repeated(streams: _Streams, earlier: Drawn, event: Drawn) -> bool:
    if earlier.step == event.step:
        return False
    before, now = streams.samples(earlier), streams.samples(event)
    if before is None or now is None or {*before.ids} & {*now.ids}:
        return False
    return streams.parted(event) is not None or streams.is_by_sample(event)


def _workers_differ(
    tally: Tally, trace: Trace, drawn: Iterable[Drawn], alone: Trace | None
) -> None:
    """Check that no two workers of loaders draw the same numbers for different samples.

    A generator that is seeded again for each sample does not end in the same state.
    """
    seen: dict[tuple[str, str, str], Drawn] = {}
    for event in drawn:
        earlier = seen.setdefault((event.generator, event.before, event.after), event)
        known = event.ids and earlier.ids and event.ids != earlier.ids
        others = earlier.rank == event.rank or _is_by_sample(trace, event, alone)
        tally.check(
            earlier is event or not known or not others,
            f"{_worker(event)} draws the same random numbers as {_worker(earlier)}, for other "
            f"samples ({PLACES[event.where]}, from {named(event.generator)}): "
            f"{_advice(event, earlier)}",
            step=event.step,
            rank=event.rank,
            sample_ids=event.ids,
            scenario=trace.scenario,
        )


def _shard(trace: Trace, event: Drawn) -> int | None:
    place = event.step, event.rank
    own = [shard.shard for shard in trace.of(Shard) if (shard.step, shard.rank) == place]
    return dict(enumerate(own)).get(-1 if event.micro_batch is None else event.micro_batch)


def _worker(event: Drawn) -> str:
    return f"worker {event.worker} of rank {event.rank}'s loader begun in step {event.step}"


def _advice(event: Drawn, earlier: Drawn) -> str:
    if event.rank != earlier.rank:
        return _OWN_SEEDS
    return (
        "seed it in worker_init_fn from torch.initial_seed(), which differs by worker and by epoch"
    )


ROWS = (
    Check(
        name="randomness",
        id="F-TI-005",
        decides="random streams differ where they must, and agree where they must",
        spoken_of="dropout prng rng masks seeds",
        judge=judge,
        plan=plans.random_streams,
        explores=True,
        needs=(ALONE,),
        witnesses=(SHORTENED,),
        absent=_absent,
    ),
)
