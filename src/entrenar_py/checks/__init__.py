"""Judges of traces, one module a family; they know nothing of torch, sockets or devices.

`CHECKS` is the whole table: which check decides which clause, on which runs.
"""

from __future__ import annotations

from entrenar_py.checks import (
    audits,
    binding_hints,
    coverage,
    devices,
    endurance,
    fallback,
    finiteness,
    knob_pairs,
    liveness,
    local_sgd,
    manifest,
    memory,
    optimizer_state,
    outer_step,
    parameter_share,
    parity,
    plans,
    randomness,
    recovery,
    reductions,
    replica_identity,
    resume,
    same_bits,
    step_rule,
    weighting,
    wire,
)
from entrenar_py.checks.check import Check, alone
from entrenar_py.contract import CheckTerms, Invariant

__all__ = ["CHECKS", "Check", "alone", "bind", "terms"]


_TABLE = (
    Check(
        name="replica_identity",
        id="F-DP-001",
        decides="after every step all workers hold the same weights, optimizer state and buffers",
        judge=replica_identity.judge,
        plan=plans.training,
        in_step=True,
    ),
    Check(
        name="coverage",
        id="F-DP-002",
        decides="every sample once per epoch, none twice in a step, in a stable order",
        judge=coverage.judge,
        plan=plans.epochs,
        family=coverage.family,
    ),
    Check(
        name="finiteness",
        id="F-DP-003",
        decides="finite gradients average to a finite one; NaN or Inf halts before any update",
        judge=finiteness.judge,
        plan=plans.non_finite,
        in_step=True,
    ),
    Check(
        name="fallback",
        id="F-DP-004",
        decides="the chain CUDA, wgpu, CPU gives a right, finite result, or says why not",
        judge=fallback.judge,
        plan=fallback.plan,
        explores=False,
    ),
    Check(
        name="parity",
        id="F-DP-005",
        decides="training with many workers is training with one: losses and gradients",
        judge=parity.judge,
        plan=plans.parity,
        family=knob_pairs.family_of_parity,
        tolerance_kinds=("relative",),
        takes_tolerance=True,
        in_step=True,
    ),
    Check(
        name="recovery",
        id="F-DP-006",
        decides="a worker's loss costs no sample, and the loss is soon back on its trajectory",
        judge=recovery.judge,
        plan=plans.departures,
        family=recovery.family,
        tolerance_kinds=("steps",),
        takes_tolerance=True,
        in_step=True,
    ),
    *devices.TABLE,
    Check(
        name="manifest",
        id="F-HET-001",
        decides="every backend gives gradients of the same names, shapes and dtypes, in one order",
        judge=manifest.judge,
        plan=manifest.plan,
        explores=False,
    ),
    Check(
        name="memory",
        id="F-HET-002",
        decides="each worker's peak memory stays within its device's budget, and was foreseen",
        judge=memory.judge,
        plan=memory.plan,
        explores=False,
        tolerance_kinds=("bytes",),
    ),
    Check(
        name="weighting",
        id="F-TI-001",
        decides="loss and gradient are weighted by samples or tokens, never a mean of means",
        judge=weighting.judge,
        plan=plans.weightings,
        family=knob_pairs.family_of_parity,
        tolerance_kinds=("relative",),
        takes_tolerance=True,
        in_step=True,
    ),
    Check(
        name="optimizer_state",
        id="F-TI-002",
        decides="optimizer state agrees on all workers and survives save and load",
        judge=optimizer_state.judge,
        plan=plans.stops,
        in_step=True,
    ),
    Check(
        name="resume",
        id="F-TI-003",
        decides="a run that was stopped and resumed is the same run, bit for bit",
        judge=resume.judge,
        plan=plans.stops,
        family=resume.family,
    ),
    Check(
        name="liveness",
        id="F-TI-004",
        decides="every trainable tensor moves, every frozen one does not",
        judge=liveness.judge,
        plan=plans.movement,
    ),
    Check(
        name="randomness",
        id="F-TI-005",
        decides="random streams that must differ differ, streams that must agree agree",
        judge=randomness.judge,
        plan=plans.random_streams,
        family=randomness.family,
    ),
    Check(
        name="worker_count",
        id="F-TI-006",
        decides="the same bits with any number of workers, from trainers that promise bits",
        judge=same_bits.judge_worker_count,
        plan=plans.training,
        family=same_bits.worker_counts,
        bitwise=True,
        in_step=True,
    ),
    Check(
        name="determinism",
        id="F-TI-007",
        decides="two runs of one scenario have the same bits",
        judge=same_bits.judge_determinism,
        plan=plans.training,
        family=same_bits.repeated,
    ),
    Check(
        name="step_rule",
        id="F-TI-008",
        decides="learning rate, clipping and update follow from the step and the global gradient",
        judge=step_rule.judge,
        plan=plans.step_rules,
        family=knob_pairs.family,
        tolerance_kinds=("relative",),
        takes_tolerance=True,
    ),
    Check(
        name="holdings",
        id="F-PAR-006",
        decides="who shares a model's parameters holds little more than its share of them",
        judge=parameter_share.judge,
        plan=parameter_share.plan,
        explores=False,
        tolerance_kinds=("relative",),
        takes_tolerance=True,
    ),
    Check(
        name="wire_round_trip",
        id="F-WP-001",
        decides="a message comes out of the wire as it went in, bit by bit, in whatever pieces",
        judge=wire.judge_round_trip,
        plan=wire.plan,
        explores=False,
    ),
    Check(
        name="wire_refusal",
        id="F-WP-002",
        decides="damaged and malformed bytes give a ProtocolError, and nothing else",
        judge=wire.judge_refusal,
        plan=wire.plan,
        explores=False,
    ),
    Check(
        name="wire_memory",
        id="F-WP-003",
        decides="reading takes the payload's memory and little more, whatever the bytes claim",
        judge=wire.judge_memory,
        plan=wire.plan,
        explores=False,
        tolerance_kinds=("bytes",),
    ),
    Check(
        name="admission",
        id="F-WP-004",
        decides="who proves the secret and agrees on the run is let in, and nobody else",
        judge=wire.judge_admission,
        plan=wire.plan_admission,
        explores=False,
    ),
    Check(
        name="endurance",
        id="F-WP-005",
        decides="whatever befalls workers and messages, the run ends, on the same weights",
        judge=endurance.judge,
        plan=endurance.plan,
        family=endurance.family,
        explores=False,
    ),
    Check(
        name="audits",
        id="F-WP-006",
        decides="what a worker computes wrongly and unseen is found by another, and it is named",
        judge=audits.judge,
        plan=audits.plan,
        family=audits.family,
        explores=False,
    ),
    Check(
        name="reduction_mean",
        id="F-RED-001",
        decides="every rank's average is the weighted mean, as far off as rounding explains",
        judge=reductions.judge_mean,
        plan=reductions.plan,
        explores=False,
        tolerance_kinds=("ulp", "relative", "absolute"),
        takes_tolerance=True,
    ),
    Check(
        name="reduction_bits",
        id="F-RED-002",
        decides="all ranks hold the same bits: the tree's, or around a ring those of every run",
        judge=reductions.judge_bits,
        plan=reductions.plan,
        family=reductions.family,
        explores=False,
    ),
    Check(
        name="reduction_traffic",
        id="F-RED-003",
        decides="each rank sends and gets just the payload that its algorithm needs",
        judge=reductions.judge_traffic,
        plan=reductions.plan,
        explores=False,
        tolerance_kinds=("bytes",),
    ),
    Check(
        name="reduction_ends",
        id="F-RED-004",
        decides="no number of workers, length or size of blocks makes a reduction wait for ever",
        judge=reductions.judge_ends,
        plan=reductions.plan,
        explores=False,
    ),
    Check(
        name="outer_agreement",
        id="F-LS-001",
        decides="after every outer step all workers hold the same weights and outer momentum",
        judge=local_sgd.judge_agreement,
        plan=local_sgd.plan,
        explores=False,
    ),
    Check(
        name="outer_schedule",
        id="F-LS-002",
        decides="workers are brought together when a round ends, and do not communicate within it",
        judge=outer_step.judge_schedule,
        plan=local_sgd.plan,
        explores=False,
    ),
    Check(
        name="outer_step",
        id="F-LS-003",
        decides="the outer step is Nesterov's, along the mean pseudo-gradient of who is there",
        judge=outer_step.judge,
        plan=local_sgd.plan,
        explores=False,
    ),
    Check(
        name="outer_parity",
        id="F-LS-004",
        decides="in rounds of one step of plain SGD, local SGD is training on a single device",
        judge=local_sgd.judge_parity,
        plan=local_sgd.plan_parity,
        family=local_sgd.parity_family,
        explores=False,
        tolerance_kinds=("relative",),
    ),
    Check(
        name="outer_finiteness",
        id="F-LS-005",
        decides="NaN or Inf in one worker's round halts everyone before the outer step",
        judge=local_sgd.judge_finiteness,
        plan=local_sgd.plan_non_finite,
        explores=False,
    ),
)

CHECKS: dict[str, Check] = {check.name: check for check in _TABLE}
_BY_ID: dict[str, Check] = {check.id: check for check in _TABLE}


def bind(invariant: Invariant) -> Check | None:
    """The check that decides `invariant`: the one it names, or the one with its id; or none.

    None, too, where its binding says why nothing can be compared.
    """
    if invariant.binding is not None and invariant.binding.untried:
        return None
    if invariant.check is not None:
        return CHECKS.get(invariant.check)
    return _BY_ID.get(invariant.id)


def terms() -> tuple[CheckTerms, ...]:
    """Every check as clauses see it."""
    return tuple(
        CheckTerms(
            name=check.name,
            id=check.id,
            tolerance_kinds=check.tolerance_kinds,
            takes_tolerance=check.takes_tolerance,
            decides=check.decides,
            spoken_of=binding_hints.SPOKEN_OF.get(check.name, ""),
        )
        for check in CHECKS.values()
    )
