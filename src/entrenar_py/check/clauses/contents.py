"""F-DP-002 for samples without declared ids: a digest of the model's input identifies each row.

A row may be something other than a sample, and a data set may contain a row twice. So the clause is
held if runs get the same rows, and inconclusive if they get different ones. Two things are wrong
whatever a row is. Replicas must not get the same rows in every step, if the rows change from step
to step. And a row must not come again within a pass over the data, if one worker gets each row once
in a pass.

If one worker gets each row once, then all of them again, and so on, the rows are distinct and are
the data set: a row then identifies its sample as well as an id does. Several workers must also get
each of these rows once in a pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.causes import rounding_bounds, run_comparison
from entrenar_py.check.evidence import facts, missing
from entrenar_py.shared.trace import Shard, Trace
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import named

RowsByRank = Mapping[int, Counter[int]]  # rank -> rows
_SURE_DIGITS = 5  # decimal digits: the probability of chance is below 10^-5


def judge(tally: Tally, trace: Trace, alone: Trace | None) -> None:
    """Judge the rows of a run. If ranks share a batch, compare them with those of `alone`.

    `alone` is the run on one worker, or None.
    """
    missing.require_ids(tally, trace)
    tally.note(
        "samples have no ids, so they are distinguished by the inputs of the "
        "model: a sample that is given twice looks like one that is in the data "
        "twice"
    )
    _apart_in_groups(tally, trace, alone)
    owned = _own if trace.traits.shared else list[Shard]
    rows = {step: owned(of) for step, of in evidence.shards(trace).items()}
    steps = [*map(_by_rank, rows.values())]
    is_compared = trace.scenario.world_size > 1 and len(steps) > 1
    alike = _given_the_same(steps) if is_compared else []
    twice = _by_the_same_numbers(rows) if trace.traits.selects and not alike else None
    if twice is not None:
        alike = sorted(shard.rank for shard in twice)
    is_guessed = trace.traits.arranged == "guessed" and not do_the_same(trace, alike)
    passes = {} if alike else of(rows, alone)
    if passes:
        judge_passes(tally, trace, rows, passes)
    elif not trace.traits.selects and (not alike or is_guessed):
        _rows_again(tally, rows, trace, alone)
    if not is_compared:
        return
    if not alike:
        tally.check(True, "", step=0, scenario=trace.scenario)
        return
    what = f"{named('rank', alike)} are given the same rows in every step"
    if twice is not None:
        first, again = twice
        what = (
            f"rank {again.rank} selects for step {again.step} the rows that rank {first.rank} "
            f"selects for step {first.step}, by the same random numbers"
        )
    if is_guessed:
        tally.miss(guessed(what))
        return
    tally.check(
        False,
        f"{what}, though each should train on its own samples",
        step=min(evidence.shards(trace)) if twice is None else twice[1].step,
        rank=alike[1] if twice is None else twice[1].rank,
        scenario=trace.scenario,
    )


def _apart_in_groups(tally: Tally, trace: Trace, alone: Trace | None) -> None:
    """Report as missing whether different rows on ranks that share a batch are parts of it.

    They are parts if one worker's batch has exactly these rows. Otherwise each rank may have drawn
    a batch of its own.
    """
    whole = {} if alone is None else evidence.shards(alone)
    for step, shards in sorted(evidence.shards(trace).items()):
        groups: dict[int, list[Shard]] = {}
        for shard in shards:
            groups.setdefault(shard.shard, []).append(shard)
        given = [[*_by_rank(group).items()] for group in groups.values()]
        apart = [group for group in given if any(rows != group[0][1] for _, rows in group)]
        parts = (rows for group in given for _, rows in (group if group in apart else group[:1]))
        if apart and sum(parts, Counter[int]()) != _together(whole.get(step, ())):
            ranks = named("rank", [rank for rank, _ in apart[0]])
            tally.miss(
                f"{ranks} share the work on a batch and are given different rows in step "
                f"{step}: right for parts of the batch, wrong if each draws its own; call "
                "obs.samples(ids) on all of them with the ids of the batch that each rank "
                "drew"
            )
            return


def _rows_again(
    tally: Tally, owned: Mapping[int, Sequence[Shard]], trace: Trace, alone: Trace | None
) -> None:
    """Report as missing whether rows were drawn twice, if they come again before all have come.

    The order is the script's own (an epoch that grows, for example) if the run on one worker gets
    the same rows in each step, or in each pass. The exception are micro-batches that come twice in
    succession: each worker of a loader may yield all data.
    """
    whole = {} if alone is None else evidence.shards(alone)
    every = {id_ for shards in owned.values() for shard in shards for id_ in shard.ids}
    seen: set[int] = set()
    for step, shards in sorted(owned.items()):
        given = _together(shards)
        again = {row for row in given if given[row] > 1 or row in seen}
        seen |= given.keys()
        if again and seen < every:
            if are_whole(owned):
                tally.note("each block of rows is used several times before the next block")
                return
            what = f"rows are used again in step {step} before all others were used"
            is_same = all(_together(whole.get(at, ())) == _together(owned[at]) for at in owned)
            is_same |= alone is not None and make_the_same(alone, trace)
            if is_same and not _are_doubled(whole):
                tally.note(f"{what}, in the run on one worker, too, which may have the same bug")
            else:
                missing.ask(
                    tally, f"{what}: given twice, or different samples with equal rows", facts.IDS
                )
            return
        if again:
            seen = again


def _are_doubled(shards: Mapping[int, Sequence[Shard]]) -> bool:
    given = [sorted(shard.ids) for step in sorted(shards) for shard in shards[step]]
    return any(one == after for one, after in pairwise(given))


def do_the_same(trace: Trace, ranks: Sequence[int]) -> bool:
    """Return whether `ranks` have the same rows, loss and gradient in each micro-batch.

    Such ranks don't share the work on their samples: each rank does all of it.
    """
    first: dict[tuple[int, int], tuple[Any, ...]] = {}
    numbers = dict.fromkeys(ranks, 0)
    for shard in trace.standing.of(Shard):
        if shard.rank not in numbers:
            continue
        place = shard.step, numbers[shard.rank]
        numbers[shard.rank] += 1
        digests = {name: one.digest for name, one in shard.gradient.items()}
        mine = shard.loss_sum, shard.contents, digests
        if None in mine or not shard.gradient or first.setdefault(place, mine) != mine:
            return False
    return len({*numbers.values()}) == 1 and len(numbers) > 1 and bool(first)


def guessed(what: str) -> str:
    """Return why a verdict on `what` is missing: ranks may share the work on their samples."""
    return (
        f"{what}: it is unknown whether they share the work on these rows; declare it, "
        'observe(..., layout={"dp": 1, "tp": 2}), or wrap the model in DistributedDataParallel'
    )


def compare(tally: Tally, model: Trace, trace: Trace) -> None:
    """Compare the rows of two runs step by step.

    Different rows may still be the same samples, because rows contain padding, or the last bits of
    their features depend on the batch. They count as the same if the gradients are the same.
    """
    alike = run_comparison.steps_alike(model, trace)
    others, unknown = evidence.shards(model), missing.unknown_steps(model)
    unknown |= missing.unknown_steps(trace)
    few, many = model.scenario.world_size, trace.scenario.world_size
    for step, shards in sorted(evidence.shards(trace).items()):
        if step not in others or step in unknown:
            continue
        is_same = _together(others[step]) == _together(shards)
        if not is_same and alike and (step in alike or step >= rounding_bounds.ROUNDING_STEPS):
            tally.note(
                f"the model is given different rows with {many} workers than with {few}, but the "
                "gradients of the first steps are the same: the rows are the same samples"
            )
        elif not is_same and not unknown and make_the_same(model, trace):
            tally.compared += 1
            tally.note(
                f"the model is given different rows in a step with {many} workers than with "
                f"{few}: over a pass each row is given equally often in both runs, so steps were "
                "not compared"
            )
            return
        elif not is_same:
            difference = (
                f"the model is given different rows in step {step} with {many} workers than "
                f"with {few}"
            )
            missing.ask(tally, difference, facts.IDS_IN_BOTH)
            return
        tally.compared += is_same or step in alike


def _own(shards: Sequence[Shard]) -> list[Shard]:
    owners: dict[int, int] = {}
    return [one for one in shards if owners.setdefault(one.shard, one.rank) == one.rank]


def _by_rank(shards: Sequence[Shard]) -> dict[int, Counter[int]]:
    counts: dict[int, Counter[int]] = {}
    for shard in shards:
        counts.setdefault(shard.rank, Counter()).update(shard.ids)
    return counts


def _together(shards: Sequence[Shard]) -> Counter[int]:
    return Counter(id_ for shard in shards for id_ in shard.ids)


def _by_the_same_numbers(rows: Mapping[int, Sequence[Shard]]) -> tuple[Shard, Shard] | None:
    """Return two micro-batches of different ranks that have the same rows in the same order.

    Return None if there are none, or if so few rows are known that this may be chance.
    """
    shards = [shard for step in sorted(rows) for shard in rows[step] if shard.ids]
    known = {id_ for shard in shards for id_ in shard.ids}
    first: dict[tuple[int, ...], Shard] = {}
    peers = [(first.setdefault(shard.ids, shard), shard) for shard in shards]
    alike = [(peer, shard) for peer, shard in peers if peer.rank != shard.rank]
    if not alike:
        return None
    least = min(len({*shard.ids}) for _, shard in alike)
    # The mean number of pairs that are equal by chance, and the probability of this many pairs
    # (Poisson).
    expected = (len(shards) / 2) ** 2 / len(known) ** least
    digits = (math.lgamma(len(alike) + 1) - len(alike) * math.log(expected)) / math.log(10)
    return alike[0] if digits > _SURE_DIGITS else None


def _given_the_same(steps: Sequence[RowsByRank]) -> list[int]:
    """Return the lowest rank and all ranks with its rows in every step; [] if there are no others.

    Also return [] if the rows never change, like the constant inputs of a benchmark.
    """
    first = min(steps[0], default=0)
    own = [step.get(first, Counter()) for step in steps]
    if not all(own) or all(rows == own[0] for rows in own):
        return []
    others = [
        rank
        for rank in steps[0]
        if rank != first
        and all(step.get(rank) == rows for step, rows in zip(steps, own, strict=True))
    ]
    return [first, *others] if others else []


# --- passes through all rows ----------------------------------------------------------------------

Passes = Mapping[int, int]  # step -> number of the pass
Rows = Mapping[int, Sequence[Shard]]  # step -> micro-batches with the rows


def of(rows: Rows, alone: Trace | None) -> Passes:
    """Return step -> number of its pass, as in the run on one worker, `alone`.

    Return {} if that run has fewer than two passes, if it lacks some of `rows`, or if the number of
    rows in a step differs.
    """
    passes = {} if alone is None else _made(alone)
    if not passes or alone is None:
        return {}
    whole = evidence.shards(alone)
    common = passes.keys() & rows.keys()
    is_alike = all(_count(whole[step]) == _count(rows[step]) for step in common)
    mine = {row for shards in rows.values() for shard in shards for row in shard.ids}
    return passes if is_alike and mine <= _rows(alone) else {}


def make_the_same(first: Trace, other: Trace) -> bool:
    """Return whether two runs get the same rows in each pass, each in an order of its own.

    A pass ends where both runs got the same rows so far, each row equally often. The last pass may
    be cut short. Its rows must then be part of a complete pass, or of the rows in the other run's
    last pass.
    """
    sums = [_sums(trace) for trace in (first, other)]
    ends = sorted(n for n in sums[0].keys() & sums[1].keys() if sums[0][n] == sums[1][n])
    if not ends or min(map(max, sums)) - ends[-1] >= ends[0]:
        return False
    whole = [Counter[int](), *(sums[0][end] for end in ends)]
    passes = [after - before for before, after in pairwise(whole)]
    left, right = (each[max(each)] - whole[-1] for each in sums)
    return _is_part(left, [*passes, right]) and _is_part(right, [*passes, left])


def _is_part(rows: Counter[int], passes: Sequence[Counter[int]]) -> bool:
    return any(rows <= one for one in passes)


def _sums(trace: Trace) -> dict[int, Counter[int]]:
    so_far, sums = Counter[int](), dict[int, Counter[int]]()
    for _, shards in sorted(evidence.shards(trace).items()):
        for shard in shards:
            so_far.update(shard.ids)
        sums[so_far.total()] = Counter(so_far)
    return sums


def are_whole(rows: Rows) -> bool:
    """Return whether rows come again only in whole passes, each over all rows of a block.

    An example is a trainer that goes through the same games several times, then through new ones. A
    block takes at least two steps: a batch that comes twice is not a pass.
    """
    block, current, steps = set[int](), set[int](), 0  # the last pass, and the current one
    has_again = False
    for step in sorted(rows):
        of_step = [row for shard in rows[step] for row in shard.ids]
        fresh = {*of_step}
        if len(fresh) < len(of_step):
            return False
        if block and current == block:
            current = set()  # the next pass goes over the same rows, or over a new block
        is_again = bool(block) and fresh <= block
        if not current and (not block or fresh.isdisjoint(block)):
            block, current, steps = set(), fresh, 1  # a new block
        elif not block and fresh.isdisjoint(current):
            current, steps = current | fresh, steps + 1
        elif not block and fresh <= current and steps > 1:
            block, current, has_again = current, fresh, True  # its second pass
        elif is_again and fresh.isdisjoint(current):
            current |= fresh
        else:
            return False
    return has_again


def judge_passes(tally: Tally, trace: Trace, rows: Rows, passes: Passes) -> None:
    """Check that no row comes again within a pass. `rows` and `passes` have steps as keys."""
    owner: dict[tuple[int, int], Shard] = {}  # (pass, row) -> the micro-batch that got it
    for step in sorted(rows.keys() & passes.keys()):
        for shard in rows[step]:
            keys = [(passes[step], row) for row in shard.ids]
            again = [key for place, key in enumerate(keys) if key in owner or key in keys[:place]]
            first = owner.get(again[0], shard) if again else shard
            tally.check(
                not again,
                f"rank {shard.rank} is given {len(again)} rows that were given before in this pass "
                f"(first to rank {first.rank} in step {first.step}): one worker is given each row "
                "once in a pass, so samples are given twice, and others are left out",
                sample_ids=tuple(row for _, row in again),
                **evidence.place(trace, shard),
            )
            owner.update(dict.fromkeys(keys, shard))


def _made(trace: Trace) -> Passes:
    derived = evidence.derived_epochs(trace.events, None) or ()
    passes = {event.step: event.epoch for event in derived if isinstance(event, Shard)}
    is_long = list(passes.values()).count(0) > 1
    return passes if is_long and len({*passes.values()}) > 1 else {}


def _rows(trace: Trace) -> set[int]:
    return {row for shard in trace.of(Shard) for row in shard.ids}


def _count(shards: Sequence[Shard]) -> int:
    return sum(len(shard.ids) for shard in shards)
