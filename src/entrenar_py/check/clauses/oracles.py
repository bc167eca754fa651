"""Find the run on a single device that a training is compared with. Judges nothing.

It is a run of the independent trainer. For a user's own trainer, which the independent one can't
reproduce, it is the user's run on one worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from entrenar_py.check.evidence import facts, missing
from entrenar_py.check.evidence.needs import ALONE, ORACLE, Traces
from entrenar_py.shared.trace import Shard, Trace
from entrenar_py.shared.verdict import Tally

# Field of a scenario -> how runs of one command differ in it, with the advice. In this order: the
# first one often causes the others.
_DIFFERENT: Mapping[str, str] = {
    "batch_size": "one worker trains on batches of {alone} samples, {workers} on {several}: divide "
    "the global batch by the number of workers ({{share:GLOBAL}} in the command does)",
    "num_samples": "one worker has a data set of {alone} samples, {workers} workers one of "
    "{several}: give all runs the same data",
    "num_steps": "one worker makes {alone} steps, {workers} make {several}: make the same number "
    "of steps with any number of workers ({{steps}} in the command says how many)",
    "learning_rate": "one worker begins with learning rate {alone}, {workers} with {several}: if "
    "it is scaled by the number of workers, leave that out for the check",
}
# In place of the numbers of samples, if these are guessed by the highest id that was drawn.
_OTHER_SAMPLES = (
    "one worker draws other samples than {workers} workers: draw each batch for all workers, by "
    "the same seed, and give each its share"
)


def model_of(runs: Traces) -> Trace | None:
    """Return the run that the others are compared with, or None."""
    return next(iter(runs.of(ORACLE, ALONE)), None)


def missing_model(tally: Tally, runs: Traces) -> str:
    """Return why no run on a single device can be compared with, and what to do about it.

    "" if one can.
    """
    model = model_of(runs)
    for trace in runs.own:
        if model is not None and trace is not model:
            return "" if same_masks(model, trace) else other_masks(trace) + _instead(trace)
    if tally.observed:
        return _another_training(tally, runs)
    if why := _difference(runs, ["batch_size"]):
        return why
    why = "no run of the same training on one worker to compare with: record one with world_size=1"
    if runs.base is not None and runs.base.scenario.world_size == 1:
        why = "no run on several workers: record the same training with a larger world_size"
    return f"{why}, and all else equal{runs.nearly(ALONE)}"


def _another_training(tally: Tally, runs: Traces) -> str:
    """Return why a script's run on one worker can't be compared with its run on several.

    It often has another global batch: most scripts have an option for the batch of a worker.
    """
    near = runs.near.get(ALONE)
    if near is None or runs.base is None:
        return "no run on several workers and one on one worker that both ended without failing"
    for run in (runs.base, near.run):
        if not any(shard.ids for shard in run.of(Shard)):  # sizes of batch and data are guesses
            return missing.nothing(tally, "the samples of each step are unknown", facts.IDS)
    others = ", ".join(near.fields)
    otherwise = f"one worker and {runs.base.scenario.world_size} train differently, in {others}"
    return _difference(runs, _DIFFERENT) or otherwise


def _difference(runs: Traces, names: Iterable[str]) -> str:
    """Return how a user's run on one worker differs, in the first of `names` that does; else ""."""
    near = runs.near.get(ALONE)
    if runs.base is None or runs.base.scenario.workload != "own" or near is None:
        return ""
    for name in names:
        alone, several = near.fields.get(name, (0, 0))
        if alone != several:
            workers = runs.base.scenario.world_size
            guessed = name == "num_samples" and runs.base.traits.population == "guessed"
            says = _OTHER_SAMPLES if guessed else _DIFFERENT[name]
            return says.format(alone=alone, several=several, workers=workers)
    return ""


def same_masks(model: Trace, trace: Trace) -> bool:
    """Return whether dropout, if any, uses the same masks in `trace` as in `model`.

    The single device draws by logical shard. A trainer that also draws by shard has the same masks
    unless its trait `masks` is `shard_apart`. For others the first shards' draws are compared, if
    they were recorded. Micro-batches (they draw in another order) and batch normalisation by each
    rank's own samples (one worker normalises differently) count as different masks.
    """
    if trace.traits.batch_norm:
        return False
    if not trace.scenario.dropout:
        return True
    if trace.scenario.accumulation > 1:
        return False
    mine, theirs = ({s.draws for s in run.of(Shard)[:1]} for run in (trace, model))
    known = trace.scenario.workload != "own" or None not in mine
    by_shard = trace.draws_by_shard and trace.traits.masks != "shard_apart"
    return by_shard or (mine == theirs and known)


def other_masks(trace: Trace) -> str:
    """Return why a run with dropout or batch normalisation is not compared with one device."""
    if trace.traits.batch_norm:
        return (
            "batch normalisation uses each rank's own samples: on one worker it is another run, "
            "and was not compared"
        )
    if trace.draws_by_shard:
        return "not compared with a single device, whose dropout draws other masks"
    system = "the script" if trace.scenario.workload == "own" else trace.scenario.system
    if all(shard.draws is None for shard in trace.of(Shard)):
        return f"under dropout {system} was not compared with one worker, since no Shard has draws"
    return (
        f"under dropout {system} draws its masks per rank: on one worker it is another run, and "
        "was not compared"
    )


def _instead(trace: Trace) -> str:
    if trace.traits.batch_norm:
        return ": use SyncBatchNorm, or leave its layers in eval()"
    return ": use dropout 0 in both runs"
