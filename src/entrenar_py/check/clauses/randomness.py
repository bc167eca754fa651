"""F-TI-005: random streams that must differ do differ, and streams that must agree do agree."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from entrenar_py.check import evidence
from entrenar_py.check.causes import presuppositions, state
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import plans, script_streams
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.clauses.population import in_epochs, is_endless
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, facts, missing
from entrenar_py.check.evidence.needs import ALONE, SHORTENED, Traces
from entrenar_py.shared.faults import OF_LOADERS
from entrenar_py.shared.trace import Drawn, Shard, Start, Trace
from entrenar_py.shared.verdict import MEANING, Finding, Tally

# Shorter orders are not compared: two shuffled orders of 10 samples are equal once in 10! = 3.6e6.
ORDER_LENGTH_MIN = 10
CHANCE_MAX = 1e6  # one to this many is too little for chance
DRAWING = ("mlp", "decoder", "decoder_full", "own")  # workloads in which dropout draws


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that dropout differs by step and shard, order by epoch, and that ranks start alike."""
    tally = missing.tally_for(invariant, runs)
    for trace in runs:
        state.tell_peculiar(tally, trace)
    runs = evidence.usable_runs(runs, tally)
    alone = next(iter(runs.of(ALONE)), None)
    for trace in runs:
        if trace.of(Drawn):
            script_streams.judge(tally, trace, alone)
        else:
            _dropout_differs(tally, trace)
        script_streams.modes_alike(tally, trace)
        if trace.traits.population != "varied":  # else two data sets may have the same order
            _orders_differ(tally, trace)
        compared = Compared(runs=runs, model=trace, trace=trace)
        left = presuppositions.comparable(tally, presuppositions.RANKS, compared)
        if left is not None:
            _initial_agrees(tally, left.trace)
    for trace in runs.witnesses.get(SHORTENED, ()):
        if trace.traits.population != "varied":
            _orders_differ(tally, trace)
        between = Tally(tally.invariant, observed=tally.observed)
        script_streams.modes_alike(between, trace)  # an evaluation comes between epochs
        tally.take(between)
    _same_for_any_worker_count(tally, runs)
    if lacks_second_epoch(runs):
        why = "no two epochs were seen, so it is open whether each has an order of its own"
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

    An epoch is in order if its sample ids grow from step to step, or within each rank, or within
    each loader worker of a rank (workers hand out batches in turns).
    """

    orders: Mapping[int, Sequence[int]]
    shuffled: Collection[int]
    first_step: Mapping[int, int]
    of_ranks: Mapping[tuple[int, int], Sequence[int]]  # of an epoch's rank

    def are_alike(self, before: int, after: int, common: int) -> bool:
        """Return whether two epochs have one order, or each rank has in both.

        A step may have the samples of several passes, where a script skips some.
        """
        if self.orders[before][:common] == self.orders[after][:common]:
            return True
        ranks = {rank for epoch, rank in self.of_ranks if epoch == after}
        pairs = [[self.of_ranks.get((e, rank), ()) for e in (before, after)] for rank in ranks]
        known = [(one[: len(other)], other[: len(one)]) for one, other in pairs]
        is_telling = sum(len(one) for one, _ in known) >= ORDER_LENGTH_MIN
        return is_telling and all(len(one) > 0 and one == other for one, other in known)

    def pairs(self) -> list[tuple[int, int, int]]:
        """Return two epochs each, one after the other, and the length in which they compare."""
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
    reached: dict[int, int] = {}
    mixed: set[int] = set()
    first_step: dict[int, int] = {}
    for step, shards in sorted(evidence.shards(trace).items()):
        for shard in shards:
            orders.setdefault(shard.epoch, []).extend(shard.ids)
            by_rank.setdefault((shard.epoch, shard.rank), []).append(shard.ids)
            first_step.setdefault(shard.epoch, step)
        for epoch in {shard.epoch for shard in shards}:
            ids = [i for shard in shards if shard.epoch == epoch for i in shard.ids]
            if ids and min(ids) <= reached.get(epoch, -1):
                mixed.add(epoch)
            reached[epoch] = max(ids, default=reached.get(epoch, -1))
    shuffled = mixed & {epoch for (epoch, _), drawn in by_rank.items() if not in_turns(drawn)}
    of_ranks = {place: [*chain.from_iterable(drawn)] for place, drawn in by_rank.items()}
    return _Orders(orders, shuffled, first_step, of_ranks)


def _drawn_orders(trace: Trace) -> list[_Orders]:
    """Return the orders of a run's epochs; none if its script draws no order, and may have one.

    A script that goes on in an endless pass may count batches to know when an epoch is over. Where
    the harness has loaders end or merge them, it counts too many, and nothing shows its epochs.
    """
    if not is_endless(trace):
        return [] if trace.traits.ordered else [_orders_of(trace)]
    counts_others = any(fault.kind in OF_LOADERS for fault in trace.scenario.faults)
    return [] if trace.traits.ordered or counts_others else [*_passes(trace)]


def _orders_differ(tally: Tally, trace: Trace) -> None:
    """Check that two epochs of a shuffled data set have different orders."""
    every = _drawn_orders(trace)
    for seen, (before, after, common) in ((one, pair) for one in every for pair in one.pairs()):
        tally.check(
            not seen.are_alike(before, after, common),
            f"epoch {after} visits its samples in the order of epoch {before}, {MEANING}"
            "sampler.set_epoch(epoch) is never called",
            step=seen.first_step[after],
            sample_ids=tuple(seen.orders[after][:common]),
            scenario=trace.scenario,
        )


def _passes(trace: Trace) -> Iterator[_Orders]:
    """Yield the orders of all samples in one endless pass: a sample's next time is in the next one.

    Ranks may take turns sample by sample, or batch by batch.
    """
    drawn: list[tuple[int, int, int, int]] = []  # step, rank, place, sample
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
    """Return whether samples are shuffled, and no run of a user's trainer shows two epochs."""
    large = [t for t in in_epochs(runs) if t.scenario.num_samples >= ORDER_LENGTH_MIN]
    seen = [one for trace in large for one in _drawn_orders(trace)]
    return any(one.shuffled for one in seen) and not any(one.pairs() for one in seen)


def in_turns(drawn: Sequence[tuple[int, ...]]) -> bool:
    """Return whether the ids of micro-batches grow, taken together or by the workers of a loader.

    Workers take turns. With several, ids must also grow within each micro-batch, and there must be
    so many that a shuffle hardly leaves them in order: few micro-batches look so by chance.
    """

    def grows(batches: Sequence[tuple[int, ...]]) -> bool:
        ids = [*chain.from_iterable(batches)]
        return ids == sorted(ids)

    if grows(drawn):
        return True
    # The number of orders has millions of digits in a large epoch, so logarithms are compared.
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
        message = f"rank {start.rank} starts from other weights than rank {known[0].rank}"
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
    """Return why no streams must differ or agree: one worker draws none, and shuffles nothing."""
    draws = any(
        trace.of(Drawn)
        or trace.scenario.dropout
        or any(shard.draws is not None for shard in trace.of(Shard))
        or (trace.traits.sample_ids != "content" and any(o.shuffled for o in _drawn_orders(trace)))
        for trace in traces
    )
    return "" if draws else evidence.started_alone(traces)


ROWS = (
    Check(
        name="randomness",
        id="F-TI-005",
        decides="random streams that must differ differ, streams that must agree agree",
        spoken_of="dropout prng rng masks seeds",
        judge=judge,
        plan=plans.random_streams,
        explores=True,
        needs=(ALONE,),
        witnesses=(SHORTENED,),
        absent=_absent,
    ),
)
