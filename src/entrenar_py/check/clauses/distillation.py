"""F-KD-001 to F-KD-011: a distillation's loss, and the rows and shards of its teacher.

The loss is the textbook's, in value and in gradient.

The textbook is in float64, over the classes of a row: the tokens that are kept, and the rest. A
teacher's shards have its rows, each once, and a student takes no others.
Source: distillation-v1, equations divergence, kept, distilled.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check.clauses import fine_tuning
from entrenar_py.check.clauses.check import Check, judge_each, probe
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import evidence, rounding_bound
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import (
    Encoded,
    Explained,
    Shard,
    Sharded,
    Softened,
    Taught,
    TeacherRow,
    Trace,
    TurnedAway,
)
from entrenar_py.shared.verdict import Tally

# --- the loss of soft targets ---------------------------------------------------------------------

Array = NDArray[np.float64]

UNIT = 2.0**-24  # of float32, to nearest
# Roundings in a row's loss or in an element of its gradient, each of the largest size there is: a
# fifth of that was seen.
OPERATIONS = 8.0
DIFFERENCE = 1e-4  # of finite differences; their error is of the order of its square
TEMPERATURES = (1.0, 2.0, 4.0, 10.0)
HOT = 1000.0
_PAIRS = 2_500  # of a scenario; there are four
_NOTHING = "no Softened was recorded: the system soft_targets records them"


def planned_rows(**options: Any) -> Scenario:
    """Return a scenario of the probe."""
    return probe("soft_targets", options=options)


def plan_sign(invariant: Invariant) -> list[Scenario]:
    """Plan 10,000 pairs, at several temperatures, and pairs that are alike, and sure."""
    kinds = ((6, 1.0, 2.0), (1, 2.0, 4.0), (23, 4.0, 1.0), (24, 0.5, 3.0))
    drawn = [
        planned_rows(
            pairs=_PAIRS, alpha=1.0, top_k=top_k, temperatures=[temperature], spread=spread
        )
        for top_k, temperature, spread in kinds
    ]
    hot = [2.0, 4.0, 10.0]
    sure = planned_rows(alpha=1.0, alike=True, spread=8.0, temperatures=hot)
    alike = [planned_rows(alpha=1.0, top_k=top_k, alike=True) for top_k in (6, 24)]
    return [*drawn, *alike, sure]


def plan_entropy(invariant: Invariant) -> list[Scenario]:
    """Plan losses without the teacher's part."""
    return [planned_rows(alpha=0.0, top_k=top_k, temperatures=[3.0]) for top_k in (1, 6, 24)]


def plan_divergence(invariant: Invariant) -> list[Scenario]:
    """Plan losses of the teacher's part alone, at several temperatures."""
    return [planned_rows(alpha=1.0, top_k=top_k, temperatures=[*TEMPERATURES]) for top_k in (1, 6)]


def plan_hot(invariant: Invariant) -> list[Scenario]:
    """Plan a temperature at which both distributions are nearly uniform."""
    return [planned_rows(alpha=1.0, top_k=24, temperatures=[HOT], spread=1.0)]


def plan_gradients(invariant: Invariant) -> list[Scenario]:
    """Plan both parts, alone and together, and rows that are sure."""
    drawn = [
        planned_rows(pairs=20, alpha=alpha, top_k=top_k, temperatures=[temperature])
        for alpha in (0.0, 0.3, 1.0)
        for top_k, temperature in ((1, 2.0), (6, 1.0), (24, 4.0))
    ]
    return [*drawn, planned_rows(pairs=20, alpha=0.5, top_k=6, temperatures=[10.0], spread=40.0)]


def plan_temperatures(invariant: Invariant) -> list[Scenario]:
    """Plan the same pairs at temperatures from 1 to 10."""
    return [planned_rows(alpha=1.0, top_k=24, temperatures=[*TEMPERATURES], spread=0.2)]


def plan_whole(invariant: Invariant) -> list[Scenario]:
    """Plan rows that keep the whole vocabulary."""
    return [
        planned_rows(alpha=alpha, top_k=24, temperatures=[temperature])
        for alpha, temperature in ((1.0, 1.0), (1.0, 3.0), (0.5, 2.0))
    ]


# --- the textbook ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """The rows of an event, in float64: logits [n, vocabulary], and what is kept, [n, k]."""

    event: Softened
    student: Array
    teacher: Array
    tokens: NDArray[np.int64]
    kept: Array
    rest: Array
    losses: Array
    gradients: Array

    @classmethod
    def of(cls, event: Softened) -> Rows | None:
        """Return the rows; None if the event's numbers are not as many as it says."""
        size, top_k = event.vocabulary, event.top_k
        number = len(event.targets)
        lengths = [len(event.student), len(event.teacher), len(event.gradients)]
        if lengths != [number * size] * 3 or len(event.tokens) != number * top_k:
            return None
        if [len(event.losses), len(event.rest)] != [number] * 2:
            return None

        def table(values: Any, columns: int) -> Any:
            return np.array(values, np.float64).reshape(number, columns)

        return cls(
            event=event,
            student=table(event.student, size),
            teacher=table(event.teacher, size),
            tokens=np.array(event.tokens, np.int64).reshape(number, top_k),
            kept=table(event.log_probabilities, top_k),
            rest=np.array(event.rest, np.float64),
            losses=np.array(event.losses, np.float64),
            gradients=table(event.gradients, size),
        )

    def classes(self, logits: Array) -> Array:
        """Return log-probabilities by class, [n, k] or [n, k + 1], of logits [n, vocabulary]."""
        logs = log_softmax(logits)
        kept = np.take_along_axis(logs, self.tokens, 1)
        if self.event.top_k == self.event.vocabulary:
            return kept
        others = logs.copy()
        np.put_along_axis(others, self.tokens, -np.inf, 1)
        return np.concatenate([kept, log_sum(others)[:, None]], 1)

    def taught(self) -> Array:
        """Return the teacher's log-probabilities by class, as they are kept."""
        if self.event.top_k == self.event.vocabulary:
            return self.kept
        with np.errstate(divide="ignore"):
            return np.concatenate([self.kept, np.log(self.rest)[:, None]], 1)

    def divergence(self, logits: Array) -> Array:
        """Return T^2 KL(teacher_T || student_T) of each row."""
        temperature = self.event.temperature
        wanted = log_softmax(self.taught() / temperature)
        found = log_softmax(self.classes(logits) / temperature)
        shares = np.exp(wanted)
        with np.errstate(invalid="ignore"):
            terms = np.where(shares > 0, shares * (wanted - found), 0.0)
        return np.asarray(temperature**2 * terms.sum(1), np.float64)

    def entropy(self, logits: Array) -> Array:
        """Return -log p of each row's target."""
        targets = np.array(self.event.targets)[:, None]
        return np.asarray(-np.take_along_axis(log_softmax(logits), targets, 1)[:, 0], np.float64)

    def loss(self, logits: Array) -> Array:
        """Return the loss of each row."""
        alpha = self.event.alpha
        return alpha * self.divergence(logits) + (1 - alpha) * self.entropy(logits)

    def largest(self) -> Array:
        """Return the largest size of a row's log-probabilities, of teacher and student."""
        both = [np.where(np.isfinite(one), np.abs(one), 0.0).max(1) for one in self._logs()]
        return np.asarray(1 + np.maximum(*both), np.float64)

    def _logs(self) -> tuple[Array, Array]:
        return self.taught(), np.abs(self.student) + np.abs(log_softmax(self.student))

    def rounding(self) -> Array:
        """Return what rounding explains of each row's loss.

        A log-probability is rounded by UNIT of its size; that of a softened one counts T of it.
        """
        alpha, temperature = self.event.alpha, self.event.temperature
        classes = np.log(self.event.vocabulary)
        soft = temperature * self.largest() + temperature**2 * (
            classes + self.largest() / temperature
        )
        mixed = alpha * soft + (1 - alpha) * self.largest()
        return np.asarray(OPERATIONS * UNIT * mixed, np.float64)


def log_sum(values: Array) -> Array:
    """Return the log of the sum of exponentials of each row."""
    top = values.max(1, keepdims=True)
    return np.asarray((np.log(np.exp(values - top).sum(1, keepdims=True)) + top)[:, 0], np.float64)


def log_softmax(values: Array) -> Array:
    """Return the values less the log of the sum of exponentials of their row."""
    return np.asarray(values - log_sum(values)[:, None], np.float64)


def _every(tally: Tally, trace: Trace) -> list[Rows]:
    found = []
    for event in trace.of(Softened):
        rows = Rows.of(event)
        if rows is None:
            tally.miss("an event Softened has other numbers of numbers than it says")
        else:
            found.append(rows)
    return found


def _within(tally: Tally, rows: Rows, gap: Array, allowed: Array, what: str, trace: Trace) -> None:
    """Count a comparison for each row: it is off by `gap`, and rounding explains `allowed`."""
    event = rows.event
    said = f"{what} with alpha={event.alpha:g}, T={event.temperature:g}, k={event.top_k}"
    for row, (off, most) in enumerate(zip(gap.tolist(), allowed.tolist(), strict=True)):
        message = f"{said} is off by {off:.3g} in row {row}, rounding explains {most:.3g}"
        place: dict[str, Any] = {"tensor": "loss", "element": row, "scenario": trace.scenario}
        tally.at_most(most, off, message, form=".3g", **place)


def compare_sign(tally: Tally, trace: Trace) -> None:
    """Check that no divergence is negative, and that of alike distributions is 0."""
    for rows in _every(tally, trace):
        gap = np.abs(rows.losses) if trace.scenario.options.get("alike") else -rows.losses
        what = "the divergence from itself" if trace.scenario.options.get("alike") else "0"
        _within(tally, rows, gap, rows.rounding(), what, trace)


def compare_loss(tally: Tally, trace: Trace) -> None:
    """Compare each row's loss with the textbook's."""
    for rows in _every(tally, trace):
        gap = np.abs(rows.losses - rows.loss(rows.student))
        _within(tally, rows, gap, rows.rounding(), "the loss", trace)


def compare_whole(tally: Tally, trace: Trace) -> None:
    """Check that rows with every token are the dense distribution, and compare their loss."""
    for rows in _every(tally, trace):
        event = rows.event
        if event.top_k != event.vocabulary:
            continue
        order = np.arange(event.vocabulary)
        place: dict[str, Any] = {"tensor": "tokens", "scenario": trace.scenario}
        whole = (np.sort(rows.tokens, 1) == order).all(1) & (rows.rest == 0)
        for row, right in enumerate(whole.tolist()):
            message = f"row {row} lacks tokens, or has a rest, though it keeps all"
            tally.check(right, message, element=row, **place)
        dense = np.take_along_axis(log_softmax(rows.teacher), rows.tokens, 1)
        _within(
            tally, rows, np.abs(dense - rows.kept).max(1), rows.rounding(), "a probability", trace
        )
    compare_loss(tally, trace)


def compare_hot(tally: Tally, trace: Trace) -> None:
    """Compare the gradient at a high temperature with that of nearly uniform distributions.

    T (s - q) is (u - v) / n there, less its mean, up to (r^2 + r'^2) / (n T) for ranges r, r'.
    """
    for rows in _every(tally, trace):
        event = rows.event
        student, teacher = log_softmax(rows.student), log_softmax(rows.teacher)
        apart = student - teacher
        due = (apart - apart.mean(1, keepdims=True)) / event.vocabulary
        ranges = sum(np.ptp(one, axis=1) ** 2 for one in (student, teacher))
        allowed = ranges / (event.vocabulary * event.temperature)
        allowed = allowed + OPERATIONS * UNIT * event.temperature / event.vocabulary
        gap = np.abs(rows.gradients - due).max(1)
        _within(tally, rows, gap, allowed, "the gradient", trace)


def compare_gradients(tally: Tally, trace: Trace) -> None:
    """Compare each element of the gradient with finite differences of the textbook."""
    for rows in _every(tally, trace):
        event = rows.event
        due = np.empty_like(rows.gradients)
        for column in range(event.vocabulary):
            moved = np.zeros(event.vocabulary)
            moved[column] = DIFFERENCE
            above, below = (rows.loss(rows.student + sign * moved) for sign in (1, -1))
            due[:, column] = (above - below) / (2 * DIFFERENCE)
        scale = event.alpha * event.temperature + 1
        allowed = OPERATIONS * UNIT * scale * rows.largest() + 10 * DIFFERENCE**2 * scale
        _within(tally, rows, np.abs(rows.gradients - due).max(1), allowed, "the gradient", trace)


def compare_temperatures(tally: Tally, trace: Trace) -> None:
    """Check that gradients of the same rows have nearly one size over temperatures.

    The derivative of a softmax has its eigenvalues, but for 0, between its least and its largest
    probability. So at any T >= 1 the norm lies between exp(-r) and exp(r) times |u - v| / n, for
    logits of a range r.
    """
    alike: dict[tuple[float, ...], list[Rows]] = defaultdict(list)
    for rows in _every(tally, trace):
        alike[rows.event.student].append(rows)
    for same in alike.values():
        if len(same) < 2:
            tally.miss("the rows were seen at one temperature alone")
            continue
        every = np.array([np.linalg.norm(rows.gradients, axis=1) for rows in same])
        ratio = every.max(0) / every.min(0)
        both = (np.ptp(one, axis=1) for one in (same[0].student, same[0].teacher))
        allowed = np.exp(2 * np.maximum(*both))
        for row, (found, most) in enumerate(zip(ratio.tolist(), allowed.tolist(), strict=True)):
            message = (
                f"the gradient of row {row} is {found:.3g} times as large at one temperature as at "
                f"another, the logits explain {most:.3g}"
            )
            place: dict[str, Any] = {"tensor": "gradient", "element": row}
            tally.at_most(most, found, message, form=".3g", scenario=trace.scenario, **place)


# --- rows and shards of a teacher -----------------------------------------------------------------

# What float32 explains of a log-probability, of a small model's logits, beside float64: 1e-6 was
# seen.
ROUNDING = 1e-5
# What is wrong with shards, and a part of the message that refuses them.
REFUSALS = {
    "shards of another tokenizer": "tokenizer",
    "half of a shard": "bytes, and the list says",
    "a shard with a bit turned": "digest",
    "a shard that is missing": "not there",
    "a shard in another's place": "another folder's or another run's",
    "rows of other samples": "are not those of sample",
}
_ADVICE = "a run of the system distilled records it"


def planned(**options: object) -> Scenario:
    """Return the scenario of a short distillation."""
    return fine_tuning.planned(options=options).with_(system="distilled")


def plan_rows(invariant: Invariant) -> list[Scenario]:
    """Plan chats and texts, packed and not, with some tokens kept, with one and with all."""
    facts = ["samples", "gradients"]
    return [
        planned(task="instruct", facts=facts),
        planned(task="text", family="llama", top_k=1, share=1.0, facts=facts),
        planned(task="text", top_k="all", temperature=4.0, packing=True, facts=facts),
    ]


def plan_cover(invariant: Invariant) -> list[Scenario]:
    """Plan chats of one turn and of two."""
    return [planned(task="instruct", facts=["samples"])]


def plan_refusals(invariant: Invariant) -> list[Scenario]:
    """Plan shards that are not the student's."""
    return [planned(task="text", facts=["refusals"])]


def plan_shards(invariant: Invariant) -> list[Scenario]:
    """Plan a stage that is stopped, and goes on."""
    return [planned(task="text")]


def compare_rows(tally: Tally, trace: Trace) -> None:
    """Compare each row with the teacher's own distribution, and each step with the textbook's."""
    rows = trace.of(TeacherRow)
    steps = [event for event in trace.of(Explained) if event.of == fine_tuning.STEP]
    if bool(rows) != bool(steps):
        lacking = "step beside float64" if rows else "TeacherRow"
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
        explained = f"rounding explains {ROUNDING:g}"
        message = f"{what} is off by {gap:.3g} from its teacher's, {explained}"
        tally.at_most(ROUNDING, gap, message, form=".3g", **place)
        others = np.delete(stock, tokens)
        least = float(np.array(event.log_probabilities).min())
        above = float(others.max(initial=-np.inf)) - least
        message = f"{what} lacks a token that is likelier than those that it has, by {above:.3g}"
        tally.check(above <= ROUNDING, message, **place)
        with np.errstate(divide="ignore"):
            due, found = np.log([np.exp(others).sum(), event.rest])
        gap = 0.0 if due == found else abs(float(due - found))
        message = f"the log of the rest of {what} is off by {gap:.3g}, {explained}"
        tally.at_most(ROUNDING, gap, message, form=".3g", **place)
    for step in steps:
        rounding_bound.judge(tally, step, trace)


def compare_cover(tally: Tally, trace: Trace) -> None:
    """Check that each target has one row, and that the loss depends on the states of rows alone."""
    samples = {event.sample: event for event in trace.of(Encoded)}
    rows = Counter((one.sample, one.position) for one in trace.of(TeacherRow))
    if not samples or not rows:
        return
    due = {(one.sample, place - 1) for one in samples.values() for place in one.completion}
    for sample, position in sorted(due | rows.keys()):
        wanted, found = int((sample, position) in due), rows[sample, position]
        message = (
            f"sample {sample} has {found} rows at position {position}, which predicts "
            f"{'a' if wanted else 'no'} token that is due"
        )
        place = {"tensor": "row", "sample_ids": (sample,), "scenario": trace.scenario}
        tally.equal(wanted, found, message, **place)
    drawn = {i for shard in trace.of(Shard) for i in shard.ids}
    taught = {one.sample: set(one.positions) for one in trace.of(Taught)}
    for sample in sorted(drawn):
        of_rows = {position for one, position in rows if one == sample}
        message = f"the loss of sample {sample} depends on other states than its rows are of"
        place = {"sample_ids": (sample,), "scenario": trace.scenario}
        tally.equal(sorted(of_rows), sorted(taught.get(sample, ())), message, **place)
    for shard in trace.of(Shard):
        weight = sum(len(samples[i].completion) for i in shard.ids if i in samples)
        message = f"shard {shard.shard} counts {shard.weight:g} rows, it has {weight}"
        place = evidence.place(trace, shard)
        tally.equal(float(weight), shard.weight, message, sample_ids=shard.ids, **place)


def compare_refusals(tally: Tally, trace: Trace) -> None:
    """Check that the student has refused each of them, for what is wrong with it."""
    given = {event.what: event.refused for event in trace.of(TurnedAway)}
    if not given:
        return
    for what, why in REFUSALS.items():
        if what not in given:
            tally.miss(f"the student was not given {what}")
            continue
        refused = given[what]
        message = f"the student has learned from {what}"
        if refused is not None:
            message = f"{what}: refused, and not because {why!r}: {refused}"
        is_right = refused is not None and why in refused
        tally.check(is_right, message, tensor="shard", scenario=trace.scenario)


def compare_shards(tally: Tally, trace: Trace) -> None:
    """Check that shards are complete where they are said to be, and the same after a stop."""
    made = {event.when: event for event in trace.of(Sharded)}
    for event in made.values():
        there = len(event.digests) == event.due
        message = (
            f"{event.when}: {len(event.digests)} shards of {event.due} are there, and the stage "
            f"says that it is {'complete' if event.complete else 'not'}"
        )
        tally.equal(there, event.complete, message, tensor="shard", scenario=trace.scenario)
    first, last = made.get("made at once"), made.get("resumed")
    if not made:
        return
    if first is None or last is None:
        tally.miss("no stage was recorded that was stopped, beside one that was not")
        return
    for number, (one, other) in enumerate(zip(first.digests, last.digests, strict=False)):
        message = f"shard {number} has other bytes after the stage was stopped and went on"
        tally.equal(one, other, message, tensor="shard", scenario=trace.scenario)
    message = "another number of shards is there after the stage was stopped and went on"
    tally.equal(
        len(first.digests), len(last.digests), message, tensor="shard", scenario=trace.scenario
    )


ROWS = (
    Check(
        name="divergence_sign",
        id="F-KD-001",
        decides="no divergence is negative, and a student that is its teacher has none",
        spoken_of="distillation kl-divergence",
        judge=judge_each(compare_sign, _NOTHING),
        plan=plan_sign,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="alpha_0",
        id="F-KD-002",
        decides="without the teacher's part the loss is cross entropy",
        spoken_of="distillation alpha cross-entropy",
        judge=judge_each(compare_loss, _NOTHING),
        plan=plan_entropy,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="alpha_1",
        id="F-KD-003",
        decides="the teacher's part is T^2 KL(teacher_T || student_T)",
        spoken_of="distillation temperature",
        judge=judge_each(compare_loss, _NOTHING),
        plan=plan_divergence,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="hot_teacher",
        id="F-KD-004",
        decides="at a high temperature distributions are nearly uniform",
        spoken_of="distillation temperature uniform",
        judge=judge_each(compare_hot, _NOTHING),
        plan=plan_hot,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="soft_gradients",
        id="F-KD-005",
        decides="the gradient is that of finite differences of the textbook's loss",
        spoken_of="distillation gradient",
        judge=judge_each(compare_gradients, _NOTHING),
        plan=plan_gradients,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="gradient_size",
        id="F-KD-006",
        decides="the gradient has nearly one size over temperatures",
        spoken_of="distillation temperature scale",
        judge=judge_each(compare_temperatures, _NOTHING),
        plan=plan_temperatures,
        tolerance_kinds=("relative",),
    ),
    Check(
        name="whole_vocabulary",
        id="F-KD-007",
        decides="with every token kept the loss is that of the dense distribution",
        spoken_of="distillation top-k",
        judge=judge_each(compare_whole, _NOTHING),
        plan=plan_whole,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="teacher_rows",
        id="F-KD-008",
        decides="rows are the teacher's at their places, and steps the textbook's of them",
        spoken_of="distillation label-shift top-k",
        judge=judge_each(compare_rows, f"no TeacherRow was recorded: {_ADVICE}"),
        plan=plan_rows,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="teacher_cover",
        id="F-KD-009",
        decides="each token to predict has one row, and the loss depends on rows alone",
        spoken_of="distillation coverage",
        judge=judge_each(compare_cover, f"no TeacherRow was recorded: {_ADVICE}"),
        plan=plan_cover,
    ),
    Check(
        name="shard_refusals",
        id="F-KD-010",
        decides="shards of another tokenizer or of other rows, damaged or missing are refused",
        spoken_of="distillation tokenizer stale",
        judge=judge_each(compare_refusals, f"no TurnedAway was recorded: {_ADVICE}"),
        plan=plan_refusals,
    ),
    Check(
        name="shards_resumed",
        id="F-KD-011",
        decides="a stopped stage goes on to the same shards, and says truly if all are there",
        spoken_of="distillation resume",
        judge=judge_each(compare_shards, f"no Sharded was recorded: {_ADVICE}"),
        plan=plan_shards,
    ),
)
