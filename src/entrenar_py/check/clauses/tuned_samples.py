"""F-FT-006 to F-FT-008: which tokens a fine-tuning run learns, with which weights, and how often.

Source: finetune-v1, equations completion, class_weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.clauses.check import Check, judge_each
from entrenar_py.check.clauses.fine_tuning import planned
from entrenar_py.check.contract import Invariant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Encoded, Shard, Taught, Trace, Weighed
from entrenar_py.shared.verdict import Tally

NO_CLASS = -1
# A class's weight is rounded once to float32. The rounding of their sum in float64 is negligible.
WEIGHT_ROUNDING = 2.0**-23
_POWERS = {"none": 0.0, "inverse": -1.0, "sqrt_inverse": -0.5}  # exponent of a class's fraction
_ADVICE = "a fine-tuning with the option facts: [samples] records it"


def plan_tokens(invariant: Invariant) -> list[Scenario]:
    """Plan each task: chats of one and two turns, with and without marks; texts; and classes."""
    several: list[dict[str, Any]] = [
        {"task": "instruct"},
        {"task": "instruct", "marks": True},
        {"task": "text"},
        {"task": "classify"},
    ]
    return [planned(options={**options, "facts": ["samples"]}) for options in several]


def plan_classes(invariant: Invariant) -> list[Scenario]:
    """Plan each type of class weight."""
    options = {"task": "classify", "facts": ["samples"]}
    return [planned(options={**options, "class_weights": kind}) for kind in _POWERS]


def plan_copies(invariant: Invariant) -> list[Scenario]:
    """Plan two and a half epochs of rows in which the rarer class is repeated."""
    options = {"task": "classify", "oversample": True, "facts": ["samples"]}
    return [planned(num_steps=5, options=options)]


# --- which tokens ---------------------------------------------------------------------------------


def compare_tokens(tally: Tally, trace: Trace) -> None:
    """Compare tokens, targets, and the states that the loss depends on, with the stock template."""
    samples = {event.sample: event for event in trace.of(Encoded) if not event.side}
    for event in samples.values():
        as_stock(tally, trace, event)
    if not samples:
        return
    taught = trace.of(Taught)
    for lesson in taught:
        if lesson.sample in samples:
            learned(tally, trace, samples[lesson.sample], lesson)
    seen = {lesson.sample for lesson in taught}
    drawn = {i for shard in trace.of(Shard) for i in shard.ids}
    if unseen := drawn - seen:
        tally.miss(f"what the loss of samples {sorted(unseen)[:8]} depended on was not recorded")
    if all(event.label == NO_CLASS for event in samples.values()):
        for shard in trace.of(Shard):
            due = sum(len(samples[i].completion) for i in shard.ids if i in samples)
            message = f"shard {shard.shard} counts {shard.weight:g} tokens, but predicts {due}"
            place = evidence.place(trace, shard)
            tally.equal(float(due), shard.weight, message, sample_ids=shard.ids, **place)


def as_stock(tally: Tally, trace: Trace, event: Encoded) -> None:
    """Check that a sample's tokens are stock transformers', and its targets the completion's."""
    place = {"sample_ids": (event.sample,), "scenario": trace.scenario}
    apart = _first_apart(event.tokens, event.stock_tokens)
    tally.check(
        apart is None,
        f"{_name(event)} has different tokens than transformers makes of row "
        f"{event.row}, from position {apart} on",
        expected=str(event.stock_tokens[apart or 0 :][:6]),
        got=str(event.tokens[apart or 0 :][:6]),
        **place,
    )
    if apart is None:
        message = f"{_name(event)} predicts tokens that are not the completion's"
        tally.equal(event.completion, event.predicted, message, **place)


def _name(event: Encoded | Taught) -> str:
    return (
        f"the {event.side} side of pair {event.sample}" if event.side else f"sample {event.sample}"
    )


def _first_apart(tokens: Sequence[int], other: Sequence[int]) -> int | None:
    if tuple(tokens) == tuple(other):
        return None
    pairs = enumerate(zip(tokens, other, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(tokens), len(other)))


def learned(tally: Tally, trace: Trace, sample: Encoded, event: Taught) -> None:
    """Compare the states that a loss depends on with the states that predict the right tokens."""
    length = len(sample.tokens)
    due = {length - 1} if sample.label != NO_CLASS else {p - 1 for p in sample.completion}
    extra, lacking = sorted(set(event.positions) - due), sorted(due - set(event.positions))
    if extra:
        what = "beyond its last token" if extra[-1] >= length else "that predict no target token"
        message = f"the loss of {_name(event)} depends on states {extra[:6]}, {what}"
    else:
        message = f"the loss of {_name(event)} doesn't depend on states {lacking[:6]}"
    tally.check(
        not extra and not lacking,
        message,
        sample_ids=(event.sample,),
        expected=str(sorted(due)),
        got=str(sorted(event.positions)),
        scenario=trace.scenario,
    )


# --- which weights --------------------------------------------------------------------------------


def compare_class_weights(tally: Tally, trace: Trace) -> None:
    """Compare the classes' weights, and each shard's sum of them, with the documented formula."""
    label_of = {event.sample: event.label for event in trace.of(Encoded)}
    for event in trace.of(Weighed):
        counts = Counter(label for label in label_of.values() if label != NO_CLASS)
        if event.asked not in _POWERS or not counts:
            tally.miss(f"weights={event.asked} of {len(counts)} classes: their counts are unknown")
            continue
        due = _weights(counts, event.asked)
        for label, weight in due.items():
            got = event.weights[label] if label < len(event.weights) else 0.0
            message = f"class {label} counts {got:.6g} in the loss, {event.asked} is {weight:.6g}"
            place = {"element": label, "scenario": trace.scenario}
            tally.close(weight, got, WEIGHT_ROUNDING * weight, message, **place)
        for shard in trace.of(Shard):
            if set(shard.ids) <= label_of.keys():
                total = sum(due[label_of[i]] for i in shard.ids)
                message = f"the samples of shard {shard.shard} count {shard.weight:.6g} together"
                allowed = WEIGHT_ROUNDING * total
                place = evidence.place(trace, shard)
                tally.close(total, shard.weight, allowed, message, **place)


def _weights(counts: Mapping[int, int], kind: str) -> dict[int, float]:
    """Return each class's fraction to the power of `kind`, scaled to mean 1 over the samples."""
    number = sum(counts.values())
    raw = {label: (count / number) ** _POWERS[kind] for label, count in counts.items()}
    mean = sum(raw[label] * count for label, count in counts.items()) / number
    return {label: weight / mean for label, weight in raw.items()}


# --- how often ------------------------------------------------------------------------------------


def compare_copies(tally: Tally, trace: Trace) -> None:
    """Check that copies make all classes equally frequent, and each copy is drawn as a sample."""
    samples = trace.of(Encoded)
    labelled = [event for event in samples if event.label != NO_CLASS]
    if len({event.row for event in labelled}) == len(labelled):
        return  # nothing was repeated
    place = {"scenario": trace.scenario}
    numbers = [event.sample for event in samples]
    message = "samples (including copies) are not numbered from 0 without gaps"
    tally.equal(list(range(trace.scenario.num_samples)), sorted(numbers), message, **place)
    counts = Counter(event.label for event in labelled)
    message = f"classes have {dict(sorted(counts.items()))} samples once rarer ones are repeated"
    tally.check(len(set(counts.values())) == 1, message, **place)
    rows = {event.row for event in labelled}
    message = f"rows {sorted(set(range(max(rows) + 1)) - rows)[:8]} are in no sample"
    tally.equal(max(rows) + 1, len(rows), message, **place)
    _each_once(tally, trace)


def _each_once(tally: Tally, trace: Trace) -> None:
    """Check that each sample is drawn once in each epoch that was completed."""
    drawn: dict[int, Counter[int]] = {}
    last = 0
    for _, shards in sorted(evidence.shards(trace).items()):
        for shard in shards:
            seen = drawn.setdefault(shard.epoch, Counter())
            seen.update(shard.ids)
            twice = tuple(i for i in shard.ids if seen[i] > 1)
            message = f"samples {twice[:8]} are drawn again in epoch {shard.epoch}"
            place = evidence.place(trace, shard)
            tally.check(not twice, message, sample_ids=twice, **place)
            last = max(last, shard.epoch)
    for epoch, seen in drawn.items():
        absent = sorted(set(range(trace.scenario.num_samples)) - seen.keys())
        if epoch < last:
            message = f"epoch {epoch} ended without samples {absent[:8]}"
            place = {"sample_ids": tuple(absent), "scenario": trace.scenario}
            tally.check(not absent, message, **place)


ROWS = (
    Check(
        name="completion_tokens",
        id="F-FT-006",
        decides="the loss counts the completion's tokens, each predicted from those before it",
        spoken_of="loss-mask prompt label-shift padding chat-template",
        judge=judge_each(compare_tokens, f"no event Encoded was recorded: {_ADVICE}"),
        plan=plan_tokens,
    ),
    Check(
        name="class_weights",
        id="F-FT-007",
        decides="class weights in the loss follow the written formula",
        spoken_of="class-weight imbalance",
        judge=judge_each(compare_class_weights, f"no event Weighed was recorded: {_ADVICE}"),
        plan=plan_classes,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="oversampled",
        id="F-FT-008",
        decides="copies of rarer rows are separate samples, each drawn once an epoch",
        spoken_of="oversampling minority",
        judge=judge_each(compare_copies, f"no repeated row was recorded: {_ADVICE}"),
        plan=plan_copies,
    ),
)
