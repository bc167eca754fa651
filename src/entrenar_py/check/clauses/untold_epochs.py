"""F-DP-002 where a script reports samples, and no epochs: what holds for any epochs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from entrenar_py.check import evidence
from entrenar_py.check.clauses.population import Population
from entrenar_py.check.evidence import facts, missing
from entrenar_py.shared.trace import Shard, Start, Trace
from entrenar_py.shared.verdict import Tally


def judge(tally: Tally, trace: Trace, alone: Trace | None) -> None:
    """Check that no sample is drawn again before all were drawn, by an error or a cut epoch.

    A sample that is drawn again may be an error, or the first of the next epoch. Which it is takes
    epochs if less than a batch was left to draw, but for a sampler that never ends. It also does if
    the samples of an epoch are a guess, unless the run on one worker (`alone`) goes on with samples
    that were not drawn yet.
    """
    population = Population(trace)
    slack = trace.scenario.batch_size
    by_step = {} if alone is None else evidence.shards(alone)
    is_endless = trace.traits.epochs == "told"  # as the one pass of a loader that never ends
    is_first = any(start.step > 0 for start in trace.of(Start))  # the epoch may have begun before
    seen: dict[int, int] = {}  # sample -> step that drew it, in the epoch as it seems
    for step, shards in sorted(evidence.shards(trace).items()):
        drawn = {id_ for shard in shards for id_ in shard.ids}
        if len(drawn) == sum(len(shard.ids) for shard in shards) and drawn.isdisjoint(seen):
            tally.compared += len(shards)
            seen.update(dict.fromkeys(drawn, step))
            continue
        # All of the epoch is searched from here on: in a right run, only where an epoch begins.
        num_lacking = len([*islice(population.surely_lacking(seen), slack)])
        is_cut = num_lacking == slack and (
            not population.is_guessed or _goes_on(by_step, step, seen)
        )
        is_used_up = not any(True for _ in population.surely_lacking(drawn.union(seen)))
        is_over = is_endless and is_used_up and num_lacking == len(drawn - seen.keys())
        fresh: dict[int, int] = {}
        for shard in shards:
            again = tuple(i for n, i in enumerate(shard.ids) if i in fresh or i in shard.ids[:n])
            fresh.update(dict.fromkeys(shard.ids, step))
            repeated = tuple(id_ for id_ in shard.ids if id_ in seen)
            if again and not is_used_up:
                _drawn_again(tally, trace, shard, again, fresh)
            elif repeated and is_cut and not (is_used_up or is_first):
                _drawn_again(tally, trace, shard, repeated, seen)
            elif again or (repeated and (num_lacking or is_first) and not is_over):
                _ask(tally, step)
            else:
                tally.check(True, "")
        if not seen.keys().isdisjoint(fresh):
            if is_over:  # the samples that were lacking are the last ones, the rest the first
                fresh = {id_: step for id_ in fresh if id_ in seen}
            is_first, seen = False, {}
        seen.update(fresh)


def _goes_on(by_step: Mapping[int, Sequence[Shard]], step: int, seen: Collection[int]) -> bool:
    """Return whether one worker, which has drawn all that was `seen`, draws others in `step`.

    `by_step` are the shards of its run; without any, it is unknown.
    """
    before = {id_ for at in by_step if at < step for s in by_step[at] for id_ in s.ids}
    now = {id_ for shard in by_step.get(step, ()) for id_ in shard.ids}
    return bool(now) and before.issuperset(seen) and before.isdisjoint(now)


def _drawn_again(
    tally: Tally, trace: Trace, shard: Shard, again: Sequence[int], seen: dict[int, int]
) -> None:
    tally.check(
        False,
        f"samples drawn again by rank {shard.rank}: {[*again[:8]]}, first drawn in step "
        f"{seen[again[0]]}, before all {trace.scenario.num_samples} samples were drawn; if they "
        "are drawn with replacement, say obs.samples(ids, replacement=True)",
        sample_ids=tuple(again),
        **evidence.place(trace, shard),
    )


def _ask(tally: Tally, step: int) -> None:
    why = f"step {step} draws samples again, maybe as the first of the next epoch"
    missing.ask(tally, why, facts.EPOCHS)
