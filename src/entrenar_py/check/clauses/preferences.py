"""F-FT-017 to F-FT-019: pairs of a better and a worse answer, in preference optimisation.

Source: finetune-v1, equation preference.
"""

from __future__ import annotations

from collections.abc import Mapping

from entrenar_py.check import evidence
from entrenar_py.check.clauses import fine_tuning, tuned_samples
from entrenar_py.check.clauses.check import Check, judge_each
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Encoded, Explained, Referred, Shard, Taught, Trace
from entrenar_py.shared.verdict import Tally

SIDES = ("chosen", "rejected")
_ADVICE = "a fine-tuning with the options task: preference, facts: [samples] records it"


def plan_pairs(invariant: Invariant) -> list[Scenario]:
    """Plan pairs that each step sees again, of chats and of texts."""
    return [_planned("samples"), _planned("samples", beta=0.5, label_smoothing=0.1)]


def plan_steps(invariant: Invariant) -> list[Scenario]:
    """Plan two families, with and without label smoothing."""
    return [
        _planned("samples", "gradients"),
        _planned("samples", "gradients", family="llama", beta=0.5, label_smoothing=0.1),
    ]


def _planned(*facts: str, **options: object) -> Scenario:
    given = {"task": "preference", **options, "facts": [*facts]}
    return fine_tuning.planned(num_samples=6, options=given)


# --- the reference --------------------------------------------------------------------------------


def compare_references(tally: Tally, trace: Trace) -> None:
    """Check that the reference model gives each pair the same bits whenever it is used."""
    first: dict[int, Referred] = {}
    again = False
    for event in trace.of(Referred):
        before = first.setdefault(event.sample, event)
        if before is event:
            continue
        again = True
        for side in SIDES:
            value, got = getattr(before, side), getattr(event, side)
            tally.equal(
                value,
                got,
                f"the reference's log-probability of the {side} side of pair {event.sample} is "
                f"{got!r} at use {event.use}, but was {value!r} before",
                sample_ids=(event.sample,),
                scenario=trace.scenario,
            )
    if first and not again:
        tally.miss("no pair was used twice, so no reference can be compared")


# --- tokens ---------------------------------------------------------------------------------------


def compare_sides(tally: Tally, trace: Trace) -> None:
    """Compare both sides' tokens with stock libraries', and what the loss depends on.

    Both sides begin with the same prompt, and none of its tokens is predicted. A pair counts once.
    """
    rows = {(event.sample, event.side): event for event in trace.of(Encoded) if event.side}
    for event in rows.values():
        tuned_samples.as_stock(tally, trace, event)
    for sample in sorted({sample for sample, _ in rows}):
        _same_prompt(tally, trace, rows, sample)
    lessons = [event for event in trace.of(Taught) if event.side]
    for lesson in lessons:
        row = rows.get((lesson.sample, lesson.side))
        if row is not None:
            tuned_samples.learned(tally, trace, row, lesson)
    if not rows:
        return
    seen = {lesson.sample for lesson in lessons}
    for shard in trace.of(Shard):
        if unseen := [sample for sample in shard.ids if sample not in seen]:
            tally.miss(f"what the loss of pairs {unseen[:8]} depended on was not recorded")
        message = f"shard {shard.shard} counts {shard.weight:g}, and has {len(shard.ids)} pairs"
        place = evidence.place(trace, shard)
        due = float(len(shard.ids))
        tally.equal(due, shard.weight, message, sample_ids=shard.ids, **place)


def _same_prompt(
    tally: Tally, trace: Trace, rows: Mapping[tuple[int, str], Encoded], sample: int
) -> None:
    place = {"sample_ids": (sample,), "scenario": trace.scenario}
    both = [rows.get((sample, side)) for side in SIDES]
    if not tally.check(None not in both, f"pair {sample} lacks a side", **place):
        return
    prompts = [
        row.tokens[: min(row.predicted, default=len(row.tokens))] for row in both if row is not None
    ]
    message = f"the sides of pair {sample} begin with different tokens before their completions"
    tally.equal(prompts[0], prompts[1], message, **place)


# --- steps ----------------------------------------------------------------------------------------


def compare_steps(tally: Tally, trace: Trace) -> None:
    """Judge that each step's loss and gradients are within their rounding bounds."""
    if not trace.of(Referred):
        return  # a step of another kind of training
    for explained in trace.of(Explained):
        if explained.of == fine_tuning.STEP:
            closeness.judge_explained(tally, explained, trace)


ROWS = (
    Check(
        name="preference_reference",
        id="F-FT-017",
        decides="the reference of preference optimisation keeps its bits over the run",
        spoken_of="dpo reference-model",
        judge=judge_each(compare_references, f"no event Referred was recorded: {_ADVICE}"),
        plan=plan_pairs,
    ),
    Check(
        name="pair_tokens",
        id="F-FT-018",
        decides="both sides of a pair have the same prompt, and only completions count",
        spoken_of="dpo chosen rejected",
        judge=judge_each(
            compare_sides, f"no event Encoded for a side of a pair was recorded: {_ADVICE}"
        ),
        plan=plan_pairs,
    ),
    Check(
        name="preference_steps",
        id="F-FT-019",
        decides="losses of pairs and their gradients equal a float64 textbook's",
        spoken_of="dpo preference-loss margin",
        judge=judge_each(
            compare_steps,
            "no step with pairs was compared with float64: a fine-tuning with the options task: "
            "preference, facts: [samples, gradients] records it",
        ),
        plan=plan_steps,
        tolerance_kinds=("ulp",),
    ),
)
