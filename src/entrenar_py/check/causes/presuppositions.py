"""The presuppositions of comparing a user's runs: one table, tested on the runs themselves.

A comparison counts only if each of its presuppositions holds. Where one fails, it is reported as
missing, with the call that settles it. Nothing is presupposed of the harness's own trainers, which
are known. To add a presupposition, add a row and name it in the comparisons that make it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from entrenar_py.check.causes import (
    applied_gradients,
    brought_together,
    copies,
    coupled_samples,
    divergence,
    divided_inside,
    random_draws,
    rank_statistics,
    repeatability,
    sample_numbers,
    steps_alone,
    tensor_names,
    uneven_steps,
)
from entrenar_py.check.causes.compared import Compared, Presupposition
from entrenar_py.check.causes.explanations import Explanation
from entrenar_py.check.evidence.run_names import run_name
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.verdict import Tally

SAME_NAMES = Presupposition(
    name="same names",
    says="a name means the same tensor on every rank and in both runs",
    lacking=tensor_names.lacking,
)
COPIES = Presupposition(
    name="copies",
    says="each rank holds the whole of each tensor, not a piece, and none of its own",
    lacking=copies.lacking,
    left=copies.without,
)
PLAIN_RUNS_AGREE = Presupposition(
    name="plain runs agree",
    says="two runs of the command, with nothing changed between them, agree within rounding",
    lacking=repeatability.apart,
)
SAME_BITS_AGAIN = Presupposition(
    name="plain runs have the same bits",
    says="two runs of the command, with nothing changed between them, agree in every bit",
    lacking=repeatability.apart_in_bits,
)
SAME_BEGINNING = Presupposition(
    name="same beginning",
    says="both runs begin with the same weights",
    lacking=repeatability.other_beginning,
)
SEEDED = Presupposition(
    name="seeded",
    says="both runs draw the same first weights and the same samples",
    lacking=repeatability.drawn_apart,
)
SEEDED_AFTER_A_STOP = Presupposition(
    name="seeded after a stop",
    says="a run that was stopped goes on with the random numbers that it would have drawn",
    lacking=repeatability.drawn_anew,
)
SAMPLES_AGAIN = Presupposition(
    name="samples are drawn alike",
    says="two runs of the command, with nothing changed between them, draw the same samples",
    lacking=repeatability.samples_apart,
)
SAMPLES_SEEDED = Presupposition(
    name="samples are seeded",
    says="a command that is told no {seed} draws the same samples in each run",
    lacking=repeatability.samples_drawn_apart,
)
SAMPLES_OF_ITS_OWN = Presupposition(
    name="samples of a rank's own",
    says="ranks that draw the same samples hold copies of the model, not parts of it",
    lacking=copies.shared_samples,
)
ROWS_COUNT_ONCE = Presupposition(
    name="rows count once",
    says="a sum over a batch has each row once, with any number of workers",
    lacking=copies.summed_parts,
)
SAME_BATCHES = Presupposition(
    name="same batches",
    says="the script cuts the same batches for any number of workers",
    lacking=sample_numbers.other_batches,
)
SAME_NUMBERS = Presupposition(
    name="same numbers",
    says="a number means the same sample on every rank",
    lacking=sample_numbers.of_own_data,
)
REDUCED = Presupposition(
    name="reduced before the step",
    says="the optimizer gets the gradients that it applies, and reduces nothing itself",
    lacking=applied_gradients.unreduced,
    left=applied_gradients.without_gradients,
    broken=steps_alone.broken,
)
THE_MODEL_S = Presupposition(
    name="the model's own weights",
    says="the optimizer steps the model's weights, not copies of them",
    lacking=applied_gradients.copies_stepped,
)
SKIPS_ARE_SEEN = Presupposition(
    name="skips are seen",
    says="a step that a rank skips because of another rank's value is recorded as skipped",
    lacking=applied_gradients.skipped_unseen,
)
STATISTICS = Presupposition(
    name="no statistics of a rank",
    says="no rank computes with statistics of its own samples",
    lacking=rank_statistics.lacking,
    is_explained=True,
)
FINITE = Presupposition(
    name="finite",
    says="weights are finite: NaN equals NaN in any trainer",
    lacking=divergence.lacking,
    left=divergence.before,
    broken=divergence.broken,
)

SAME_STEPS = Presupposition(
    name="same steps",
    says="a step's number means the same step on every rank",
    lacking=uneven_steps.lacking,
    left=uneven_steps.before,
)
TOGETHER = Presupposition(
    name="steps are made together",
    says="ranks are kept alike by their gradients, and not brought together now and then",
    lacking=brought_together.lacking,
    left=brought_together.before,
)
SAME_CONTENTS = Presupposition(
    name="same contents",
    says="the model is given the same of each sample in both runs",
    lacking=random_draws.other_contents,
    is_explained=True,
)
NOTHING_BY_RANK = Presupposition(
    name="nothing drawn by rank",
    says="no random numbers depend on the rank, or on how a batch is split",
    lacking=random_draws.drawn_by_rank,
    is_explained=True,
)
SUM_OVER_SAMPLES = Presupposition(
    name="a sum over samples",
    says="the loss of a batch is a sum over its samples, which don't act on each other",
    lacking=coupled_samples.lacking,
    is_explained=True,
    broken=coupled_samples.broken,
)
THEIR_BATCHES = Presupposition(
    name="their batches",
    says="one worker that was to have the batches of several was given the whole of them",
    lacking=copies.not_given,
    is_explained=True,
)
NO_NOISE = Presupposition(
    name="no noise on gradients",
    says="nothing random is added to the gradients",
    lacking=lambda compared: random_draws.noise_on_gradients(compared.trace),
)


def _strictly(presupposition: Presupposition) -> Presupposition:
    """Return a presupposition without which nothing of the comparison is left."""
    return replace(presupposition, left=lambda _: None)


# Comparison, as a reader would call it -> its presuppositions, in the order of their tests.
WITH_ONE_WORKER = "several workers with one"
WITH_A_KNOB = "a turned knob with its usual value"
RESUMED = "a resumed run with the straight one"
KILLED = "a run whose worker was killed with an undisturbed one"
REPEATED = "a second run with the first"
RANKS = "ranks with each other"
SUMS = "gradients with the sums of their micro-batches'"
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
# What other runs can settle, in which nothing is drawn at random, or all ranks have one share.
_CONTROLLED = (STATISTICS, *_BY_SAMPLE, THEIR_BATCHES)
POISONED = "a step at a value that is not finite, with its skipping or halting"
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
    """Return what can be compared of two runs, or None; count as missing why the rest can't.

    Tensors of `compared.model` get the names that they have in `compared.trace`.
    """
    if compared.trace.scenario.workload != "own":
        return compared
    compared = aligned(compared)
    if comparison in (WITH_ONE_WORKER, WITH_A_KNOB, SUMS, UPDATES):
        compared = divided_inside.reduced(tally, compared)
    if compared.trace.traits.unseeded and not compared.is_one_run:
        tally.note(
            "the script doesn't seed itself: entrenar-check has seeded torch, numpy and Python "
            "before it began, each rank differently and each run alike"
        )
    if comparison in (WITH_ONE_WORKER, WITH_A_KNOB, SUMS):
        compared = divided_inside.undone(tally, compared)
        compared = _uncompressed(tally, compared)
    for presupposition in COMPARISONS[comparison]:
        why = presupposition.lacking(compared)
        if not why:
            continue
        if presupposition.is_explained and (explanation := compared.explanation) is not None:
            _note_explained(tally, compared, explanation)
            continue
        broken = presupposition.broken(compared)
        if broken is None:
            tally.miss(why)
        else:
            tally.check(False, **broken)
        left = presupposition.left(compared)
        if left is None:
            return None
        compared = left
    return compared


def _uncompressed(tally: Tally, compared: Compared) -> Compared:
    """Return the comparison before the step from which on a hook compresses gradients, if any.

    If it always does, or never, that is all.
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
        return replace(divergence.until(run, step), traits=whole)

    trace = before(compared.trace)
    model = trace if compared.is_one_run else before(compared.model)
    return replace(compared, model=model, trace=trace)


def are_comparable(comparison: str, compared: Compared) -> bool:
    """Return whether something can be compared of two runs, and nothing speaks against it."""
    trial = Tally("", observed=True)
    left = comparable(trial, comparison, compared)
    return left is not None and trial.broken is None and not trial.missing


def are_prevented(comparison: str, compared: Compared, *, masked: bool) -> bool:
    """Return whether random numbers or coupled samples alone keep two runs from being compared.

    `masked`: their dropout draws other masks. If the runs differ by one equation, nothing does.
    """
    compared = aligned(compared)
    lacking = [one for one in COMPARISONS[comparison] if one.lacking(compared)]
    if not (lacking or masked) or any(one not in _CONTROLLED for one in lacking):
        return False
    return compared.explanation is None


def aligned(compared: Compared) -> Compared:
    """Return the comparison with tensors of the model named as in the trace."""
    if compared.is_one_run:
        return compared
    return replace(compared, model=tensor_names.aligned(compared.model, compared.trace))


def _note_explained(tally: Tally, compared: Compared, explanation: Explanation) -> None:
    """Note that two runs differ by one exact equation, so by nothing that is random or coupled."""
    difference = compared.difference
    assert difference is not None, "it was explained"
    runs = " and ".join(run_name(run) for run in (compared.model, compared.trace))
    note = f"gradients of {runs} differ in step {difference.step} by one equation"
    tally.note(f"{note}: {explanation.words}")
