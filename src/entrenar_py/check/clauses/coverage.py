"""F-DP-002: in an epoch every sample is drawn once, by one worker."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Mapping, Sequence
from itertools import islice

from entrenar_py.check import evidence
from entrenar_py.check.causes import presuppositions, random_draws
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import contents, plans
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.clauses.population import Population, is_from_own_sampler
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import facts, missing, step_sums
from entrenar_py.check.evidence.needs import ALONE, REPEATED, SHORTENED, Traces
from entrenar_py.shared.trace import Selection, Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally
from entrenar_py.shared.wording import counted, named

_TELLING_MIN = 10  # distinct samples: fewer may be equal by chance
LISTED_MAX = 1000  # missing sample ids, or steps, that a finding lists at most


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that each run draws every sample once per epoch, and all runs the same per step."""
    tally = missing.tally_for(invariant, runs)
    runs = evidence.usable_runs(runs, tally)
    for trace in runs:
        missing.require_updates(tally, trace)
        if trace.traits.replacement:
            tally.note(
                "samples are drawn with replacement: they must belong to the data set and be the "
                "same when it is run again; it was not judged how often each sample is drawn"
            )
        if trace.traits.selects:
            tally.note(
                f"rows are selected by random numbers in each step ({trace.traits.selects}): it "
                "was not judged how often each row is used, and runs on different numbers of "
                "workers were not compared"
            )
        if trace.traits.population == "varied":
            tally.note(
                "samples are drawn from several data sets, or from changing parts of one: it was "
                "not judged whether a pass had all of its samples"
            )
        if made := {shard.step for shard in trace.of(Shard) if shard.made}:
            tally.note(
                f"in {counted(len(made), 'step')} the model was given inputs that the "
                "script derived from samples of earlier steps: these samples were not "
                "counted again"
            )
        compare_selections(tally, trace)
        compared = Compared(runs=runs, model=trace, trace=trace)
        if presuppositions.comparable(tally, presuppositions.SAMPLES, compared) is None:
            continue
        if trace.traits.sample_ids == "content":
            contents.judge(tally, trace, compared.alone)
        elif ranks := _guessed_to_differ(trace):
            tally.miss(contents.guessed(f"{named('rank', ranks)} draw the same samples"))
        elif _has_untold_epochs(trace):
            missing.require_ids(tally, trace)
            _judge_without_epochs(tally, trace, compared.alone)
        else:
            _disjoint_and_complete(tally, trace, compared.alone)
            _replaced_apart(tally, trace)
        _all_made(tally, trace)
        _by_members(tally, trace)
    for trace in runs.witnesses.get(SHORTENED, ()):
        _in_short_epochs(tally, runs, trace)
    if tally.broken is None:  # a run that is wrong by itself also differs from the others
        _stable(tally, runs)
        _none_left_out(tally, runs)
    epochal = in_epochs(runs)
    if count_on(epochal):
        tally.note(
            "sample numbers increase from step to step, and no run draws a sample twice: there "
            "are no epochs"
        )
    elif epochal and not any(map(has_ended_epoch, epochal)):
        reason = (
            "no run came to the end of an epoch, so it is unknown whether an epoch has every sample"
        )
        missing.ask(tally, reason, facts.EPOCH_END)
    reason = "no samples are known"
    return tally.finding(nothing=missing.nothing(tally, reason, facts.IDS_AND_UPDATE))


def _in_short_epochs(tally: Tally, runs: Traces, trace: Trace) -> None:
    """Judge the whole epochs of a run with shortened epochs, if its samples have ids."""
    compared = Compared(runs=runs, model=trace, trace=trace)
    is_known = trace.end.status == "completed" and trace.traits.sample_ids != "content"
    if not is_known or presuppositions.comparable(tally, presuppositions.SAMPLES, compared) is None:
        return
    if _has_untold_epochs(trace):
        _judge_without_epochs(tally, trace, None)
    elif not _guessed_to_differ(trace):
        _disjoint_and_complete(tally, trace, None)


def _has_untold_epochs(trace: Trace) -> bool:
    # A sampler of the script may never end. Then one pass has all samples, and some of them again.
    if trace.traits.replacement:
        return False
    return trace.traits.epochs == "untold" or is_endless(trace)


def _guessed_to_differ(trace: Trace) -> list[int]:
    """Return the ranks that draw the same samples in every step, if they may rightly do so.

    They may if neither torch's wrapper, nor a mesh, nor the script says that ranks are replicas.
    Then they may have parts of a model that the script cuts itself.
    """
    if trace.traits.arranged != "guessed":
        return []
    alike: set[int] | None = None
    for shards in evidence.shards(trace).values():
        drawn: dict[int, list[int]] = {}
        for shard in shards:
            drawn.setdefault(shard.rank, []).extend(shard.ids)
        same = {rank for rank, ids in drawn.items() if ids and list(drawn.values()).count(ids) > 1}
        alike = same if alike is None else alike & same
    ranks = sorted(alike or ())
    return [] if contents.do_the_same(trace, ranks) else ranks


def _disjoint_and_complete(tally: Tally, trace: Trace, alone: Trace | None) -> None:
    """Check that each sample is drawn once per epoch. A batch may span two epochs.

    `alone` is the run on one worker, or None. The number of samples in a step is checked only
    before the first step with unknown samples.
    """
    scenario, population = trace.scenario, Population(trace, alone)
    unknown = {*missing.require_ids(tally, trace), *missing.require_beginning(tally, trace)}
    known_until = min(unknown, default=math.inf)
    seen: dict[int, dict[int, Shard]] = {}  # epoch -> sample id -> shard that drew it
    for step, shards in sorted(evidence.shards(trace).items()):
        epochs = sorted({s.epoch for s in shards if s.ids} or {shards[0].epoch})
        begun = [epoch for epoch in epochs if epoch not in seen]
        left = sum(population.num_lacking(seen.get(epoch, ())) for epoch in epochs)
        _drawn_alike(tally, trace, shards)
        if population.is_repeated:
            _ask_about_repeats(tally, step)
            continue
        for shard in shards:
            _count(tally, trace, shard, seen.setdefault(shard.epoch, {}), population)
        if step >= known_until or trace.traits.replacement or population.is_varied:
            continue
        for epoch in begun:
            _ended_complete(tally, trace, seen, epoch, step, population)
        if tally.observed:
            continue  # a script may draw any number of samples per step, as long as it draws all
        count = sum(len(shard.ids) for shard in shards)
        tally.equal(
            min(scenario.batch_size, left),
            count,
            f"step {step} drew {count} samples of epoch {' and '.join(map(str, epochs))}"
            f"{_silent(trace, step, shards)}",
            step=step,
            scenario=scenario,
        )


def _replaced_apart(tally: Tally, trace: Trace) -> None:
    """Check that replicas which draw with replacement don't draw the same samples in every step."""
    if not trace.traits.replacement or trace.traits.shared or trace.scenario.workload != "own":
        return
    drawn: dict[int, list[tuple[int, int]]] = {}  # rank -> (step, sample)
    for shard in trace.of(Shard):
        drawn.setdefault(shard.rank, []).extend((shard.step, id_) for id_ in shard.ids)
    first = min(drawn, default=0)
    for rank in sorted(drawn):
        are_many = len({id_ for _, id_ in drawn[rank]}) >= _TELLING_MIN
        if rank == first or not are_many or drawn[rank] != drawn[first]:
            continue
        tally.check(
            False,
            f"ranks {first} and {rank} draw the same samples in every step, though each should "
            "train on its own samples",
            step=drawn[rank][0][0],
            rank=rank,
            sample_ids=tuple(id_ for _, id_ in drawn[rank][:LISTED_MAX]),
            scenario=trace.scenario,
        )


def _drawn_alike(tally: Tally, trace: Trace, shards: Sequence[Shard]) -> None:
    """Check that ranks which share a logical shard draw the same samples for it."""
    if not trace.traits.shared:
        return
    first: dict[int, Shard] = {}
    for shard in shards:
        peer = first.setdefault(shard.shard, shard)
        if peer.rank == shard.rank or peer.ids == shard.ids:
            continue
        others = tuple(sorted(set(peer.ids) ^ set(shard.ids))) or shard.ids
        tally.check(
            False,
            f"rank {shard.rank} drew different samples for shard {shard.shard} than rank "
            f"{peer.rank}, though both share it",
            sample_ids=others,
            **evidence.place(trace, shard),
        )


def _silent(trace: Trace, step: int, shards: Sequence[Shard]) -> str:
    ranks_made = {update.rank for update in trace.of(Update) if update.step == step}
    ranks = sorted(ranks_made - {shard.rank for shard in shards})
    return f"; ranks {str(ranks[:8])[1:-1]} recorded no Shard of it" if ranks else ""


def _count(
    tally: Tally, trace: Trace, shard: Shard, drawn: dict[int, Shard], population: Population
) -> None:
    again = _drawn_before(shard.ids, drawn)
    strange = population.strange(shard.ids)
    place = evidence.place(trace, shard)
    if shard.ids or trace.scenario.num_shards == 1:
        tally.check(
            not again or trace.traits.replacement,
            f"samples drawn again in epoch {shard.epoch} by rank {shard.rank}: {list(again)[:8]}, "
            f"{_first_drawn(shard, again, drawn)}{_with_replacement(tally)}",
            sample_ids=again,
            **place,
        )
        message = f"sample ids outside {population.in_words}: {list(strange)[:8]}"
        tally.check(not strange, message, sample_ids=strange, **place)
    drawn.update(dict.fromkeys(shard.ids, shard))


def _drawn_before(ids: Sequence[int], drawn: Container[int]) -> tuple[int, ...]:
    """Return the ids that are in `drawn`, or that occur earlier in `ids`. There may be millions."""
    earlier: set[int] = set()
    again = []
    for id_ in ids:
        if id_ in drawn or id_ in earlier:
            again.append(id_)
        earlier.add(id_)
    return tuple(again)


def _first_drawn(shard: Shard, again: Sequence[int], drawn: Mapping[int, Shard]) -> str:
    """Return which rank first drew the samples, and what that could mean, to end a message."""
    first = drawn.get(again[0], shard) if again else shard
    meaning = ""
    if first.rank != shard.rank and {*first.ids} == {*shard.ids}:
        meaning = ", which could mean: the data are not shared out among ranks"
    elif first.step < shard.step and first.ids == shard.ids:
        meaning = ", which could mean: each worker of the loader draws all data"
    return f"first drawn in step {first.step} by rank {first.rank}{meaning}"


def _with_replacement(tally: Tally) -> str:
    how = "; if they are drawn with replacement, say obs.samples(ids, replacement=True)"
    return missing.told(tally, trace="", script=how)


def _ended_complete(
    tally: Tally,
    trace: Trace,
    seen: dict[int, dict[int, Shard]],
    epoch: int,
    step: int,
    population: Population,
) -> None:
    """Check that the epoch before `epoch` was drawn completely. `step` is the first of `epoch`.

    A trainer that drops the last batch may leave out fewer samples than a batch has. If the samples
    of an epoch are only guessed, or the script itself ended it, the epoch must have the samples
    that it has on one worker.
    """
    earlier = [e for e in seen if e < epoch]
    if not earlier:
        return
    done = max(earlier)
    num_lacking = population.num_lacking(seen[done])
    lacking = list(islice(population.lacking(seen[done]), LISTED_MAX)) if num_lacking else []
    is_short = num_lacking < trace.scenario.batch_size
    dropped = trace.traits.drop_last and is_short
    if lacking and not dropped and not population.is_cut_wrongly(trace, done, seen[done]):
        reason = f"the script ends epoch {done} before its loader does, without {lacking[:8]}"
        missing.ask(tally, reason, facts.POPULATION)
        return
    if lacking and population.is_guessed:
        lacking = population.lacking_beside_alone(done, seen[done])
        if len(lacking) < trace.scenario.batch_size and not dropped:
            why = f"epoch {done} has only {len(seen[done])} of {len(population.samples)} samples"
            missing.ask(tally, why, facts.POPULATION)
            return
    tally.check(
        dropped or not lacking,
        f"epoch {done} ended without samples {lacking[:8]}",
        step=step if any(shard.step == step for shard in seen[done].values()) else step - 1,
        sample_ids=tuple(lacking[:LISTED_MAX]),
        scenario=trace.scenario,
    )


def _all_made(tally: Tally, trace: Trace) -> None:
    """Check that a completed run took every step from its first start on."""
    steps = evidence.updates(trace)
    if not steps or trace.end.status != "completed":
        return
    num_steps = trace.scenario.num_steps
    first = min((start.step for start in trace.of(Start)), default=0)
    absent = (step for step in range(max(first, 0), num_steps) if step not in steps)
    lacking = list(islice(absent, LISTED_MAX))
    tally.check(
        not lacking,
        f"the run says completed, but steps {lacking[:8]} of num_steps={num_steps} were never made",
        step=lacking[0] if lacking else None,
        scenario=trace.scenario,
    )


def _by_members(tally: Tally, trace: Trace) -> None:
    """Check that only ranks that take part compute shards.

    A rank still takes part in the step in which it leaves.
    """
    stays = evidence.stays(trace)
    for step, shards in evidence.shards(trace).items():
        for shard in shards:
            # F-DP-001 counts ranks of the scenario that never started as missing.
            there = shard.rank in range(trace.scenario.world_size)
            if shard.rank in stays:
                there = any(stay.first <= step <= stay.end for stay in stays[shard.rank])
            if not there:
                tally.check(
                    False,
                    f"shard {shard.shard} of step {step} was computed by rank {shard.rank}, which "
                    "takes no part in that step",
                    sample_ids=shard.ids,
                    **evidence.place(trace, shard),
                )


def _stable(tally: Tally, runs: Traces) -> None:
    """Check that every run on the same data draws the same samples in the same step.

    The order must also be the same if both runs draw by logical shard.
    """
    group = [trace for trace in runs.own if evidence.is_as_trained(trace)]
    for first, trace in ((group[0], trace) for trace in group[1:]):
        is_again = first.scenario.world_size == trace.scenario.world_size
        if (trace.traits.replacement or trace.traits.selects) and not is_again:
            continue  # each rank draws its own samples at random
        if not is_again and (has_parts(first) or has_parts(trace)):
            tally.note(
                "each rank draws from its own part of the data: batches were not compared "
                "between runs on different numbers of workers"
            )
            continue
        compared = Compared(runs=runs, model=first, trace=trace)
        is_whole = not is_again and all(map(_is_whole, (first, trace)))
        if is_whole and random_draws.are_ordered_otherwise(compared):
            tally.note(
                "the order of samples on one worker differs from that on several: each run "
                "has all of them in an epoch, and steps were not compared"
            )
            continue
        comparison = (
            presuppositions.SAMPLES_REPEATED
            if is_again
            else presuppositions.SAMPLES_WITH_ONE_WORKER
        )
        if presuppositions.comparable(tally, comparison, compared) is not None:
            _same_batches(tally, first, trace)


def _is_whole(trace: Trace) -> bool:
    """Return whether the epochs of a script were judged complete, and one of them ended."""
    traits, is_own = trace.traits, trace.scenario.workload == "own"
    is_judged = is_own and traits.epochs != "untold" and traits.sample_ids != "content"
    is_judged &= not traits.replacement and traits.population != "varied"
    return is_judged and has_ended_epoch(trace)


def _none_left_out(tally: Tally, runs: Traces) -> None:
    """Check that no run draws only part of a batch that the run on one worker draws.

    Only batches of different sizes need this check: the others were compared in full.
    """
    for alone in runs.witnesses.get(ALONE, ()):
        unlike = (trace for trace in runs.own if not any(alone is run for run in runs.own))
        for trace in unlike:
            lost = random_draws.left_out(alone, trace)
            compared = Compared(runs=runs, model=alone, trace=trace)
            comparison = presuppositions.SAMPLES_WITH_ONE_WORKER
            if lost and presuppositions.comparable(tally, comparison, compared) is not None:
                step, ids = min(lost.items())
                tally.check(
                    False,
                    f"step {step} leaves out samples {ids[:8]}, which the run on one worker draws",
                    step=step,
                    sample_ids=tuple(ids),
                    scenario=trace.scenario,
                )


def _same_batches(tally: Tally, model: Trace, trace: Trace) -> None:
    if "content" in (model.traits.sample_ids, trace.traits.sample_ids):
        contents.compare(tally, model, trace)
        return
    few, many = model.scenario.world_size, trace.scenario.world_size
    batches, unknown = evidence.shards(model), missing.unknown_steps(model)
    unknown |= missing.unknown_steps(trace)
    arranged = list if model.draws_by_shard and trace.draws_by_shard else sorted
    apart = step_sums.dropped_otherwise(model, trace) if tally.observed else None
    for step, shards in sorted(evidence.shards(trace).items()):
        if step not in batches or step in unknown or (apart is not None and step >= apart):
            continue
        expected = arranged(i for shard in batches[step] for i in shard.ids)
        got = arranged(i for shard in shards for i in shard.ids)
        swapped = (i for i, j in zip(got, expected, strict=False) if i != j)
        moved = tuple(sorted(set(expected) ^ set(got))) or tuple(swapped)
        tally.check(
            expected == got,
            f"step {step} draws different samples, or in a different order, with {many} "
            f"workers than with {few}",
            step=step,
            sample_ids=moved,
            scenario=trace.scenario,
        )


# --- samples without epochs -----------------------------------------------------------------------


def _judge_without_epochs(tally: Tally, trace: Trace, alone: Trace | None) -> None:
    """Check that no sample is drawn again before all were drawn, by an error or a cut epoch.

    A sample that is drawn again may be an error, or the first of the next epoch. If fewer samples
    than a batch were left to draw, only reported epochs can decide between the two, except for a
    sampler that never ends. If the samples of an epoch are a guess, the run on one worker (`alone`)
    decides: it is an error if that run continues with samples that were not drawn yet. If a sampler
    of the script draws a sample twice in a step, it is an error if that run repeats no sample early
    (a sampler may repeat samples on purpose).
    """
    population = Population(trace)
    slack = trace.scenario.batch_size
    by_step = {} if alone is None else evidence.shards(alone)
    is_endless = trace.traits.epochs == "told"  # as in the only pass of a loader that never ends
    may_repeat = is_from_own_sampler(trace) and (alone is None or _repeats_early(alone))
    is_first = any(start.step > 0 for start in trace.of(Start))  # the epoch may have begun earlier
    seen: dict[int, int] = {}  # sample -> step that drew it, in the presumed epoch
    for step, shards in sorted(evidence.shards(trace).items()):
        drawn = {id_ for shard in shards for id_ in shard.ids}
        if len(drawn) == sum(len(shard.ids) for shard in shards) and drawn.isdisjoint(seen):
            tally.compared += len(shards)
            seen.update(dict.fromkeys(drawn, step))
            continue
        # From here on the whole epoch is searched. In a correct run that happens only where an
        # epoch begins.
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
            if again and not is_used_up and may_repeat:
                _ask_about_repeats(tally, step)
            elif again and not is_used_up:
                _drawn_again(tally, trace, shard, again, fresh)
            elif repeated and is_cut and not (is_used_up or is_first):
                _drawn_again(tally, trace, shard, repeated, seen)
            elif again or (repeated and (num_lacking or is_first) and not is_over):
                _ask(tally, step)
            else:
                tally.check(True, "")
        if not seen.keys().isdisjoint(fresh):
            if is_over:  # the missing samples end this epoch, the others begin the next
                fresh = {id_: step for id_ in fresh if id_ in seen}
            is_first, seen = False, {}
        seen.update(fresh)


def _goes_on(by_step: Mapping[int, Sequence[Shard]], step: int, seen: Collection[int]) -> bool:
    """Return whether one worker, after drawing all of `seen`, draws other samples in `step`.

    `by_step` has the shards of its run. Return False if `step` is not in it.
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


def _repeats_early(trace: Trace) -> bool:
    """Return whether a run draws a sample again before it has drawn all of its samples."""
    whole = {id_ for shard in trace.of(Shard) for id_ in shard.ids}
    seen = set[int]()
    for _, shards in sorted(evidence.shards(trace).items()):
        ids = [id_ for shard in shards for id_ in shard.ids]
        if len({*ids}) < len(ids) or not seen.isdisjoint(ids):
            if not seen.union(ids) >= whole:
                return True
            seen = set()
        seen.update(ids)
    return False


def _ask_about_repeats(tally: Tally, step: int) -> None:
    why = f"a sampler of the script draws samples again in step {step}, maybe on purpose"
    missing.ask(tally, why, facts.REPLACEMENT)


def _ask(tally: Tally, step: int) -> None:
    why = f"step {step} draws samples again, maybe as the first of the next epoch"
    missing.ask(tally, why, facts.EPOCHS)


# --- the samples of an epoch ----------------------------------------------------------------------

TELLING_MIN = 16  # fewer samples, from 0 on, may be the first ones of a shuffled epoch by chance


def compare_selections(tally: Tally, trace: Trace) -> None:
    """Check that all ranks select the same samples of a data set, or disjoint ones.

    If more than half of the ranks agree, the finding names the first rank that doesn't.
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
            f"rank {rank} trains on different samples from rank {holder}: {len(both)} samples "
            f"are in the data of both, {len(model - ids)} only in the data of rank {holder}, "
            f"{len(ids - model)} only in the data of rank {rank}; split the data with the same "
            "seed on all ranks",
            step=-1,
            rank=rank,
            sample_ids=tuple(sorted(model ^ ids)),
            scenario=trace.scenario,
        )


def has_parts(trace: Trace) -> bool:
    """Return whether ranks select different samples."""
    return len({event.ids for event in trace.of(Selection)}) > 1


def in_epochs(runs: Traces) -> list[Trace]:
    """Return the runs of a user's trainer, with their witnesses, that draw samples in epochs.

    There are no epochs if samples are drawn with replacement or from data that varies. Runs with
    samples known only by their content are left out, too.
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
    """Return whether `trace` shows the end of an epoch: all its samples, or the next epoch.

    If the script reports no epochs, a sample that comes again begins the next one. If the number of
    samples is guessed from the drawn ones, and they are shuffled, an epoch has ended once all ids
    from 0 on were drawn, since in the middle of an epoch some would be missing.
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
    """Return whether a sampler of the script continues in one pass after all samples have come."""
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
    """Return whether samples are numbered from step to step, with any number of workers.

    Then they come from a stream (tasks, games, noise) without epochs: its length is unknown, each
    step has the next samples, and the number of workers does not change them.
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
    """Return step -> its sample ids, if they continue those of the step before; otherwise {}."""
    blocks: dict[int, range] = {}
    begin = 0
    for step, ids in sorted(by_step.items()):
        blocks[step] = range(begin, begin + len(ids))
        if sorted(ids) != [*blocks[step]]:
            return {}
        begin += len(ids)
    return blocks


ROWS = (
    Check(
        name="coverage",
        id="F-DP-002",
        decides="every sample once per epoch, none twice in a step, in a stable order",
        spoken_of="disjointness completeness duplicate sampler shard dataset partition overlap",
        judge=judge,
        plan=plans.epochs,
        explores=True,
        needs=(ALONE, REPEATED),
        witnesses=(SHORTENED,),
    ),
)
