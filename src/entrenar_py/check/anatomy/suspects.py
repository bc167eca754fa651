"""The table of known anti-patterns: each seen in a record, with its reason and what decides it.

A suspect is a fact about the calls of a run, and not a verdict: a script may have its reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from entrenar_py.check.anatomy import gradient_suspects as gradients
from entrenar_py.check.anatomy import loop_suspects as loops
from entrenar_py.check.anatomy import wording
from entrenar_py.check.anatomy.evidence import Evidence, Seen
from entrenar_py.check.anatomy.record import Backward, Event, Record, Stepped


@dataclass(frozen=True)
class Pattern:
    """An anti-pattern: its name, its search, what decides whether it is a bug, and why it is one.

    `decided` names the clauses of the shipped contracts that judge it, or a declaration of
    `observe` that lets them.
    """

    name: str
    find: Callable[[Evidence], Iterator[Seen]]
    decided: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A pattern at a line of the script, with the first step and the ranks where it was seen."""

    name: str
    file: str
    line: int
    where: str
    reason: str
    decided: str

    @property
    def place(self) -> str:
        """The file without its folder, and the line."""
        return wording.place(Event(file=self.file, line=self.line))


_ALL_GRADIENTS = "clip_norm= of observe, then F-TI-008"
_PARITY = "F-DP-005 (one worker computes the same)"
_WEIGHTS = "F-TI-001 (each sample counts the same)"
_RULE = "F-TI-008 (the rule of the step)"

PATTERNS = (
    Pattern(
        "clip-no-gradients",
        gradients.clips_nothing,
        _ALL_GRADIENTS,
        "clipping got no gradients, so nothing was clipped: the generator was used up, or it "
        "came before the backward pass",
    ),
    Pattern(
        "clip-before-reduction",
        gradients.clips_before_reduction,
        f"{_ALL_GRADIENTS}; {_PARITY}",
        "each rank clipped its own gradients before ranks added them up, so the norm of the "
        "applied gradient depends on the number of ranks",
    ),
    Pattern(
        "clip-each-pass",
        gradients.clips_each_pass,
        f"{_ALL_GRADIENTS}; {_WEIGHTS}",
        "gradients were clipped, and then another micro-batch was added: the sum is not "
        "clipped, and early micro-batches count less",
    ),
    Pattern(
        "clip-scaled",
        gradients.clips_scaled,
        _ALL_GRADIENTS,
        "gradients were clipped while they were still multiplied by the loss scale: call "
        "scaler.unscale_(optimizer) first",
    ),
    Pattern(
        "clip-after-step",
        gradients.clips_after_step,
        _ALL_GRADIENTS,
        "gradients were clipped after the optimizer had applied them",
    ),
    Pattern(
        "clip-in-parts",
        gradients.clips_in_parts,
        _ALL_GRADIENTS,
        "parts of one optimizer's gradients were clipped by their own norms, which changes the "
        "gradient's direction",
    ),
    Pattern(
        "trained-by-nothing",
        gradients.trains_unowned,
        "frozen= of observe, then F-TI-004 (liveness)",
        "a parameter gets a gradient, and no optimizer has it: it stays as it is",
    ),
    Pattern(
        "never-a-gradient",
        gradients.never_graded,
        "frozen= of observe, then F-TI-004 (liveness)",
        "the optimizer holds a parameter that requires a gradient and never got one: it is "
        "unused, detached, or no longer the model's",
    ),
    Pattern(
        "gradients-kept",
        gradients.keeps_gradients,
        f"{_PARITY}; {_WEIGHTS}",
        "a pass added to gradients that an earlier step had applied, so these are applied twice",
    ),
    Pattern(
        "stale-gradient",
        gradients.applies_again,
        f"{_PARITY}; {_WEIGHTS}",
        "the step applied a gradient that an earlier step had applied, and that no pass or "
        "zero_grad has touched since",
    ),
    Pattern(
        "step-without-backward",
        gradients.steps_without_pass,
        _RULE,
        "the optimizer stepped again with the same gradients: no backward pass lies between",
    ),
    Pattern(
        "backward-twice",
        gradients.begins_twice,
        _WEIGHTS,
        "two passes began at one loss without clearing between, so it counts twice",
    ),
    Pattern(
        "backward-under-autocast",
        partial(gradients.flagged, Backward, "autocast"),
        "F-TI-007 (the same bits when repeated), and the precision you mean",
        "the backward pass ran within autocast, which torch advises against: the types of its "
        "operations then differ from those of the forward pass",
    ),
    Pattern(
        "loss-reduced-in-place",
        partial(gradients.flagged, Backward, "changed_root"),
        _PARITY,
        "ranks reduced the loss in place, and the pass began at what was computed from it: "
        "autograd doesn't see the reduction, but does see the division after it",
    ),
    Pattern(
        "gather-without-gradient",
        partial(gradients.flagged, Backward, "gathered"),
        _PARITY,
        "tensors that require a gradient were gathered, and their copies have none: put this "
        "rank's own tensor back, or use torch.distributed.nn",
    ),
    Pattern(
        "cleared-before-step",
        gradients.clears_before_step,
        "F-TI-004 (liveness)",
        "gradients were cleared between the backward pass and the step, so the step applied none",
    ),
    Pattern(
        "micro-batches-undivided",
        gradients.adds_up_means,
        f"{_WEIGHTS}, with {{accumulation}} in the command",
        "the loss of each micro-batch is a mean, and their sum was divided by nothing: the "
        "gradient grows with their number",
    ),
    Pattern(
        "divided-twice",
        gradients.divides_wrongly,
        _PARITY,
        "the gradients that ranks reduced were divided by the number of ranks once too often",
    ),
    Pattern(
        "sum-of-means",
        gradients.sums_means,
        _PARITY,
        "ranks added up gradients of mean losses, and nothing divided the sum by the number of "
        "ranks",
    ),
    Pattern(
        "reduced-twice",
        gradients.reduces_twice,
        _PARITY,
        "the wrapper had averaged the gradients, and the script added them up over ranks again",
    ),
    Pattern(
        "last-pass-not-reduced",
        gradients.leaves_last_pass_alone,
        "F-DP-001 (replicas are equal)",
        "the last micro-batch of the step was not reduced (no_sync), though an earlier one was: "
        "ranks apply different gradients",
    ),
    Pattern(
        "called-inside-wrapper",
        gradients.calls_inside_wrapper,
        "F-DP-001 (replicas are equal)",
        "the module inside DistributedDataParallel was called, so its gradients were not reduced",
    ),
    Pattern(
        "ranks-apart",
        gradients.stays_apart,
        "F-DP-001 (replicas are equal)",
        "ranks train the same parameters, and never exchanged a tensor",
    ),
    Pattern(
        "gradient-on-some-ranks",
        gradients.lacks_gradients_somewhere,
        "F-DP-001 (replicas are equal)",
        "some ranks have no gradient of a parameter that others step",
    ),
    Pattern(
        "step-scaled",
        partial(gradients.flagged, Stepped, "scaled"),
        "{loss_scale} in the command; F-DP-005",
        "the optimizer applied gradients that were still multiplied by the loss scale: step it "
        "with scaler.step(optimizer)",
    ),
    Pattern(
        "scale-never-updated",
        gradients.never_updates_scale,
        "F-TI-004 (liveness)",
        "the GradScaler steps, and is never updated: an overflow would be skipped forever",
    ),
    Pattern(
        "step-moves-nothing",
        gradients.moves_nothing,
        "F-TI-004 (liveness)",
        "the optimizer has gradients, and its steps moved no parameter: the learning rate is zero, "
        "or all gradients are",
    ),
    Pattern(
        "step-not-finite",
        gradients.steps_non_finite,
        "F-DP-003 (training stops at a NaN)",
        "the optimizer applied a gradient that is not finite",
    ),
    Pattern(
        "optimizer-rebuilt",
        gradients.rebuilds_optimizer,
        "F-TI-002 (optimizer state)",
        "a new optimizer was built for each step, so moments and step counts are lost",
    ),
    Pattern(
        "weights-edited",
        gradients.edits_weights,
        _RULE,
        "parameters changed between two steps, and not by the optimizer, a loaded state or a "
        "collective",
    ),
    Pattern(
        "epoch-not-set",
        loops.repeats_the_order,
        "F-TI-005 (random streams)",
        "a DistributedSampler gave the second pass the order of the first: call "
        "sampler.set_epoch(epoch) before each pass",
    ),
    Pattern(
        "same-samples",
        loops.draws_the_same,
        "F-DP-002 (each sample once)",
        "two ranks average their gradients and compute them on the same samples",
    ),
    Pattern(
        "same-masks",
        loops.draws_the_same_masks,
        "F-TI-005 (random streams)",
        "two ranks drew the same random numbers in the model for different samples, since their "
        "generators are seeded alike",
    ),
    Pattern(
        "uneven-passes",
        loops.passes_are_uneven,
        "F-DP-002 (each sample once); F-DP-001",
        "ranks have different numbers of batches in one pass: the others wait forever, or step "
        "alone",
    ),
    Pattern(
        "trained-in-eval-mode",
        loops.trains_in_eval_mode,
        "F-DP-005 and {permute} in the command; the mode that you mean",
        "the model was trained in evaluation mode, though it has dropout or batch norm: "
        "model.train() is missing after an evaluation",
    ),
    Pattern(
        "evaluated-in-train-mode",
        loops.evaluates_in_train_mode,
        "F-DP-005 (losses are compared)",
        "the model was evaluated in training mode: dropout was active, or its statistics moved",
    ),
    Pattern(
        "frozen-statistics-move",
        loops.moves_frozen_statistics,
        "frozen= of observe, then F-TI-004",
        "a frozen part is in training mode, and its buffers moved",
    ),
    Pattern(
        "schedules-overwrite",
        loops.schedules_twice,
        _RULE,
        "two schedules step one optimizer, and one of them sets its rate without regard to the "
        "other: use SequentialLR",
    ),
    Pattern(
        "schedule-each-pass",
        loops.schedules_each_pass,
        f"{_RULE}, with {{accumulation}} in the command",
        "the schedule stepped with each micro-batch, and not with each step of the optimizer",
    ),
    Pattern(
        "schedule-first",
        loops.schedules_first,
        _RULE,
        "the schedule stepped before the optimizer's first step, so the first rate is skipped",
    ),
    Pattern(
        "average-each-pass",
        loops.averages_each_pass,
        "averages= of observe",
        "the average of weights was updated with each micro-batch: its horizon is shorter than "
        "its decay says",
    ),
    Pattern(
        "load-may-be-early",
        loops.reads_unfinished,
        "F-TI-003 (exact resume)",
        "a rank loaded a file that another rank saved, and nothing made it wait for that",
    ),
    Pattern(
        "one-file-by-all",
        loops.writes_one_file,
        "F-TI-003 (exact resume)",
        "several ranks saved the same file in the same step",
    ),
)


def of(records: Mapping[int, Record]) -> tuple[Suspect, ...]:
    """Return the suspects of a run, in the order of the table, each line once."""
    known = Evidence(records)
    return tuple(
        suspect for pattern in PATTERNS for suspect in _by_line(pattern, pattern.find(known), known)
    )


def _by_line(pattern: Pattern, found: Iterable[Seen], known: Evidence) -> Iterator[Suspect]:
    by_line: dict[tuple[str, int], list[Seen]] = {}
    for seen in found:
        by_line.setdefault((seen.event.file, seen.event.line), []).append(seen)
    for (file, line), seen_there in by_line.items():
        first = seen_there[0]
        ranks = {seen.rank for seen in seen_there}
        steps = {seen.step for seen in seen_there}
        where = "all ranks" if ranks == {*known.records} else f"rank {min(ranks)}"
        where = f"{where}, step {first.step}" + (
            f" and {len(steps) - 1} more" if steps - {first.step} else ""
        )
        yield Suspect(
            name=pattern.name,
            file=file,
            line=line,
            where=f"{where}; {first.detail}" if first.detail else where,
            reason=pattern.reason,
            decided=pattern.decided,
        )
