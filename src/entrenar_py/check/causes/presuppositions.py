"""The presuppositions of comparing a user's runs: one table, tested on the runs themselves.

A comparison counts only if all its presuppositions hold. If one fails, it is reported as missing,
with the call that settles it. The exception is a difference that one exact equation explains, since
such a difference can't come from the presupposition. Nothing is presupposed about the harness's own
trainers, which are known. To add a presupposition, add a row and name it in the comparisons that
make it. Presuppositions that two plain runs of the command settle are tested here; the others have
modules of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.causes import (
    applied_gradients,
    common_steps,
    copies,
    coupled_samples,
    random_draws,
    resumes,
    run_comparison,
)
from entrenar_py.check.causes.explanations import Explanation
from entrenar_py.check.causes.rounding_bounds import UNKNOWN
from entrenar_py.check.causes.run_comparison import Compared, Presupposition
from entrenar_py.check.evidence import missing
from entrenar_py.check.evidence.run_names import Words, run_name
from entrenar_py.shared.trace import Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Counterexample, Tally

# Two independent draws of the same weights are about 1.4 apart, relative to their norm. Weights
# from one draw that have changed since (decayed, rounded) are far closer.
OTHER_DRAW = 0.5
_SEED = (
    "seed the script alike in every run, before it draws anything: torch.manual_seed(...), or "
    "{seed} in the command"
)


def plain_runs_apart(compared: Compared) -> str:
    """Return why two plain runs of the command don't agree within rounding; "" if they do.

    In a plain run, the harness changes nothing.
    """
    if not compared.plain_runs:
        return ""
    first, second = compared.plain_runs
    if why := unseeded(first, second):
        return f"two plain runs of the command differ: {why}: {_SEED}"
    broken = _beyond_rounding(compared, first, second)
    if broken is None:
        return ""
    return (
        f"two plain runs of the command differ ({broken.place()}: {broken.message}), "
        f"so two others can't be compared: {_SEED}"
    )


def agree_within_rounding(compared: Compared) -> bool:
    """Return whether the two runs draw the same numbers, and agree within rounding."""
    first, second = compared.model, compared.trace
    return not unseeded(first, second) and _beyond_rounding(compared, first, second) is None


def _beyond_rounding(compared: Compared, first: Trace, second: Trace) -> Counterexample | None:
    """Return where two runs differ by more than rounding; None if they don't."""
    finite = common_steps.while_finite(Compared(runs=compared.runs, model=first, trace=second))
    first, second = finite.model, finite.trace
    trial = Tally("")
    # If training is chaotic from the first step on, that doesn't explain why the same operations
    # give different results.
    known = compared.sensitivity
    sensitivity = UNKNOWN if known.is_chaotic(0) else known
    for rank in sorted({update.rank for update in second.of(Update)}):
        runs = _of_rank(first, rank), _of_rank(second, rank)
        run_comparison.compare(trial, *runs, None, _PLAIN, sensitivity=sensitivity)
    return trial.broken


def _of_rank(trace: Trace, rank: int) -> Trace:
    kept = (e for e in trace.events if not isinstance(e, Start | Update) or e.rank == rank)
    return replace(trace, events=tuple(kept))


def plain_bits_apart(compared: Compared) -> str:
    """Return why two plain runs of the command don't have the same bits; "" if they do."""
    if not compared.plain_runs:
        return ""
    first, second = compared.plain_runs
    if why := unseeded(first, second):
        return f"two plain runs of the command differ: {why}: {_SEED}"
    expected = evidence.updates(first)
    for step, by_rank in evidence.ranks_by_step(second):
        for rank, update in by_rank.items():
            model = expected.get(step, {}).get(rank)
            if model is None:
                continue
            for part in ("gradient", "weights", "optimizer"):
                if name := evidence.first_difference(getattr(model, part), getattr(update, part)):
                    return (
                        f"two plain runs of the command differ in {part} from step {step} on "
                        f"(rank {rank}, {name}), so bits can't be compared: {_SEED}, and "
                        "torch.use_deterministic_algorithms(True)"
                    )
    return ""


_PLAIN = Words(run="the first of them", its="the first one's", before="", elsewhere="")


def drawn_apart(compared: Compared) -> str:
    """Return what a command without a {seed} draws differently in every run; "" if nothing."""
    if compared.trace.traits.seeded:
        return ""
    why = unseeded(compared.model, compared.trace)
    return why and f"two runs of the command are not seeded the same: {why}: {_SEED}"


def unseeded(first: Trace, second: Trace) -> str:
    """Return what two runs of one command drew differently, weights or samples; "" if nothing."""
    if name := _other_beginning(first, second):
        return f"they begin with different weights ({name})"
    return _other_samples(first, second)


def samples_apart(compared: Compared) -> str:
    """Return why two plain runs of the command draw different samples; "" if they don't."""
    if not compared.plain_runs:
        return ""
    why = _other_samples(*compared.plain_runs)
    return why and f"in two plain runs of the command {why}: {_SEED}"


def samples_drawn_apart(compared: Compared) -> str:
    """Return in which step a command without a {seed} draws other samples in each run; or ""."""
    if compared.trace.traits.seeded:
        return ""
    why = _other_samples(compared.model, compared.trace)
    return why and f"in two plain runs of the command {why}: {_SEED}"


def drawn_anew(compared: Compared) -> str:
    """Return why a script that sets no seed may draw different numbers after a stop; or "".

    The harness seeds its runs, so they begin the same. After a stop they would have new seeds.
    """
    if not compared.trace.traits.unseeded:
        return ""
    trial = Tally("", observed=True)
    resumes.compare_data(trial, compared.model, compared.trace)
    if trial.broken is None:
        return ""
    return (
        "the script seeds nothing, so after a stop it draws different numbers "
        f"({trial.broken.place()}: {trial.broken.message}): {_SEED}, and restore the generators' "
        "states"
    )


def _other_samples(first: Trace, second: Trace) -> str:
    samples, others = _samples(first), _samples(second)
    for step in sorted(samples.keys() & others.keys()):
        if samples[step] != others[step]:
            return f"step {step} {missing.other_samples(first, second)}"
    return ""


def _other_beginning(first: Trace, second: Trace) -> str:
    starts, others = _first_starts(first), _first_starts(second)
    for rank in sorted(starts.keys() & others.keys()):
        if name := evidence.first_difference(starts[rank].weights, others[rank].weights):
            return name
    return ""


def _first_starts(trace: Trace) -> dict[int, Start]:
    return {s.rank: s for s in trace.of(Start) if s.step == 0 and not s.resumed}


def _samples(trace: Trace) -> dict[int, Counter[int]]:
    completed = {update.step for update in trace.of(Update)}
    samples: dict[int, Counter[int]] = {}
    for shard in trace.of(Shard):
        if shard.step in completed:
            samples.setdefault(shard.step, Counter()).update(shard.ids)
    return samples


def other_beginning(compared: Compared) -> str:
    """Return why the runs begin with independently drawn weights; "" if they don't.

    Weights that come from one draw and differ were changed by the trainer. They are left to the
    comparison.
    """
    starts, model_starts = (_first_starts(run) for run in (compared.trace, compared.model))
    if not starts or not model_starts:
        return ""
    start, model = starts[min(starts)], model_starts[min(model_starts)]
    for name, record in start.weights.items():
        expected = model.weights.get(name)
        if expected is None or expected.digest == record.digest:
            continue
        left, right = expected.vector(), record.vector()
        if left is None or right is None or _are_other_draws(left, right):
            return (
                f"{run_name(compared.trace)} begins with different weights from "
                f"{run_name(compared.model)} ({name}): {_SEED}, and draw the weights before "
                "anything that depends on the rank or on the number of workers"
            )
    return ""


def _are_other_draws(left: NDArray[Any], right: NDArray[Any]) -> bool:
    if left.size != right.size or not (np.isfinite(left).all() and np.isfinite(right).all()):
        return False
    left, right = left.astype(np.float64), right.astype(np.float64)
    sizes = [float(np.linalg.norm(one)) for one in (left, right)]
    return min(sizes) > 0 and float(np.linalg.norm(left - right)) > OTHER_DRAW * max(sizes)


# --- the table ------------------------------------------------------------------------------------


SAME_NAMES = Presupposition(
    says="a name means the same tensor on every rank and in both runs",
    lacking=copies.other_names,
)
COPIES = Presupposition(
    says="each rank holds each tensor completely, and no tensor that other ranks lack",
    lacking=copies.lacking,
    left=copies.without,
)
PLAIN_RUNS_AGREE = Presupposition(
    says="two runs of the command, with nothing changed between them, agree within rounding",
    lacking=plain_runs_apart,
)
SAME_BITS_AGAIN = Presupposition(
    says="two runs of the command, with nothing changed between them, agree in every bit",
    lacking=plain_bits_apart,
)
SAME_BEGINNING = Presupposition(
    says="both runs begin with the same weights",
    lacking=other_beginning,
)
SEEDED = Presupposition(
    says="both runs draw the same first weights and the same samples",
    lacking=drawn_apart,
)
SEEDED_AFTER_A_STOP = Presupposition(
    says="a stopped run continues with the random numbers that it would have drawn",
    lacking=drawn_anew,
)
SAMPLES_AGAIN = Presupposition(
    says="two runs of the command, with nothing changed between them, draw the same samples",
    lacking=samples_apart,
)
SAMPLES_SEEDED = Presupposition(
    says="a command without {seed} draws the same samples in each run",
    lacking=samples_drawn_apart,
)
SAMPLES_OF_ITS_OWN = Presupposition(
    says="ranks that draw the same samples hold copies of the model, not parts of it",
    lacking=copies.shared_samples,
)
ROWS_COUNT_ONCE = Presupposition(
    says="a sum over a batch counts each row once, with any number of workers",
    lacking=copies.summed_parts,
)
SAME_BATCHES = Presupposition(
    says="the script forms the same batches for any number of workers",
    lacking=random_draws.other_batches,
)
SAME_NUMBERS = Presupposition(
    says="a number means the same sample on every rank",
    lacking=random_draws.of_own_data,
)
REDUCED = Presupposition(
    says="the optimizer gets the gradients that it applies, and reduces nothing itself",
    lacking=applied_gradients.unreduced,
    left=applied_gradients.without_gradients,
    broken=applied_gradients.stepped_alone,
)
THE_MODEL_S = Presupposition(
    says="the optimizer steps the model's weights, not copies of them",
    lacking=applied_gradients.copies_stepped,
)
SKIPS_ARE_SEEN = Presupposition(
    says="a step that a rank skips because of another rank's value is recorded as skipped",
    lacking=applied_gradients.skipped_unseen,
)
STATISTICS = Presupposition(
    says="no rank computes with statistics of its own samples only",
    lacking=coupled_samples.other_statistics,
    is_explained=True,
)
FINITE = Presupposition(
    says="weights are finite: otherwise all weights are NaN, and any two trainers agree",
    lacking=common_steps.not_finite,
    left=common_steps.while_finite,
    broken=common_steps.broken_by_itself,
)

SAME_STEPS = Presupposition(
    says="a step's number means the same step on every rank",
    lacking=common_steps.uneven,
    left=common_steps.while_even,
)
TOGETHER = Presupposition(
    says="ranks stay equal by reducing gradients, not by averaging weights now and then",
    lacking=common_steps.brought_together,
    left=common_steps.before_steps,
)
SAME_CONTENTS = Presupposition(
    says="the model gets the same input for each sample in both runs",
    lacking=random_draws.other_contents,
    is_explained=True,
)
NOTHING_BY_RANK = Presupposition(
    says="no random numbers depend on the rank, or on how a batch is split",
    lacking=random_draws.drawn_by_rank,
    is_explained=True,
)
SUM_OVER_SAMPLES = Presupposition(
    says="the loss of a batch is a sum over its samples, which don't affect each other",
    lacking=coupled_samples.lacking,
    is_explained=True,
    broken=coupled_samples.broken,
)
THEIR_BATCHES = Presupposition(
    says="a single worker that should get the batches of several workers got all of them",
    lacking=copies.not_given,
    is_explained=True,
)
NO_NOISE = Presupposition(
    says="nothing random is added to the gradients",
    lacking=lambda compared: random_draws.noise_on_gradients(compared.trace),
)


def _strictly(presupposition: Presupposition) -> Presupposition:
    return replace(presupposition, left=lambda _: None)


# Comparison, in words for a reader -> its presuppositions, in the order in which they are tested.
WITH_ONE_WORKER = "several workers with one"
WITH_A_KNOB = "a turned knob with its usual value"
RESUMED = "a resumed run with the uninterrupted one"
KILLED = "a run that lost a worker with an undisturbed one"
REPEATED = "a second run with the first"
RANKS = "ranks with each other"
SUMS = "gradients with the sums over their micro-batches"
UPDATES = "a step with the optimizer's rule"
SAMPLES = "samples of the ranks with each other"
SAMPLES_WITH_ONE_WORKER = "samples of several workers with those of one"
SAMPLES_REPEATED = "samples of a second run with those of the first"
_TWO_RUNS = (
    SAME_NAMES,
    COPIES,
    SAME_STEPS,
    TOGETHER,
    FINITE,
    PLAIN_RUNS_AGREE,
    SAME_BEGINNING,
    REDUCED,
    STATISTICS,
)
_BY_SAMPLE = (SAME_CONTENTS, NOTHING_BY_RANK, SUM_OVER_SAMPLES)
# Presuppositions that controlled runs can settle, in which nothing is drawn at random, or all ranks
# have the same part of the batch.
_CONTROLLED = (STATISTICS, *_BY_SAMPLE, THEIR_BATCHES)
POISONED = "a step with a non-finite value: whether it is skipped, or halts the run"
COMPARISONS: Mapping[str, tuple[Presupposition, ...]] = {
    WITH_ONE_WORKER: (*_TWO_RUNS, ROWS_COUNT_ONCE, *_BY_SAMPLE, THEIR_BATCHES),
    WITH_A_KNOB: (*_TWO_RUNS, *_BY_SAMPLE),
    RESUMED: (SAME_NAMES, SAME_BITS_AGAIN, FINITE, SEEDED_AFTER_A_STOP),
    KILLED: (FINITE, PLAIN_RUNS_AGREE, SEEDED_AFTER_A_STOP),
    REPEATED: (SEEDED, FINITE),
    RANKS: (SAME_NAMES, COPIES, SAME_STEPS, TOGETHER, FINITE),
    SUMS: (SAME_NAMES, COPIES, SAME_STEPS, _strictly(TOGETHER), _strictly(REDUCED), NO_NOISE),
    UPDATES: (FINITE, _strictly(REDUCED), THE_MODEL_S),
    SAMPLES: (SAMPLES_OF_ITS_OWN, SAME_NUMBERS, _strictly(SAME_STEPS)),
    SAMPLES_WITH_ONE_WORKER: (
        SAME_STEPS,
        SAMPLES_OF_ITS_OWN,
        SAMPLES_AGAIN,
        SAME_NUMBERS,
        SAME_BATCHES,
    ),
    SAMPLES_REPEATED: (SAMPLES_SEEDED,),
    POISONED: (_strictly(SAME_STEPS), _strictly(TOGETHER), SKIPS_ARE_SEEN),
}


def comparable(tally: Tally, comparison: str, compared: Compared) -> Compared | None:
    """Return the part of two runs that can be compared, or None. Report the rest as missing.

    `comparison` is a key of COMPARISONS. Tensors of `compared.model` get the names that they have
    in `compared.trace`.
    """
    if compared.trace.scenario.workload != "own":
        return compared
    compared = aligned(compared)
    if comparison in (WITH_ONE_WORKER, WITH_A_KNOB, SUMS, UPDATES):
        compared = applied_gradients.reduced(tally, compared)
    if compared.trace.traits.unseeded and not compared.is_one_run:
        tally.note(
            "the script sets no seed: entrenar-check has seeded torch, numpy and "
            "Python before it began, differently on each rank, and the same in each run"
        )
    if comparison in (WITH_ONE_WORKER, WITH_A_KNOB, SUMS):
        compared = applied_gradients.undone(tally, compared)
        compared = _uncompressed(tally, compared)
    for presupposition in COMPARISONS[comparison]:
        reason = presupposition.lacking(compared)
        if not reason:
            continue
        if presupposition.is_explained and (explanation := compared.explanation) is not None:
            _note_explained(tally, compared, explanation)
            continue
        broken = presupposition.broken(compared)
        if broken is None:
            tally.miss(reason)
        else:
            tally.check(False, **broken)
        left = presupposition.left(compared)
        if left is None:
            return None
        compared = left
    return compared


def _uncompressed(tally: Tally, compared: Compared) -> Compared:
    """Return the comparison of the steps before a hook begins to compress gradients.

    If a hook always compresses, or never, return `compared` unchanged.
    """
    traits = compared.trace.traits
    step = traits.compressed_from
    if not step:
        return compared
    tally.note(
        f"gradients are compressed by {traits.compressed} from step {step} on: steps before that "
        "were compared"
    )

    def before(run: Trace) -> Trace:
        whole = replace(run.traits, compressed="", compressed_from=0)
        return replace(common_steps.until(run, step), traits=whole)

    return compared.both(before)


def are_comparable(comparison: str, compared: Compared) -> bool:
    """Return whether something can be compared of two runs, and nothing is missing or broken."""
    trial = Tally("", observed=True)
    left = comparable(trial, comparison, compared)
    return left is not None and trial.broken is None and not trial.missing


def are_prevented(comparison: str, compared: Compared, *, masked: bool) -> bool:
    """Return whether only random numbers or coupled samples keep two runs from being compared.

    `masked` says whether their dropout masks differ. If one equation explains the difference,
    nothing prevents the comparison.
    """
    compared = aligned(compared)
    lacking = [one for one in COMPARISONS[comparison] if one.lacking(compared)]
    if not (lacking or masked) or any(one not in _CONTROLLED for one in lacking):
        return False
    return compared.explanation is None


def aligned(compared: Compared) -> Compared:
    """Return the comparison with the tensors of the model named as in the trace."""
    if compared.is_one_run:
        return compared
    return replace(compared, model=copies.aligned(compared.model, compared.trace))


def _note_explained(tally: Tally, compared: Compared, explanation: Explanation) -> None:
    difference = compared.difference
    assert difference is not None, "it was explained"
    runs = " and ".join(run_name(run) for run in (compared.model, compared.trace))
    note = (
        f"gradients of {runs} differ in step {difference.step}, and one equation explains the "
        "difference"
    )
    tally.note(f"{note}: {explanation.words}")
