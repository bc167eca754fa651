"""Test whether random numbers, samples or their contents depend on how work is split.

If they depend on the rank or on how a batch is split, a different number of workers, or of
micro-batches, may train differently. Also, an id may be a sample's index in the rank's own data,
and one worker may form different batches.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from entrenar_py.check.causes import accumulation
from entrenar_py.check.causes.rounding_bounds import ROUNDING_STEPS
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.evidence import missing, precision
from entrenar_py.check.evidence.run_names import run_name
from entrenar_py.shared.faults import CONTROLLED
from entrenar_py.shared.trace import Drawn, Selection, Shard, Trace, Update
from entrenar_py.shared.wording import counted

# The largest relative distance of a sample's contents in two runs, as the model gets them. In later
# steps they may be the output of another model, with weights that rounding has moved apart.
CONTENTS_BOUND = 1e-5
CONTENTS_BOUND_MOVED = 1e-3
_COARSE_UNITS = 16  # roundings of 16-bit arithmetic, for runs in that precision
# Where random numbers are drawn -> words for it, with what is often drawn there.
PLACES: Mapping[str, str] = {
    "between": "between two steps",
    "loader": "as the data set is read (augmentation)",
    "batch": "between the batch and the forward pass (noise, timesteps, augmentation)",
    "forward": "in the model's forward pass (dropout, noise, masks)",
    "loss": "between the forward and the backward pass (noise or masks of the loss, or the next "
    "batch)",
    "recomputed": "by layers that are recomputed in the backward pass",
    "backward": "in the backward pass",
    "gradient": "between the backward pass and the step (noise on gradients, or the next batch)",
    "step": "in optimizer.step()",
}
# Draws at these places can only change the model's input.
_BEFORE_THE_BATCH = ("between", "loader")
_REMEDY = (
    "turn it off for this check; or draw before the forward pass, for the whole batch on every "
    "rank, from a generator that is seeded with the step, and use this rank's part"
)
_BY_SAMPLE = (
    "turn augmentation and noise off for this check, or draw them from a generator that is seeded "
    "with the sample's id and the epoch"
)

# (step, sample) -> numbers that describe its contents.
Contents = Mapping[tuple[int, int], tuple[float, ...]]
_Numbers = tuple[str, str, str]  # generator, and its state before and after


def other_contents(compared: Compared) -> str:
    """Return which sample has different contents in the two runs, and why; "" if none has."""
    if compared.is_one_run:
        return ""
    expected = _contents(compared.model)
    unit = precision.unit(compared.model, compared.trace)
    coarse = _COARSE_UNITS * unit if unit > precision.FLOAT32 else 0.0
    rearranged: set[int] = set()  # steps
    for (step, id_), got in _contents(compared.trace).items():
        due = expected.get((step, id_))
        bound = max(coarse, CONTENTS_BOUND_MOVED if step else CONTENTS_BOUND)
        if due is None or are_alike(due, got, bound) or step in rearranged:
            continue
        if _are_rearranged(compared.model, compared.trace, step, bound):
            rearranged.add(step)
            continue
        return (
            f"sample {id_} of step {step} reaches the model with different contents in "
            f"{run_name(compared.trace)} than in {run_name(compared.model)}: the contents depend "
            "on the rank, on a loader's worker, or on the rest of the "
            f"batch{_drawn_before(compared.trace)}: {_BY_SAMPLE}"
        )
    return ""


def _drawn_before(trace: Trace) -> str:
    """Return a phrase about which draws may have changed the contents; "" if none."""
    drawn = _by_place(trace)
    places = [
        f"{PLACES[where]}, from {_named(drawn[where])}"
        for where in (*_BEFORE_THE_BATCH, "batch")
        if where in drawn
    ]
    return f" (random numbers are drawn {'; '.join(places)})" if places else ""


def drawn_by_rank(compared: Compared) -> str:
    """Return where numbers are drawn that may differ between the runs; "" if nowhere.

    Also return "" if they have no effect. Two runs with the same micro-batches on the same ranks
    draw the same numbers if the generators have the same states. For other micro-batches, equal
    states aren't enough: masks for half a batch may leave the generator in the same state as masks
    for the whole batch.
    """
    if compared.is_one_run:
        return ""
    model, trace = compared.model, compared.trace
    alike = _micro_batches(model) == _micro_batches(trace)
    known = _all_known(model) and _all_known(trace)
    # Runs with common random numbers record only draws of a few numbers, and unknown draws.
    are_common = any(fault.kind in CONTROLLED for fault in trace.scenario.faults)
    drawn, expected = _by_place(trace), _by_place(model)
    for where in PLACES:
        is_batch = where in _BEFORE_THE_BATCH
        if where == "gradient":
            is_batch = not (noise_on_gradients(trace) or noise_on_gradients(model))
        if is_batch and known:
            continue  # known contents are compared themselves
        mine, theirs = drawn.get(where, {}), expected.get(where, {})
        one_for_all = are_common or (where == "batch" and known)
        same = {**mine} == {**theirs} if alike else one_for_all and _one(mine, theirs)
        if (mine or theirs) and not same:
            if compared.difference is None:
                return ""
            run = run_name(trace if mine else model)
            names = _named(mine or theirs)
            return (
                f"{run} draws random numbers {PLACES[where]}, from {names}, which may depend on "
                f"the rank or on how a batch is split: {_REMEDY}"
            )
    return ""


def noise_on_gradients(trace: Trace) -> str:
    """Return which random numbers may have changed gradients before the step; "" if none.

    If the applied gradient is still the sum of its micro-batches, the numbers were drawn for
    something else, such as the next batch.
    """
    drawn = _by_place(trace).get("gradient")
    if not drawn or accumulation.are_applied(trace, {step for step, _ in drawn}):
        return ""
    return (
        f"random numbers are drawn {PLACES['gradient']}, from {_named(drawn)}, so the applied "
        "gradient is not the gradient of the batch: turn it off for this check"
    )


def _contents(trace: Trace) -> Contents:
    return {
        (shard.step, id_): numbers
        for shard in trace.standing.of(Shard)
        if shard.step < ROUNDING_STEPS and len(shard.contents) == len(shard.ids)
        for id_, numbers in zip(shard.ids, shard.contents, strict=True)
    }


def are_alike(due: tuple[float, ...], got: tuple[float, ...], bound: float) -> bool:
    """Return whether a sample has the same contents, or contents that can't be compared.

    `due` and `got` have three numbers for each tensor of the sample: size, norm and sum.
    """
    if len(due) != len(got) or len(due) % 3:
        return True
    for at in range(0, len(due), 3):
        (size, norm, total), (other_size, *others) = due[at : at + 3], got[at : at + 3]
        if size != other_size or not all(map(math.isfinite, (norm, *others))):
            continue
        allowed = bound * max(norm, others[0])
        if abs(norm - others[0]) > allowed or abs(total - others[1]) > allowed:
            return False
    return True


def _are_rearranged(model: Trace, trace: Trace, step: int, bound: float) -> bool:
    """Return whether `step` has the same samples and rows in both runs, in any order.

    A collator may sort its batch (by length, for example). Then a row is not the sample at the same
    place of the sampler's batch. Rows may be padded with zeros to a different length, which does
    not change norm and sum.
    """
    shards = [[s for s in run.standing.of(Shard) if s.step == step] for run in (model, trace)]
    ids = [Counter(id_ for shard in run for id_ in shard.ids) for run in shards]
    rows = [[row for shard in run for row in shard.contents] for run in shards]
    if ids[0] != ids[1] or not len(rows[0]) == len(rows[1]) == ids[0].total():
        return False
    left = [_without_sizes(row) for row in rows[0]]
    for row in map(_without_sizes, rows[1]):
        at = next((at for at, due in enumerate(left) if _is_same_row(due, row, bound)), None)
        if at is None:
            return False
        del left[at]
    return True


def _without_sizes(row: tuple[float, ...]) -> tuple[float, ...]:
    """Return a row with the size of each tensor replaced by 1."""
    return tuple(1.0 if at % 3 == 0 else number for at, number in enumerate(row))


def _is_same_row(due: tuple[float, ...], got: tuple[float, ...], bound: float) -> bool:
    # A row that can't be compared doesn't count as the same one, since it would match any other.
    can_be_compared = len(due) == len(got) and all(map(math.isfinite, (*due, *got)))
    return can_be_compared and are_alike(due, got, bound)


def _all_known(trace: Trace) -> bool:
    """Return whether the contents of every sample in the first steps are known.

    They are also known if a sample's id is a digest of its contents.
    """
    if trace.traits.sample_ids == "content":
        return not missing.unknown_steps(trace) & {*range(ROUNDING_STEPS)}
    shards = [s for s in trace.standing.of(Shard) if s.ids and s.step < ROUNDING_STEPS]
    return bool(shards) and all(len(shard.contents) == len(shard.ids) for shard in shards)


def _micro_batches(trace: Trace) -> list[tuple[int, int, int, tuple[int, ...]]]:
    shards = (s for s in trace.standing.of(Shard) if s.step < ROUNDING_STEPS)
    return sorted((shard.step, shard.rank, shard.shard, shard.ids) for shard in shards)


# Place of the draws -> (step, rank) -> draws.
_ByPlace = Mapping[str, Mapping[tuple[int, int], list[_Numbers]]]


def _by_place(trace: Trace) -> _ByPlace:
    draws: dict[str, dict[tuple[int, int], list[_Numbers]]] = defaultdict(lambda: defaultdict(list))
    for drawn in trace.standing.of(Drawn):
        if drawn.step < ROUNDING_STEPS and (drawn.worker is None or drawn.where == "loader"):
            numbers = drawn.generator, drawn.before, drawn.after
            draws[drawn.where][drawn.step, drawn.rank].append(numbers)
    return draws


_Draws = Mapping[tuple[int, int], list[_Numbers]]


def _one(mine: _Draws, theirs: _Draws) -> bool:
    """Return whether all ranks of both runs drew the same numbers in each step."""
    by_step: dict[int, list[list[_Numbers]]] = defaultdict(list)
    for (step, _), numbers in (*mine.items(), *theirs.items()):
        by_step[step].append(numbers)
    steps = [{step for step, _ in draws} for draws in (mine, theirs)]
    return steps[0] == steps[1] and all(
        numbers == all_ranks[0] for all_ranks in by_step.values() for numbers in all_ranks
    )


def _named(draws: _Draws) -> str:
    names = dict.fromkeys(name for numbers in draws.values() for name, _, _ in numbers)
    return " and ".join(named(name) for name in names)


def named(generator: str) -> str:
    """Return a phrase for a generator: `numpy's generator`, `the generator noise_rng`."""
    known = {"torch": "torch's", "numpy": "numpy's", "python": "Python's"}
    if generator in known:
        return f"{known[generator]} generator"
    if generator.startswith("cuda"):
        return f"the generator of {generator}"
    return f"the generator {generator}"


# --- samples by their ids -------------------------------------------------------------------------


def of_own_data(compared: Compared) -> str:
    """Return which id seems to mean different samples on two ranks; "" if none does.

    It does if both ranks draw it in an epoch, with different contents. If a sampler splits the data
    between the ranks, or the script selects each rank's part of the data, ids mean the same on all
    ranks.
    """
    runs = (compared.trace,) if compared.is_one_run else (compared.model, compared.trace)
    return next((why for run in runs if (why := _apart(run))), "")


def _apart(trace: Trace) -> str:
    if trace.traits.splits or trace.of(Selection) or trace.traits.sample_ids == "content":
        return ""
    first: dict[tuple[int, int], tuple[int, tuple[float, ...]]] = {}
    for shard in trace.standing.of(Shard):
        if len(shard.contents) != len(shard.ids):
            continue
        for id_, contents in zip(shard.ids, shard.contents, strict=True):
            rank, others = first.setdefault((shard.epoch, id_), (shard.rank, contents))
            if rank != shard.rank and not are_alike(others, contents, CONTENTS_BOUND_MOVED):
                return (
                    f"sample {id_} has different contents on ranks {shard.rank} and {rank}: each "
                    "rank may have a data set of its own, in which ids count from 0. Give each "
                    "rank a Subset of one data set, or report ids that mean the same sample on "
                    "all ranks, obs.samples(ids)"
                )
    return ""


def are_ordered_otherwise(compared: Compared) -> bool:
    """Return whether all steps have equally many samples in both runs, but different ones."""
    samples, others = _batches(compared.model), _batches(compared.trace)
    common = sorted(samples.keys() & others.keys())
    return bool(common) and all(
        samples[step] != others[step] and samples[step].total() == others[step].total()
        for step in common
    )


def other_batches(compared: Compared) -> str:
    """Return why two runs may rightly have different batches; "" if these should be the same.

    Each rank may draw its part of each batch from its own part of the data, or with its own seed.
    And one worker may have a different sampler than several workers.
    """
    samples, others = _batches(compared.model), _batches(compared.trace)
    common = sorted(samples.keys() & others.keys())
    if not common or any(samples[step] == others[step] for step in common):
        return ""
    if "content" in (compared.model.traits.sample_ids, compared.trace.traits.sample_ids):
        return ""  # rows with noise or padding: the clause itself reports what is unknown
    if left_out(compared.model, compared.trace):
        return ""
    workers = counted(compared.trace.scenario.world_size, "worker")
    beginning = (
        f"no step has the same samples on {workers} as on {compared.model.scenario.world_size}"
    )
    sizes = [[batches[step].total() for step in common] for batches in (samples, others)]
    if all(size != other for size, other in zip(*sizes, strict=True)):
        return (
            f"{beginning}: step {common[0]} has {sizes[1][0]} samples, and {sizes[0][0]} on "
            f"{compared.model.scenario.world_size}: divide the global batch by the number of "
            "workers ({share:GLOBAL} in the command does)"
        )
    return (
        f"{beginning}: {_why_unlike(compared)}. To make steps comparable, form batches in the "
        "same order for any number of workers, and let each rank take its share (use "
        "DistributedSampler also on one worker, and one seed on all ranks)"
    )


def _why_unlike(compared: Compared) -> str:
    """Return the likely cause of different batches with a different number of workers."""
    ranks: dict[int, set[int]] = defaultdict(set)  # sample -> ranks
    epochs: set[int] = set()
    for run in (compared.model, compared.trace):
        if run.scenario.world_size > 1:
            for shard in run.standing.of(Shard):
                epochs.add(shard.epoch)
                for id_ in shard.ids:
                    ranks[id_].add(shard.rank)
    if len(epochs) > 1 and all(len(drawn) == 1 for drawn in ranks.values()):
        return "each rank draws from a part of the data"
    return (
        "one worker may have a different order (a different sampler or seed), or each "
        "rank may have an order of its own"
    )


def left_out(whole: Trace, fewer: Trace) -> dict[int, list[int]]:
    """Return step -> the samples of `whole` that `fewer` lacks, if both form the same batches.

    They form the same batches if no step of `fewer` has other samples. At least one step must have
    fewer samples in `fewer`, and not be the last of its epoch in `whole`, since a last batch may be
    cut short. Otherwise return {}.
    """
    if whole.traits.epochs == "untold":
        return {}
    samples, others = _batches(whole), _batches(fewer)
    steps = samples.keys() & others.keys()
    if not all(others[step] <= samples[step] for step in steps):
        return {}
    lost = {step: [*(samples[step] - others[step])] for step in steps}
    last = {shard.epoch: shard.step for shard in whole.standing.of(Shard)}
    is_cut = any(lost[step] for step in steps - {*last.values()})
    return {step: sorted(ids) for step, ids in lost.items() if ids} if is_cut else {}


def _batches(trace: Trace) -> dict[int, Counter[int]]:
    completed = {update.step for update in trace.of(Update)}
    batches: dict[int, Counter[int]] = defaultdict(Counter)
    for shard in trace.standing.of(Shard):
        if shard.step in completed and shard.ids:
            batches[shard.step].update(shard.ids)
    return batches
