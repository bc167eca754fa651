"""F-KD-008 to F-KD-011: shards have a teacher's rows, each once; a student refuses others.

One function computes the loss of a row. tests/train/distill/test_soft_targets.py tests that its
value and gradient are the textbook's. Source: distillation-v1, equations kept, distilled.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.clauses import fine_tuning
from entrenar_py.check.clauses.check import Check, judge_each
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import (
    Encoded,
    Explained,
    Shard,
    Sharded,
    Taught,
    TeacherRow,
    Trace,
    TurnedAway,
)
from entrenar_py.shared.verdict import Tally

# The float32 error of a small model's log-probability, compared with float64. The measured error
# was 1e-6.
ROUNDING = 1e-5
# Defect of shards -> the kind of the error that refuses them.
REFUSALS = {
    "shards of another tokenizer": "tokenizer",
    "half of a shard": "size",
    "a shard with a bit turned": "digest",
    "a shard that is missing": "missing",
    "a shard in another's place": "facts",
    "rows of other samples": "samples",
}
_ADVICE = "a run of the system distilled records it"


def planned(**options: object) -> Scenario:
    """Return the scenario of a short distillation, with `options` of its system."""
    return fine_tuning.planned(options=options).with_(system="distilled")


def plan_rows(invariant: Invariant) -> list[Scenario]:
    """Plan chats and texts, packed and not, with one, some and all tokens kept in a row."""
    facts = ["samples", "gradients"]
    return [
        planned(task="instruct", facts=facts),
        planned(task="text", family="llama", top_k=1, share=1.0, facts=facts),
        planned(task="text", top_k="all", temperature=4.0, packing=True, facts=facts),
    ]


def plan_cover(invariant: Invariant) -> list[Scenario]:
    """Plan chats with one turn and with two."""
    return [planned(task="instruct", facts=["samples"])]


def plan_refusals(invariant: Invariant) -> list[Scenario]:
    """Plan runs in which a student is given shards that don't fit it, and must refuse them."""
    return [planned(task="text", facts=["refusals"])]


def plan_shards(invariant: Invariant) -> list[Scenario]:
    """Plan a stage that is stopped and resumed."""
    return [planned(task="text")]


def compare_rows(tally: Tally, trace: Trace) -> None:
    """Compare each row with the teacher's own distribution, and each step with the textbook's."""
    rows = trace.of(TeacherRow)
    steps = [event for event in trace.of(Explained) if event.of == fine_tuning.STEP]
    if bool(rows) != bool(steps):
        lacking = "step computed in float64" if rows else "TeacherRow"
        tally.miss(f"no {lacking} was recorded: {_ADVICE}")
    for event in rows:
        stock = np.array(event.stock)
        tokens = np.array(event.tokens, np.int64)
        what = f"the row of sample {event.sample} at position {event.position}"
        place = {"tensor": "row", "sample_ids": (event.sample,), "scenario": trace.scenario}
        if not ((tokens >= 0) & (tokens < len(stock))).all():
            tally.check(False, f"{what} has tokens that the vocabulary lacks", **place)
            continue
        gap = float(np.abs(stock[tokens] - np.array(event.log_probabilities)).max())
        explained = f"rounding explains at most {ROUNDING:g}"
        message = f"{what} is off by {gap:.3g} from the teacher's, {explained}"
        tally.at_most(ROUNDING, gap, message, form=".3g", **place)
        others = np.delete(stock, tokens)
        least = float(np.array(event.log_probabilities).min())
        above = float(others.max(initial=-np.inf)) - least
        message = f"{what} lacks a token that is likelier than its own tokens by {above:.3g}"
        tally.check(above <= ROUNDING, message, **place)
        with np.errstate(divide="ignore"):
            due, found = np.log([np.exp(others).sum(), event.rest])
        gap = 0.0 if due == found else abs(float(due - found))
        message = f"the log of the remaining probability of {what} is off by {gap:.3g}, {explained}"
        tally.at_most(ROUNDING, gap, message, form=".3g", **place)
    for step in steps:
        closeness.judge_explained(tally, step, trace)


def compare_cover(tally: Tally, trace: Trace) -> None:
    """Check that each target has one row, and that the loss depends only on the states at rows."""
    samples = {event.sample: event for event in trace.of(Encoded)}
    rows = Counter((row.sample, row.position) for row in trace.of(TeacherRow))
    if not samples or not rows:
        return
    due = {(event.sample, place - 1) for event in samples.values() for place in event.completion}
    for sample, position in sorted(due | rows.keys()):
        wanted, count = int((sample, position) in due), rows[sample, position]
        message = (
            f"sample {sample} has {count} rows at position {position}, which predicts "
            f"{'a' if wanted else 'no'} token that is due"
        )
        place = {"tensor": "row", "sample_ids": (sample,), "scenario": trace.scenario}
        tally.equal(wanted, count, message, **place)
    drawn = {i for shard in trace.of(Shard) for i in shard.ids}
    taught = {event.sample: set(event.positions) for event in trace.of(Taught)}
    for sample in sorted(drawn):
        of_rows = {position for sample_id, position in rows if sample_id == sample}
        message = f"the loss of sample {sample} depends on more hidden states than its rows have"
        place = {"sample_ids": (sample,), "scenario": trace.scenario}
        tally.equal(sorted(of_rows), sorted(taught.get(sample, ())), message, **place)
    for shard in trace.of(Shard):
        weight = sum(len(samples[i].completion) for i in shard.ids if i in samples)
        message = f"shard {shard.shard} counts {shard.weight:g} rows, but has {weight}"
        place = evidence.place(trace, shard)
        tally.equal(float(weight), shard.weight, message, sample_ids=shard.ids, **place)


def compare_refusals(tally: Tally, trace: Trace) -> None:
    """Check that the student refused every defective shard, and named the defect."""
    events = {event.what: event for event in trace.of(TurnedAway)}
    if not events:
        return
    for what, kind in REFUSALS.items():
        event = events.get(what)
        if event is None:
            tally.miss(f"the student was not given {what}")
        elif event.refused is not None and event.error_kind is None:
            tally.miss(f"{what} was refused, but the error's kind was not recorded: {_ADVICE}")
        else:
            message = f"the student has learned from {what}"
            if event.refused is not None:
                message = f"{what} was refused, but not because of its {kind}: {event.refused}"
            tally.equal(kind, event.error_kind, message, tensor="shard", scenario=trace.scenario)


def compare_shards(tally: Tally, trace: Trace) -> None:
    """Check that shards are reported complete only if they are, and are the same after a stop."""
    stages = {event.when: event for event in trace.of(Sharded)}
    for event in stages.values():
        there = len(event.digests) == event.due
        message = (
            f"{event.when}: {len(event.digests)} shards of {event.due} exist, and the stage "
            f"says that it is {'complete' if event.complete else 'not'}"
        )
        tally.equal(there, event.complete, message, tensor="shard", scenario=trace.scenario)
    first, last = stages.get("made at once"), stages.get("resumed")
    if not stages:
        return
    if first is None or last is None:
        tally.miss("no stage was recorded both with and without a stop")
        return
    for number, (one, other) in enumerate(zip(first.digests, last.digests, strict=False)):
        message = f"shard {number} has different bytes after the stage was stopped and resumed"
        tally.equal(one, other, message, tensor="shard", scenario=trace.scenario)
    message = "a different number of shards exists after the stage was stopped and continued"
    tally.equal(
        len(first.digests), len(last.digests), message, tensor="shard", scenario=trace.scenario
    )


ROWS = (
    Check(
        name="teacher_rows",
        id="F-KD-008",
        decides="rows are the teacher's outputs at their positions, and steps equal a textbook's",
        spoken_of="distillation label-shift top-k",
        judge=judge_each(compare_rows, f"no event TeacherRow was recorded: {_ADVICE}"),
        plan=plan_rows,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="teacher_cover",
        id="F-KD-009",
        decides="each token to predict has one row, and the loss depends on rows only",
        spoken_of="distillation coverage",
        judge=judge_each(compare_cover, f"no event TeacherRow was recorded: {_ADVICE}"),
        plan=plan_cover,
    ),
    Check(
        name="shard_refusals",
        id="F-KD-010",
        decides="shards of a different tokenizer or other rows, damaged or missing, are refused",
        spoken_of="distillation tokenizer stale",
        judge=judge_each(compare_refusals, f"no event TurnedAway was recorded: {_ADVICE}"),
        plan=plan_refusals,
    ),
    Check(
        name="shards_resumed",
        id="F-KD-011",
        decides="a resumed stage writes the same shards, and reports correctly if all exist",
        spoken_of="distillation resume",
        judge=judge_each(compare_shards, f"no event Sharded was recorded: {_ADVICE}"),
        plan=plan_shards,
    ),
)
