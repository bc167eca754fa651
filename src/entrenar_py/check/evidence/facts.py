"""Facts that a judge may lack, each as the field of a trace and as the call of a script.

If a trace was written by hand, a reason tells its author which field to record. For an observed
script, a reason tells its owner which call provides the fact. `missing.tally_for` chooses between
the two.
"""

from __future__ import annotations

from dataclasses import dataclass

# Words that ask for a tensor's values, not only its digest.
WITH_VALUES = "with values, record_tensor(array, values=True)"
_WHOLE = (
    "let all ranks come to the end, since a sharded tensor is known only if "
    "each rank recorded its own piece. If optimizers step in turn and the "
    "script has no observe(), add observe(model, [first, second]), which shows "
    "which step applies a gradient"
)
_BOTH_ENDS = "a rank that was ended, or that skipped the step, recorded nothing"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A fact that a judge needs and a run may lack.

    `record` names it by fields of `entrenar_py.trace`, as the object of the verb "record". `call`
    is an imperative: what to do in an observed script.
    """

    record: str
    call: str

    def advice(self, *, observed: bool) -> str:
        """Return how to provide the fact: in an `observed` script, otherwise in the trace."""
        return self.call if observed else f"record {self.record}"


# --- samples and losses ---------------------------------------------------------------------------
_SAMPLES = "call obs.samples(ids) before each backward pass, or give observe(..., sampler=loader)"
_LOSS = "call obs.loss(mean, weight) once for each backward pass, with the number of samples"
_BACKWARD = (
    "give observe() the model that is trained, on every rank: no backward pass reached its "
    "parameters there"
)

IDS = Fact(record="Shard.ids", call=_SAMPLES)
IDS_IN_BOTH = Fact(record="Shard.ids in both runs", call=_SAMPLES)
IDS_AND_UPDATE = Fact(
    record="a Shard with ids for every rank and step, and an Update for the step", call=_SAMPLES
)
EPOCHS = Fact(record="Shard.epoch", call="report the epochs, too: obs.samples(ids, epoch=...)")
EPOCH_END = Fact(
    record="Shards up to the second epoch",
    call="run the script for more than one epoch: put {epochs} into the command, raise --steps, or "
    "take a smaller data set",
)
REPLACEMENT = Fact(
    record="Traits.replacement",
    call="if a sample may be drawn again within an epoch, say obs.samples(ids, replacement=True)",
)
POPULATION = Fact(
    record="the samples of the data set",
    call="if an epoch has to draw every sample, say observe(..., dataset=data), with a Subset if "
    "only some are meant; if epochs draw some of the data each (a curriculum), "
    "obs.samples(ids, replacement=True); a loader with drop_last=True leaves out a short last "
    "batch",
)
LOSS = Fact(record="Shard.loss_sum", call=_LOSS)
LOSS_IN_BOTH = Fact(record="Shard.loss_sum, or Update.loss, in both runs", call=_LOSS)
LOSS_OF_UPDATE = Fact(record="Update.loss in both", call=_LOSS)
WEIGHT = Fact(record="Shard.weight", call=f"{_LOSS}, or {_SAMPLES}")
LOSS_AND_WEIGHT = Fact(
    record="a Shard with loss_sum and weight, and an Update with loss and weight, for every rank "
    "and step",
    call=_LOSS,
)
SHARDS = Fact(
    record="a Shard with ids, loss_sum, weight and finite for every rank and step", call=_BACKWARD
)
SHARDS_IN_BOTH = Fact(record="a Shard of each step in both", call=_BACKWARD)
DRAWS = Fact(
    record="Shard.draws, a digest of the first numbers that dropout drew for the shard",
    call="call the observed model itself, not its parts: random numbers are "
    "observed in its forward pass",
)


def of_shards(field: str) -> Fact:
    """Return the fact that the shards of both runs have `field` (ids, draws or gradient)."""
    calls = {"ids": _SAMPLES, "gradient": _WHOLE}
    return Fact(record=f"Shard.{field} in both", call=calls.get(field, DRAWS.call))


# --- steps and states -----------------------------------------------------------------------------
_STEPS = "give observe() the optimizer that steps, before its first step, on every rank"
_STATES = "give observe() the whole model and every optimizer, before the first step, on every rank"

UPDATES = Fact(record="an Update for every rank and step", call=_STEPS)
UPDATES_IN_BOTH = Fact(record="an Update for every rank and step in both", call=_BOTH_ENDS)
UPDATES_OF_CALM = Fact(record="an Update for every step", call=_STEPS)
START = Fact(record="a Start with weights and trainable on every rank", call=_STATES)
START_WITH_VALUES = Fact(record=f"a Start of each rank, and its weights {WITH_VALUES}", call=_WHOLE)
START_WEIGHTS = Fact(record="Start.weights on every rank", call=_STATES)
START_AND_UPDATES = Fact(
    record="a Start and Updates for every rank, weights and gradient with values, "
    "record_tensor(array, values=True)",
    call=_STEPS,
)
TWO_WORKERS = Fact(
    record="with world_size >= 2, a Start and Updates with weights on every rank",
    call="run it with two workers or more (--world-size), and call observe() on each",
)
ALL_WEIGHTS = Fact(
    record="Start.weights and Update.weights, with all tensors, also frozen ones", call=_STATES
)
TRAINABLE = Fact(
    record="Start.trainable",
    call="give observe() a model with parameters that require a gradient, of this rank's own",
)

ALL_RANKS = Fact(
    record="a Start and Updates on every rank, or a world_size that counts only those that started",
    call=_STATES,
)
DECAYED = Fact(record="Start.decayed, the tensors that weight decay acts on", call=_STATES)
FROM_STEP_0 = Fact(
    record="the run from step 0 on, every step",
    call="run the script from its first step, with no optimizer step made before observe()",
)
SAME_TENSORS = Fact(
    record="weights and gradient of the same names and sizes, and finite=True where they are",
    call=_WHOLE,
)
NORMS = Fact(
    record="Update.grad_norm and Update.applied_norm",
    call="call obs.reduced() on every rank, after the reduction and before clipping",
)
CLIP_NORM = Fact(
    record="Traits.clip_norm",
    call="say to which norm the applied gradient is clipped: observe(..., clip_norm=)",
)
DEPARTURE = Fact(
    record="a Membership with change='left' where a worker left",
    call="let the run make more steps ({steps}, --steps): the worker is killed in the middle",
)
RESUMED_START = Fact(
    record="a Start with resumed=True on every rank",
    call="after loading a checkpoint, tell observe(..., step=k) how many steps were made before",
)
FINITE_AND_HALT = Fact(
    record="a Shard (with finite) and an Update (with finite) for every rank and step, and a Halt "
    "where a run stops at a NaN or Inf",
    call=_STEPS,
)
FINITE = Fact(record="a Shard with finite for every rank and step", call=_BACKWARD)
FINITE_OF_ALL = Fact(
    record="a Shard for each, with finite=False for the one at fault", call=_BACKWARD
)
NAMED_BY_HALT = Fact(record="them in it", call="give them to obs.halted(...)")


def of_step(step: int) -> Fact:
    """Return the fact that a rank recorded its update of `step`."""
    return Fact(record=f"its Update of step {step}", call=_BOTH_ENDS)


# --- facts of traces only, and of workers that step alone -----------------------------------------
COLLECTIVES_ALONE = Fact(
    record="Synchronised.collectives_alone",
    call="call obs.synchronised(optimizer, weights) on every rank, wherever workers were "
    "just given the same weights",
)
WEIGHTS_AND_SHARDS = Fact(
    record=f"Update.weights {WITH_VALUES}, and Shards, of each rank", call=_WHOLE
)


def only_in_traces(record: str) -> Fact:
    """Return a fact that only traces can have, not observed scripts."""
    return Fact(record=record, call=f"record {record}")


def of_state(holder: str, part: str) -> Fact:
    """Return the fact that an event of the type `holder` has `part`.

    `holder` is Start, Update or Saved, and `part` is `weights`, `optimizer` or `buffers`.
    """
    return Fact(record=f"{holder}.{part}", call=_STATES)


def of_update(part: str) -> Fact:
    """Return the fact that the updates of both runs have `part`."""
    return Fact(record=f"Update.{part} in both", call=_STATES)


def values_of(fields: str) -> Fact:
    """Return the fact that `fields` (`Update.gradient in both runs`) were recorded with values."""
    return Fact(record=f"{fields} {WITH_VALUES}", call=_WHOLE)
