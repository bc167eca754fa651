"""F-FT-009 and F-FT-010: a fine-tuning's steps beside two independent oracles.

One is a textbook in float64, at the recorded weights. The other is a run of `transformers.Trainer`
with `peft` on the same batches. Source: finetune-v1, equations loss, followed.
"""

from __future__ import annotations

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes import update_rule
from entrenar_py.check.causes.rounding_bounds import (
    ADAM_GRADIENT_BOUND,
    GRADIENT_BOUND,
    LEARNED_AWAY,
    LOSS_BOUND,
)
from entrenar_py.check.clauses import probes
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.clauses.tuned_weights import STEP, planned
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, missing
from entrenar_py.check.evidence.needs import PEER, Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Explained, Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally

# Covers the second order: the loss is not linear in the weights' distance.
SECOND_ORDER = 2.0


def plan_gradients(invariant: Invariant) -> list[Scenario]:
    """Plan adapters of two families, a classifier, and all weights."""
    asked: list[dict[str, object]] = [
        {"task": "instruct"},
        {"task": "classify", "class_weights": "sqrt_inverse"},
        {"task": "text", "method": "full", "family": "llama"},
        {"task": "text", "family": "gpt2"},
    ]
    return [planned(options={**one, "facts": ["gradients"]}) for one in asked]


def plan_peer(invariant: Invariant) -> list[Scenario]:
    """Plan warm-up, decay and clipping for some steps, with adapters and with all weights."""
    asked: list[dict[str, object]] = [
        {"task": "instruct"},
        {"task": "classify", "class_weights": "inverse"},
        {"task": "text", "method": "full", "family": "llama"},
    ]
    changes: dict[str, object] = {
        "num_steps": 6,
        "weight_decay": 0.1,
        "clip_norm": 0.5,
        "schedule": "linear",
        "warmup_steps": 2,
    }
    return [planned(options=one, **changes) for one in asked]


def compare_gradients(tally: Tally, trace: Trace) -> None:
    """Judge each step's loss and gradients within what rounding explains."""
    for explained in trace.of(Explained):
        if explained.of == STEP:
            closeness.judge_explained(tally, explained, trace)


# --- the peer -------------------------------------------------------------------------------------


def judge_peer(invariant: Invariant, runs: Traces) -> Finding:
    """Compare each run with the peer's: losses, gradients, and how the weights follow from them."""
    tally = Tally(invariant.id)
    runs = evidence.usable_runs(runs, tally)
    for trace in () if runs.base is None else (runs.base,):
        for peer in runs.of(PEER):
            _compare(tally, peer, trace)
    nothing = "no run of the same fine-tuning by transformers.Trainer to compare with"
    return tally.finding(nothing=missing.probed(invariant, nothing))


def _compare(tally: Tally, peer: Trace, trace: Trace) -> None:
    ours, theirs = evidence.updates(trace), evidence.updates(peer)
    first, other = next(iter(trace.of(Start)), None), next(iter(peer.of(Start)), None)
    if first is None or other is None or not ours:
        tally.miss("a run recorded no start, or no step")
        return
    apart = [n for n, one in other.weights.items() if first.weights.get(n) != one]
    if apart:
        tally.miss(f"the runs begin with other weights, in {apart[0]}: they can't be compared")
        return
    tally.equal(sorted(theirs), sorted(ours), "other steps were made", scenario=trace.scenario)
    before = first.weights, other.weights
    for step, by_rank in evidence.ranks_by_step(trace):
        if step not in theirs:
            continue
        update, model = evidence.any_rank(by_rank), evidence.any_rank(theirs[step])
        _losses(tally, trace, update, model, before)
        _gradients(tally, trace, update, model)
        before = update.weights, model.weights
    for run in (trace, peer):
        _follows(tally, run)


def _losses(
    tally: Tally, trace: Trace, update: Update, model: Update, before: tuple[Tensors, Tensors]
) -> None:
    """Check that two losses are no further apart than rounding and the weights' distance explain.

    |L(w) - L(v)| is |g| . |w - v| to first order, with the recorded gradient g at w.
    """
    if update.loss is None or model.loss is None:
        tally.miss(f"the loss of step {update.step} is known in one run only")
        return
    reach = _reach(update, *before)
    if reach is None:
        tally.miss(f"the values of weights and gradients of step {update.step} were not recorded")
        return
    allowed = 2 * LOSS_BOUND * abs(model.loss) + SECOND_ORDER * reach
    message = f"the loss is not the peer's: rounding and other weights explain {allowed:.3g}"
    tally.close(model.loss, update.loss, allowed, message, **evidence.place(trace, update))


def _reach(update: Update, own: Tensors, other: Tensors) -> float | None:
    """Return the sum over all weights of |gradient| |distance|, or None without values."""
    total = 0.0
    for name, record in update.gradient.items():
        slope = record.values()
        left, right = own[name].values(), other[name].values()
        if slope is None or left is None or right is None:
            return None
        apart = left.astype(np.float64) - right.astype(np.float64)
        total += float(np.abs(slope * apart).sum())
    return total


def _gradients(tally: Tally, trace: Trace, update: Update, model: Update) -> None:
    """Compare gradients: at equal weights within rounding, later as far as Adam moves weights."""
    bound = ADAM_GRADIENT_BOUND if update.step else GRADIENT_BOUND
    floor = LEARNED_AWAY * (closeness.norm_l2(model.gradient) or 0.0)
    message, place = "the gradient is not the peer's", evidence.place(trace, update)
    if not closeness.compare_close(
        tally, model.gradient, update.gradient, bound, message, floor, **place
    ):
        tally.miss(f"the values of the gradient of step {update.step} were not recorded")


def _follows(tally: Tally, trace: Trace) -> None:
    """Check that each step of the lowest rank follows from its own gradient, within rounding.

    So weights are apart by what gradients are apart, and by nothing else.
    """
    rules: dict[int, update_rule.Rule] = {}
    who = min((start.rank for start in trace.of(Start)), default=0)
    for event in trace.standing.events:
        if not isinstance(event, Update):
            update_rule.prepare(rules, event, trace)
            continue
        if event.rank != who or who not in rules:
            continue
        rounding = update_rule.rounding(trace, event)
        for name, expected in rules[who].step(event):
            got = event.weights[name].values()
            if got is None:
                continue
            gap = np.abs(got - expected.weight)
            allowed = update_rule.allowed(rounding, expected)
            worst = int((gap - allowed).argmax())
            tally.check(
                bool((gap <= allowed).all()),
                f"{name} does not follow from the gradient, the rate and the clipped norm: it is "
                f"off by {gap.flat[worst]:.3g}, rounding explains {allowed.flat[worst]:.3g}",
                tensor=name,
                element=worst,
                **evidence.place(trace, event),
            )


_NOTHING = "no step was compared with float64: a fine-tuning with option facts: [gradients] does"

ROWS = (
    Check(
        name="textbook_steps",
        id="F-FT-009",
        decides="losses and gradients are a textbook's in float64, within derived rounding",
        spoken_of="oracle finetune-gradient",
        judge=probes.judge(compare_gradients, _NOTHING),
        plan=plan_gradients,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="peer_steps",
        id="F-FT-010",
        decides="losses and weights follow transformers.Trainer with peft on the same batches",
        spoken_of="trainer huggingface",
        judge=judge_peer,
        plan=plan_peer,
        needs=(PEER,),
        tolerance_kinds=("relative",),
    ),
)
