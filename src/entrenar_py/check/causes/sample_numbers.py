"""Test whether a number means the same sample on every rank, or one of the rank's own data."""

from __future__ import annotations

from collections import Counter, defaultdict

from entrenar_py.check.causes.compared import Compared
from entrenar_py.check.causes.random_draws import CONTENTS_BOUND_MOVED, are_alike
from entrenar_py.shared.trace import Selection, Shard, Trace, Update
from entrenar_py.shared.wording import counted


def of_own_data(compared: Compared) -> str:
    """Return which number stands for other samples on two ranks, as it seems; "" for none.

    It does if both draw it in an epoch, with other contents. If a sampler splits the data between
    the ranks, or the script selects each rank's part of it, numbers mean the same on all ranks.
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
                    f"sample {id_} has other contents on rank {shard.rank} than on rank {rank}: "
                    "each rank may have a data set of its own, in which it counts from 0. Give "
                    "each rank a Subset of one data set, or report numbers that all ranks count "
                    "alike, obs.samples(ids)"
                )
    return ""


def are_ordered_otherwise(compared: Compared) -> bool:
    """Return whether two runs have the same number of samples in a step, and others in each."""
    samples, others = _batches(compared.model), _batches(compared.trace)
    common = sorted(samples.keys() & others.keys())
    return bool(common) and all(
        samples[step] != others[step] and samples[step].total() == others[step].total()
        for step in common
    )


def other_batches(compared: Compared) -> str:
    """Return why two runs may rightly have different batches; "" if theirs should be the same.

    Each rank may have a part of the data, from which it draws its share of each batch, or a seed of
    its own, and one worker may have another sampler than several.
    """
    samples, others = _batches(compared.model), _batches(compared.trace)
    common = sorted(samples.keys() & others.keys())
    if not common or any(samples[step] == others[step] for step in common):
        return ""
    if "content" in (compared.model.traits.sample_ids, compared.trace.traits.sample_ids):
        return ""  # rows with noise or padding in them: `contents` says what is not known
    if left_out(compared.model, compared.trace):
        return ""
    workers = counted(compared.trace.scenario.world_size, "worker")
    told = (
        f"no step has the samples on {workers} that it has on {compared.model.scenario.world_size}"
    )
    sizes = [[batches[step].total() for step in common] for batches in (samples, others)]
    if all(size != other for size, other in zip(*sizes, strict=True)):
        return (
            f"{told}: step {common[0]} has {sizes[1][0]}, and {sizes[0][0]} there: divide the "
            "global batch by the number of workers ({share:GLOBAL} in the command does)"
        )
    return (
        f"{told}: {_why_unlike(compared)}. To have steps compared, cut batches in one order for "
        "any number of workers, and let each rank take its share of them (DistributedSampler on "
        "one worker, too; one seed on all ranks)"
    )


def _why_unlike(compared: Compared) -> str:
    """Return the likely cause of other batches on another number of workers."""
    ranks: dict[int, set[int]] = defaultdict(set)  # by sample
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
        "one worker may have another order than several (another sampler, another seed), or each "
        "rank an order of its own"
    )


def left_out(whole: Trace, fewer: Trace) -> dict[int, list[int]]:
    """Return by step the samples of `whole` that `fewer` lacks, if batches are cut alike in both.

    They are if no step of `fewer` draws anything else, and a step that is not the last of an epoch
    of `whole` draws less: the last batch of an epoch may be cut short. Otherwise return nothing.
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
    made = {update.step for update in trace.of(Update)}
    batches: dict[int, Counter[int]] = defaultdict(Counter)
    for shard in trace.standing.of(Shard):
        if shard.step in made and shard.ids:
            batches[shard.step].update(shard.ids)
    return batches
