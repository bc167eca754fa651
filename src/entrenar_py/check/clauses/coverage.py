"""F-DP-002: every sample exactly once per epoch, none twice in a step, in a stable order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice

from entrenar_py.check import evidence
from entrenar_py.check.causes import presuppositions, random_draws
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import contents, plans, untold_epochs
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.clauses.population import (
    Population,
    compare_selections,
    count_on,
    has_ended_epoch,
    has_parts,
    in_epochs,
    is_endless,
)
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import facts, missing, step_sums
from entrenar_py.check.evidence.needs import ALONE, REPEATED, SHORTENED, Traces
from entrenar_py.shared.trace import Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally
from entrenar_py.shared.wording import counted, named

_TELLING_MIN = 10  # distinct samples: fewer may be the same ones by chance
LISTED_MAX = 1000  # the most missing sample ids, or steps, that a finding lists


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that each run draws every sample once per epoch, and all runs the same in each step."""
    tally = missing.tally_for(invariant, runs)
    runs = evidence.usable_runs(runs, tally)
    for trace in runs:
        missing.require_updates(tally, trace)
        if trace.traits.replacement:
            tally.note(
                "samples are drawn with replacement: they must belong to the data set and be the "
                "same when it is run again; how often each comes was not judged"
            )
        if trace.traits.selects:
            tally.note(
                f"rows are selected by random numbers in each step ({trace.traits.selects}): how "
                "often each comes was not judged, nor was it compared between runs on other "
                "numbers of workers"
            )
        if trace.traits.population == "varied":
            tally.note(
                "samples are drawn from several data sets, or from other parts of one: whether a "
                "pass had all of its own was not judged"
            )
        if made := {shard.step for shard in trace.of(Shard) if shard.made}:
            tally.note(
                f"in {counted(len(made), 'step')} the model was given what the script made or "
                "sampled, of samples that it had before: they were not counted again"
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
            untold_epochs.judge(tally, trace, compared.alone)
        else:
            _disjoint_and_complete(tally, trace, compared.alone)
            _replaced_apart(tally, trace)
        _all_made(tally, trace)
        _by_members(tally, trace)
    for trace in runs.witnesses.get(SHORTENED, ()):
        _in_short_epochs(tally, runs, trace)
    if tally.broken is None:  # a run that is wrong by itself differs from others because of that
        _stable(tally, runs)
        _none_left_out(tally, runs)
    epochal = in_epochs(runs)
    if count_on(epochal):
        tally.note("samples are numbered from step to step, and no run draws one again: no epochs")
    elif epochal and not any(map(has_ended_epoch, epochal)):
        why = "no run came to the end of an epoch, so it is open whether one has every sample"
        missing.ask(tally, why, facts.EPOCH_END)
    why = "no samples are known"
    return tally.finding(nothing=missing.nothing(tally, why, facts.IDS_AND_UPDATE))


def _in_short_epochs(tally: Tally, runs: Traces, trace: Trace) -> None:
    """Judge the whole epochs of a run in which they were shortened, if its samples are numbered."""
    compared = Compared(runs=runs, model=trace, trace=trace)
    is_known = trace.end.status == "completed" and trace.traits.sample_ids != "content"
    if not is_known or presuppositions.comparable(tally, presuppositions.SAMPLES, compared) is None:
        return
    if _has_untold_epochs(trace):
        untold_epochs.judge(tally, trace, None)
    elif not _guessed_to_differ(trace):
        _disjoint_and_complete(tally, trace, None)


def _has_untold_epochs(trace: Trace) -> bool:
    """Return whether an epoch's end isn't told: by a sampler of the script's that never ends, too.

    One pass through its loader has all samples, and only then some of them again.
    """
    if trace.traits.replacement:
        return False
    return trace.traits.epochs == "untold" or is_endless(trace)


def _guessed_to_differ(trace: Trace) -> list[int]:
    """Return the ranks that draw the same samples in every step, if they may do so rightly.

    Nothing shows that ranks are replicas if neither torch's wrapper, a mesh nor the script says so:
    they may hold parts of a model that was cut by hand.
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

    `alone` is the run on one worker, if there is one. How many samples a step draws is checked only
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
        for shard in shards:
            _count(tally, trace, shard, seen.setdefault(shard.epoch, {}), population)
        if step >= known_until or trace.traits.replacement or population.is_varied:
            continue
        for epoch in begun:
            _ended_complete(tally, trace, seen, epoch, step, population)
        if tally.observed:
            continue  # a script may draw as many as it likes, as long as all come
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
    drawn: dict[int, list[tuple[int, int]]] = {}  # by rank: step and sample
    for shard in trace.of(Shard):
        drawn.setdefault(shard.rank, []).extend((shard.step, id_) for id_ in shard.ids)
    first = min(drawn, default=0)
    for rank in sorted(drawn):
        are_many = len({id_ for _, id_ in drawn[rank]}) >= _TELLING_MIN
        if rank == first or not are_many or drawn[rank] != drawn[first]:
            continue
        tally.check(
            False,
            f"ranks {first} and {rank} draw the same samples in every step, though each is to "
            "train on samples of its own",
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
            f"rank {shard.rank} drew other samples for shard {shard.shard} than rank {peer.rank}, "
            "though both share it",
            sample_ids=others,
            **evidence.place(trace, shard),
        )


def _silent(trace: Trace, step: int, shards: Sequence[Shard]) -> str:
    """Return the end of a message: the ranks that recorded no shard of `step`, a likely cause."""
    ranks_made = {update.rank for update in trace.of(Update) if update.step == step}
    ranks = sorted(ranks_made - {shard.rank for shard in shards})
    return f"; ranks {str(ranks[:8])[1:-1]} recorded no Shard of it" if ranks else ""


def _count(
    tally: Tally, trace: Trace, shard: Shard, drawn: dict[int, Shard], population: Population
) -> None:
    again = tuple(i for n, i in enumerate(shard.ids) if i in drawn or i in shard.ids[:n])
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


def _first_drawn(shard: Shard, again: Sequence[int], drawn: Mapping[int, Shard]) -> str:
    """Return by which rank and when samples were drawn first, and what that could mean."""
    first = drawn.get(again[0], shard) if again else shard
    meaning = ""
    if first.rank != shard.rank and {*first.ids} == {*shard.ids}:
        meaning = ", which could mean: the data are not shared out among ranks"
    elif first.step < shard.step and first.ids == shard.ids:
        meaning = ", which could mean: each worker of the loader draws all data"
    return f"first drawn in step {first.step} by rank {first.rank}{meaning}"


def _with_replacement(tally: Tally) -> str:
    """Return the end of a message: how a script says that samples may be drawn again."""
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

    A trainer that drops the last batch may leave out fewer samples than a batch has. If only a
    guess says which samples an epoch should have, it should have those that it has on one worker.
    """
    earlier = [e for e in seen if e < epoch]
    if not earlier:
        return
    done = max(earlier)
    num_lacking = population.num_lacking(seen[done])
    lacking = list(islice(population.lacking(seen[done]), LISTED_MAX)) if num_lacking else []
    is_short = num_lacking < trace.scenario.batch_size
    dropped = trace.traits.drop_last and is_short
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
    """Check that a run with status completed made every step from its first start on."""
    made = evidence.updates(trace)
    if not made or trace.end.status != "completed":
        return
    num_steps = trace.scenario.num_steps
    first = min((start.step for start in trace.of(Start)), default=0)
    absent = (step for step in range(max(first, 0), num_steps) if step not in made)
    lacking = list(islice(absent, LISTED_MAX))
    tally.check(
        not lacking,
        f"the run says completed, but steps {lacking[:8]} of num_steps={num_steps} were never made",
        step=lacking[0] if lacking else None,
        scenario=trace.scenario,
    )


def _by_members(tally: Tally, trace: Trace) -> None:
    """Check that only members compute shards; a rank is one in the step in which it leaves, too."""
    stays = evidence.stays(trace)
    for step, shards in evidence.shards(trace).items():
        for shard in shards:
            # Ranks of the scenario that never started are counted as missing by F-DP-001.
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

    The order must be equal, too, if both runs draw by logical shard.
    """
    group = [trace for trace in runs.own if evidence.is_as_trained(trace)]
    for first, trace in ((group[0], trace) for trace in group[1:]):
        is_again = first.scenario.world_size == trace.scenario.world_size
        if (trace.traits.replacement or trace.traits.selects) and not is_again:
            continue  # with replacement, each rank draws its own
        if not is_again and (has_parts(first) or has_parts(trace)):
            tally.note(
                "each rank draws from its own part of the data: batches were not compared between "
                "runs on other numbers of workers"
            )
            continue
        compared = Compared(runs=runs, model=first, trace=trace)
        is_whole = not is_again and all(map(_is_whole, (first, trace)))
        if is_whole and random_draws.are_ordered_otherwise(compared):
            tally.note(
                "one worker has another order of samples than several: each run has all of them "
                "in an epoch, and steps were not compared"
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
    """Return whether it was judged that an epoch of a script that ended has all samples once."""
    traits, is_own = trace.traits, trace.scenario.workload == "own"
    is_judged = is_own and traits.epochs != "untold" and traits.sample_ids != "content"
    is_judged &= not traits.replacement and traits.population != "varied"
    return is_judged and has_ended_epoch(trace)


def _none_left_out(tally: Tally, runs: Traces) -> None:
    """Check that no run draws less of each batch than the run on one worker does.

    Only batches of other sizes are left to check: others were compared in full.
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
            f"step {step} draws other samples, or in another order, with {many} workers than with "
            f"{few}",
            step=step,
            sample_ids=moved,
            scenario=trace.scenario,
        )


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
