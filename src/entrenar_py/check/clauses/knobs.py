"""The knobs of a user's own trainer, and how runs with different values of a knob are compared.

Turning a knob reveals bugs that the run on one worker has, too, so that a comparison with that run
can't show them. All knobs but one must change nothing. That one, the clipping norm, may change the
size of the gradient, but not its direction. Each knob is a row of KNOBS.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from entrenar_py.check import evidence
from entrenar_py.check.causes import presuppositions, rounding_bounds, run_comparison
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.evidence import closeness, facts, missing
from entrenar_py.check.evidence.needs import Need, Traces, turned
from entrenar_py.check.evidence.run_names import Pair, pair_of
from entrenar_py.shared.trace import Shard, Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally

UNCLIPPED = "1e9"  # larger than the norm of any gradient
# The smallest gradient norm of the usual run is divided by this to give the clipping norm.
_CLIPPED_SHARE = 16
_CLIPPED_USUAL = 1e-3  # the clipping norm if the gradients' norms are unknown
# torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6; other functions don't.
CLIP_EPSILON = 1e-6


def compare(tally: Tally, runs: Traces) -> list[int]:
    """Compare every run with a turned knob with the base, in which no knob is turned.

    Return the number of compared gradients for each run in which the knob took effect.
    """
    counts = []
    for name, trace in runs.turned():
        pair = pair_of(trace.scenario)
        assert pair is not None, "its scenario says so"
        if runs.base is None:
            tally.miss(f"{pair.words.before}no run with {pair.knob}={pair.usual} to compare with")
            continue
        tally.note(f"compared {pair.knob}={pair.value} with {pair.knob}={pair.usual}")
        compared = Compared(runs=runs, model=runs.base, trace=trace)
        left = presuppositions.comparable(tally, presuppositions.WITH_A_KNOB, compared)
        if left is None:
            continue
        count = KNOBS[name].judge(tally, pair, left)
        if count is not None:
            counts.append(count)
    return counts


# Returns whether the knob took effect, since two equal runs would prove nothing.
Effect = Callable[[Tally, Pair, Trace, Trace], bool]


def _changes_nothing(took_effect: Effect) -> Callable[[Tally, Pair, Compared], int | None]:
    """Return the judge of a knob that must change nothing.

    Runs are judged only if `took_effect` returns True.
    """

    def judge(tally: Tally, pair: Pair, compared: Compared) -> int | None:
        model, trace = compared.model, compared.trace
        masked = trace.scenario.dropout and not same_masks(model, trace)
        if masked and compared.explanation is None:
            why = "dropout draws different masks: run the script without dropout"
            tally.miss(f"{pair.words.before}{why}")
            return None
        if not took_effect(tally, pair, model, trace):
            return None
        return run_comparison.compare(
            tally, model, trace, None, pair.words, sensitivity=compared.sensitivity
        )

    return judge


def _scaled_loss(tally: Tally, pair: Pair, model: Trace, trace: Trace) -> bool:
    if _local(model) != _local(trace) or not _local(trace):
        return True
    tally.miss(
        f"{pair.words.before}gradients before unscaling are the same: the loss was not scaled"
    )
    return False


def _permuted(tally: Tally, pair: Pair, model: Trace, trace: Trace) -> bool:
    if _is_normalised_apart(tally, pair, trace):
        return False
    if _orders(model) != _orders(trace):
        return True
    tally.miss(f"{pair.words.before}the samples come in the same order: nothing was permuted")
    return False


def _is_normalised_apart(tally: Tally, pair: Pair, trace: Trace) -> bool:
    if trace.traits.batch_norm:
        why = "batch normalisation uses each micro-batch's own samples, so results rightly differ"
        tally.miss(f"{pair.words.before}{why}")
    return trace.traits.batch_norm


def _accumulated(tally: Tally, pair: Pair, model: Trace, trace: Trace) -> bool:
    """Return whether step 0 has the samples of `model`, in a different number of micro-batches."""
    if _is_normalised_apart(tally, pair, trace):
        return False
    before, after = _micro_batches(model), _micro_batches(trace)
    due, drawn = _first_samples(model), _first_samples(trace)
    each = not drawn - due and drawn.total() * int(pair.value) == due.total() * int(pair.usual)
    if before and before == after and each and drawn != due:
        num_due, num_made = (1 + max(evidence.updates(run)) for run in (model, trace))
        tally.check(
            False,
            f"{pair.words.before}the optimizer steps after every micro-batch",
            step=0,
            expected=f"{num_due} steps of {due.total()} samples",
            got=f"{num_made} steps of {drawn.total()} samples",
            scenario=trace.scenario,
        )
        return False
    if due and drawn and due.total() != drawn.total():
        tally.miss(
            f"{pair.words.before}step 0 has {drawn.total()} samples, and {due.total()} with "
            f"{pair.knob}={pair.usual}: keep the global batch, with micro-batches of GLOBAL // "
            "({world_size} * {accumulation})"
        )
        return False
    if before and before == after:
        tally.miss(f"{pair.words.before}steps have as many micro-batches as {pair.words.run}")
        return False
    return True


def _clipped(tally: Tally, pair: Pair, compared: Compared) -> int:
    """Check that no gradient is longer than the clipping norm.

    In step 0 both runs have the same weights. So the gradient of step 0 must be the unclipped one,
    scaled to the clipping norm.
    """
    limit, model, trace = float(pair.value), compared.model, compared.trace
    bounds = rounding_bounds.Bounds.of({}, model, trace)
    expected = evidence.updates(model).get(0)
    first_update = evidence.any_rank(expected) if expected else None
    whole = closeness.norm_l2(first_update.gradient) if first_update is not None else None
    if first_update is None or whole is None:
        missing.ask(tally, "clipping was not judged", facts.values_of("Update.gradient"))
        return 0
    if whole <= limit:
        tally.miss(
            f"{pair.words.before}the gradient of step 0 has norm {whole:.3g}, "
            "which needs no clipping"
        )
        return 0
    if _first_samples(model) != _first_samples(trace):
        what = f"step 0 {missing.other_samples(model, trace)} than {pair.words.its}"
        tally.miss(f"{pair.words.before}{what}{pair.words.elsewhere}")
        return 0
    unseen = evidence.unseen_gradients(model)
    if unseen:
        tally.miss(f"{pair.words.before}{unseen}")
    rounding = closeness.norm_rounding(first_update.gradient)
    bound = compared.sensitivity.allowed("gradient", 0, bounds.gradient)
    bound += CLIP_EPSILON / whole
    num_gradients = 0
    updates = (update for _, ranks in evidence.ranks_by_step(trace) for update in ranks.values())
    for update in updates:
        place = evidence.place(trace, update)
        applied = _applied(update)
        norm = closeness.norm_l2(applied)
        if norm is None:
            continue
        num_gradients += 1
        message = f"{pair.words.before}the norm of the applied gradient is larger than the limit"
        shown = {"expected": repr(limit), "got": repr(norm)}
        tally.check(norm <= limit * (1 + bounds.gradient + rounding), message, **shown, **place)
        if update.step == 0 and not unseen:
            what = f"the gradient of {pair.knob}={pair.usual} clipped to this norm"
            message = f"{pair.words.before}the gradient is not {what}"
            # The norm that the script computed may be off by rounding. The direction is not.
            length = min(max(norm, limit * (1 - rounding)), limit * (1 + rounding))
            clipped = evidence.times(first_update.gradient, length / whole)
            closeness.compare_close(tally, clipped, applied, bound, message, **place)
    return num_gradients


def _applied(update: Update) -> Tensors:
    # A script may report the gradient before clipping (`obs.reduced()`). Then the norm after
    # clipping is also known.
    before, after = update.grad_norm, update.applied_norm
    if not before or after is None or not math.isfinite(before + after):
        return update.gradient
    return evidence.times(update.gradient, after / before)


def _micro_batches(trace: Trace) -> int:
    first = evidence.shards(trace).get(0, [])
    return max(Counter(shard.rank for shard in first).values(), default=0)


def _first_samples(trace: Trace) -> Counter[int]:
    return Counter(i for shard in evidence.shards(trace).get(0, []) for i in shard.ids)


def _orders(trace: Trace) -> list[tuple[int, ...]]:
    return [shard.ids for shard in trace.of(Shard)]


def _local(trace: Trace) -> dict[str, str]:
    first = trace.of(Shard)[:1]
    return {name: record.digest for shard in first for name, record in shard.gradient.items()}


def same_masks(model: Trace, trace: Trace) -> bool:
    """Return whether dropout, if any, uses the same masks in `trace` as in `model`.

    The single device draws masks by logical shard. A trainer that also draws by shard has the same
    masks, unless its trait `masks` is `shard_apart`. For other trainers the draws of the first
    shards are compared, if they were recorded. Micro-batches count as different masks, since they
    draw in a different order. So does batch normalisation by each rank's own samples, since one
    worker normalises differently. Neither matters if both runs are on one worker, which has the
    same micro-batches in both.
    """
    divided = {(run.scenario.world_size, run.scenario.accumulation) for run in (model, trace)}
    is_alike = len(divided) == 1 and trace.scenario.world_size == 1
    if trace.traits.batch_norm and not is_alike:
        return False
    if not trace.scenario.dropout:
        return True
    if trace.scenario.accumulation > 1 and not is_alike:
        return False
    mine, theirs = ({s.draws for s in run.of(Shard)[:1]} for run in (trace, model))
    known = trace.scenario.workload != "own" or None not in mine
    by_shard = trace.draws_by_shard and trace.traits.masks != "shard_apart"
    return by_shard or (mine == theirs and known)


# --- the table ------------------------------------------------------------------------------------


def _limit(usual: Trace) -> str:
    norms = [closeness.norm_l2(update.gradient) for update in usual.of(Update)]
    known = [norm for norm in norms if norm and math.isfinite(norm)]
    return f"{min(known) / _CLIPPED_SHARE if known else _CLIPPED_USUAL:.2g}"


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One setting of a script that can be changed without changing the results of training.

    The command has a placeholder with the knob's name; `says` describes what the script does with
    the value. The value is `usual` except in the knob's own runs. These have each of the values
    `others` in turn, or the value that `limit` returns for the usual run. Knobs in `companions` are
    also turned if the command has them.

    `judge` compares the usual run with a run in which the knob is turned. It returns the number of
    gradients that it compared, or None if the knob took no effect. `expected` is the result that
    docs/your-trainer.md promises, and `turned_to` describes the value that `limit` returns, for the
    same page.
    """

    says: str
    usual: str
    expected: str
    judge: Callable[[Tally, Pair, Compared], int | None]
    others: tuple[str, ...] = ()
    limit: Callable[[Trace], str] | None = None
    turned_to: str = ""
    companions: tuple[str, ...] = ()

    def turns(self, usual: Trace | None) -> tuple[str, ...]:
        """Return the values that the knob is turned to.

        `usual`, the usual run, must not be None if the knob has a `limit`.
        """
        if self.limit is None:
            return self.others
        assert usual is not None, "it was run first"
        return (self.limit(usual),)


KNOBS: Mapping[str, Knob] = {
    "accumulation": Knob(
        says="micro-batches per step, with the same global batch: 1, 2, 4",
        usual="1",
        others=("2", "4"),
        expected="micro-batches of `GLOBAL // (world_size * accumulation)` samples: same losses, "
        "gradients, weights, learning rates and number of steps",
        judge=_changes_nothing(_accumulated),
    ),
    "clip": Knob(
        says=f"the largest L2 norm of a gradient: {UNCLIPPED}, and a limit that is always exceeded",
        usual=UNCLIPPED,
        limit=_limit,
        turned_to=f"1/{_CLIPPED_SHARE} of the smallest gradient seen",
        expected="no gradient's norm exceeds this, and the first is the unclipped one scaled to "
        f"it; at {UNCLIPPED} nothing is clipped, and in every step the local gradients are divided "
        "by the same number",
        # Clipping each micro-batch, or clipping a gradient that is still scaled, is a bug that
        # shows only with several micro-batches, or with a scaled loss.
        companions=("accumulation", "loss_scale"),
        judge=_clipped,
    ),
    "loss_scale": Knob(
        says="factor of the loss before the backward pass: 1, 1024",
        usual="1",
        others=("1024",),
        expected="the script multiplies the loss and divides the gradients: same results",
        judge=_changes_nothing(_scaled_loss),
    ),
    "permute": Knob(
        says="1: the samples of each global batch come in a different order; 0: they don't",
        usual="0",
        others=("1",),
        expected="the samples of each global batch come in a different order "
        "(`batch.flip(0)` is enough): same results",
        judge=_changes_nothing(_permuted),
    ),
    "strategy": Knob(
        says="off: train the model without its parallel strategy; on: with it",
        usual="on",
        others=("off",),
        expected="trained without the parallel strategy (for example by hand, or without "
        "sharding): same results",
        judge=_changes_nothing(lambda *_: True),
    ),
}
TURNED: tuple[Need, ...] = tuple(map(turned, KNOBS))
