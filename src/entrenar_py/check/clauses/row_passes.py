"""The passes that one worker makes through rows without ids, and those of several workers.

If one worker is given each row once, then all of them again, and so on, rows are unlike, and they
are the data set: what a row is tells its sample as well as an id does. Several workers are to be
given each of these rows once in a pass, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from entrenar_py.check.evidence import evidence
from entrenar_py.check.rank_files import observed_run
from entrenar_py.shared.trace import Shard, Trace
from entrenar_py.shared.verdict import Tally

Passes = Mapping[int, int]  # number of the pass, by step
Rows = Mapping[int, Sequence[Shard]]  # by step


def of(rows: Rows, alone: Trace | None) -> Passes:
    """Return the pass that each step belongs to, as in the run on one worker, `alone`.

    Return nothing if that run makes no two passes, or if `rows` are others than its own, or of
    other numbers in a step.
    """
    passes = {} if alone is None else _made(alone)
    if not passes or alone is None:
        return {}
    whole = evidence.shards(alone)
    common = passes.keys() & rows.keys()
    is_alike = all(_count(whole[step]) == _count(rows[step]) for step in common)
    mine = {row for shards in rows.values() for shard in shards for row in shard.ids}
    return passes if is_alike and mine <= _rows(alone) else {}


def make_the_same(one: Trace, other: Trace) -> bool:
    """Return whether two runs are given the same rows pass by pass, each in an order of its own.

    A pass ends where both were given the same rows so far, each as often as in the other run. None
    of the passes may lack such an end. The last one may be cut short: then its rows have to be some
    of a pass, or of those that the other run was given until then.
    """
    sums = [_sums(trace) for trace in (one, other)]
    ends = sorted(n for n in sums[0].keys() & sums[1].keys() if sums[0][n] == sums[1][n])
    if not ends or min(map(max, sums)) - ends[-1] >= ends[0]:
        return False
    whole = [Counter[int](), *(sums[0][end] for end in ends)]
    passes = [after - before for before, after in pairwise(whole)]
    left, right = (each[max(each)] - whole[-1] for each in sums)
    return _is_part(left, [*passes, right]) and _is_part(right, [*passes, left])


def _is_part(rows: Counter[int], passes: Sequence[Counter[int]]) -> bool:
    """Return whether rows are some of one pass, none of them more often than there."""
    return any(rows <= one for one in passes)


def _sums(trace: Trace) -> dict[int, Counter[int]]:
    """Return how often each row was given by the end of each step, by the number of all rows."""
    so_far, sums = Counter[int](), dict[int, Counter[int]]()
    for _, shards in sorted(evidence.shards(trace).items()):
        for shard in shards:
            so_far.update(shard.ids)
        sums[so_far.total()] = Counter(so_far)
    return sums


def are_whole(rows: Rows) -> bool:
    """Return whether rows come again in whole passes alone, each through all rows of a block.

    So does a trainer that goes several times through what it has played, then through new rows. A
    block takes two steps at least: a batch that is handed out twice is no pass.
    """
    block, current, steps = set[int](), set[int](), 0  # the last pass, and the one that goes on
    has_again = False
    for step in sorted(rows):
        of_step = [row for shard in rows[step] for row in shard.ids]
        fresh = {*of_step}
        if len(fresh) < len(of_step):
            return False
        if block and current == block:
            current = set()  # and the next pass goes through the same rows, or through a new block
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


def judge(tally: Tally, trace: Trace, rows: Rows, passes: Passes) -> None:
    """Check that no row of a step's `rows` comes again within a pass."""
    given: dict[tuple[int, int], Shard] = {}  # by pass and row
    for step in sorted(rows.keys() & passes.keys()):
        for shard in rows[step]:
            keys = [(passes[step], row) for row in shard.ids]
            again = [key for place, key in enumerate(keys) if key in given or key in keys[:place]]
            first = given.get(again[0], shard) if again else shard
            tally.check(
                not again,
                f"rank {shard.rank} is given {len(again)} rows that were given before in this pass "
                f"(first to rank {first.rank} in step {first.step}): one worker is given each row "
                "once in a pass, so samples are given twice, and others are left out",
                sample_ids=tuple(row for _, row in again),
                **evidence.place(trace, shard),
            )
            given.update(dict.fromkeys(keys, shard))


def _made(trace: Trace) -> Passes:
    """Return the pass that each step belongs to; nothing unless there are two, of two steps."""
    derived = observed_run.derived_epochs(trace.events, None) or ()
    passes = {event.step: event.epoch for event in derived if isinstance(event, Shard)}
    is_long = list(passes.values()).count(0) > 1
    return passes if is_long and len({*passes.values()}) > 1 else {}


def _rows(trace: Trace) -> set[int]:
    return {row for shard in trace.of(Shard) for row in shard.ids}


def _count(shards: Sequence[Shard]) -> int:
    return sum(len(shard.ids) for shard in shards)
