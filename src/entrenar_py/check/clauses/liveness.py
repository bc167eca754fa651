"""F-TI-004: every trainable tensor changes, and no frozen tensor does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, pairwise, takewhile
from typing import Any

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes import edits, weight_averages
from entrenar_py.check.clauses import plans
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, facts, missing, precision
from entrenar_py.check.evidence.needs import Traces
from entrenar_py.shared import wording
from entrenar_py.shared.trace import Declared, Ruled, Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally

# A trainable tensor may stay unchanged while its gradient is exactly zero (LoRA's A while B is
# still zero, an expert that got no row). A tensor with a gradient must have changed after this many
# steps with a positive learning rate.
STEPS_TO_MOVE = 3
# A float32 weight w changes if its step is larger than this times |w|. Each optimizer here moves a
# weight by at least rate times gradient, unless larger gradients came before, and those changed w.
HALF_ULP = 2.0**-24
_DECLARE = 'observe(..., frozen=("embedding.*",)), or frozen=() if nothing is frozen'


def judge(invariant: Invariant, traces: Traces) -> Finding:
    """Judge the tensors that each rank's Start declared as trainable or as frozen."""
    tally = missing.tally_for(invariant, traces)
    for trace in (run.standing for run in evidence.usable(traces, tally)):
        missing.require_updates(tally, trace)
        gaps = missing.Gaps()
        starts = {start.rank: start for start in reversed(trace.of(Start))}
        by_rank: dict[int, list[Update]] = {rank: [] for rank in starts}
        for update in trace.of(Update):
            by_rank.setdefault(update.rank, []).append(update)
        freezing = _Freezing.of(trace)
        for rank, start in sorted(starts.items()):
            freezing.tell(tally, start)
            _frozen(tally, gaps, trace, start, by_rank[rank], freezing)
            _moving(tally, gaps, trace, start, by_rank[rank], freezing)
        for rank in by_rank.keys() - starts.keys():
            first = by_rank[rank][0].step
            why = "made updates, but its first weights are unknown"
            gaps.add(why, facts.START, rank=rank, step=first)
        gaps.tell(tally)
        weight_averages.compare_modules(tally, trace)
    long = f"that many steps with a {missing.told(tally, trace='learning_rate', script='rate')}"
    return tally.finding(
        nothing=f"no run with trainable tensors made {STEPS_TO_MOVE} steps: "
        + missing.told(
            tally,
            trace="record Start.trainable (and frozen), Start.weights and Update.weights, and run "
            f"{long} above 0",
            script=f"let the script make {long} above 0",
        )
    )


@dataclass(frozen=True)
class _Freezing:
    """The tensors that must not change, and those that must.

    `declared` has the tensors that a script's line `observe` declares frozen. If the script
    declares nothing, `declared` is None, and tensors that require no gradient are taken as frozen.
    Then `judged` is false: a change of these is no counterexample. Other trainers declare both
    kinds of tensors in Start.
    """

    declared: Set[str] | None
    judged: bool

    @classmethod
    def of(cls, trace: Trace) -> _Freezing:
        declarations = trace.of(Declared)
        named = [event.frozen for event in declarations if event.frozen is not None]
        declared = {name for frozen in named for name in frozen} if named else None
        return cls(declared, declared is not None or not declarations)

    def frozen(self, start: Start) -> Sequence[str]:
        """Return the names of the rank's tensors that must not change."""
        if self.declared is None:
            return start.frozen
        return [name for name in _named(start) if name in self.declared]

    def due(self, start: Start) -> Sequence[str]:
        """Return the names of the rank's tensors that must change: all that have elements."""
        named = start.trainable if self.declared is None else _named(start)
        return [
            name
            for name in named
            if name not in (self.declared or ()) and 0 not in start.shapes.get(name, ())
        ]

    def tell(self, tally: Tally, start: Start) -> None:
        """Note which tensors were taken as frozen, if nobody declared them."""
        if not self.judged:
            shown = wording.listed(start.frozen, most=3) or "no tensor"
            tally.note(
                "freezing was not judged: tensors that require no gradient are taken as frozen "
                f"({shown}), but were not declared frozen: {_DECLARE}"
            )


def _frozen(
    tally: Tally,
    gaps: missing.Gaps,
    trace: Trace,
    start: Start,
    updates: Sequence[Update],
    freezing: _Freezing,
) -> None:
    """Check that frozen tensors don't change.

    If a tensor changed that was only taken as frozen, count it as missing, unless the change has a
    known cause.
    """
    names = freezing.frozen(start)
    changed: dict[int, list[str]] = {}  # step -> tensors that changed and are not declared frozen
    known = [(start.step - 1, start.weights), *((one.step, one.weights) for one in updates)]
    for step, weights in known:
        if unknown := [name for name in names if name not in weights]:
            why = f"recorded no weights of frozen {unknown[0]}"
            gaps.add(why, facts.ALL_WEIGHTS, rank=start.rank, step=step)
    for name in (name for name in names if name in start.weights):
        before = start.weights[name]
        message = f"a frozen tensor changed{_cause(start, name)}"
        for update in (update for update in updates if name in update.weights):
            after = update.weights[name]
            if freezing.judged or before.digest == after.digest:
                place = evidence.place(trace, update)
                closeness.compare_exact(tally, {name: before}, {name: after}, message, **place)
                continue
            changed.setdefault(update.step, []).append(name)
            break
    names = [name for some in changed.values() for name in some]
    averages = weight_averages.follow_others(start, updates, names) if names else set()
    tally.compared += len(averages)
    left = {step: [n for n in some if n not in averages] for step, some in changed.items()}
    changed = {step: some for step, some in left.items() if some}
    if changed:
        step = min(changed)
        moves = edits.Moves(trace, start, updates, [*chain(*changed.values())])
        cause = edits.explained(moves)
        if cause is not None and not cause.is_wrong:
            tally.compared += len(moves.names)
            tally.note(f"{wording.listed(moves.names, most=2)} {cause.words}")
            return
        if cause is not None:
            update = next(update for update in updates if update.step == step)
            place = evidence.place(trace, update)
            message = f"a frozen tensor changed: {cause.words}"
            tally.check(False, message, tensor=changed[step][0], **place)
            return
        tally.miss(
            f"{wording.listed(changed[step], most=2)} changed in step {step} without a gradient, "
            f"and no declaration says whether it may: {_DECLARE}"
        )


def _named(start: Start) -> tuple[str, ...]:
    return (*start.trainable, *(name for name in start.frozen if name not in start.trainable))


def _cause(start: Start, name: str) -> str:
    return " (it requires a gradient)" if name in start.trainable else ""


def _moving(
    tally: Tally,
    gaps: missing.Gaps,
    trace: Trace,
    start: Start,
    updates: Sequence[Update],
    freezing: _Freezing,
) -> None:
    due = freezing.due(start)
    if not due:
        lack = "named no trainable tensor"
        gaps.add(lack, facts.TRAINABLE, rank=start.rank, step=start.step - 1)
    own = _of_own_classes(trace, start.rank)
    are_in_turn = _are_in_turn(own, start, updates)
    for name in due:
        live = [update for update in updates if update.rate_of(name) > 0]
        if len(live) < STEPS_TO_MOVE:
            continue
        first = [start.weights, *(update.weights for update in live[:STEPS_TO_MOVE])]
        if not all(name in weights for weights in first):
            lack = f"recorded no weights of {name}"
            gaps.add(lack, facts.ALL_WEIGHTS, rank=start.rank, step=start.step - 1)
            continue
        rest = _rest(start, name, live)
        moved = len(rest) < sum(name in update.weights for update in live)
        late = len(rest) >= STEPS_TO_MOVE
        if late and name not in start.trainable:
            lack = (
                "is not declared frozen, and requires no gradient: name it in frozen=, or run "
                "until it trains"
            )
            _dead(tally, trace, name, rest, f"{name} {lack}")
            continue
        if late and name in own and (moved or are_in_turn):
            _wait(tally, name, moved=moved)
            continue
        local = _local(trace, start.rank, name) if late else {}
        if late and not _may_rest(tally, trace, start, name, rest, local, moved=moved):
            message = f"trainable tensor {name} did not move in {STEPS_TO_MOVE} steps"
            if trace.traits.steps == "copies":
                message += (
                    ": the optimizer steps tensors that are not the model's: create it after "
                    "the model is wrapped, copied or converted"
                )
            elif _is_in_no_group(trace, start.rank, name):
                message += ": no optimizer has it in a group of parameters"
            elif precision.unit_of({name: start.weights[name]}) == precision.BFLOAT16:
                message += (
                    ": it is in bfloat16, where an update of less than half of a weight's last "
                    "bit is lost: use float32 master weights"
                )
            _dead(tally, trace, name, rest, message)
        elif moved:
            tally.compared += 1


def _of_own_classes(trace: Trace, rank: int) -> Set[str]:
    rules = [event for event in trace.of(Ruled) if event.rank == rank and event.derived]
    return {name for rule in rules for name in rule.names}


def _are_in_turn(names: Set[str], start: Start, updates: Sequence[Update]) -> bool:
    """Return whether each tensor that moves also rests in a step with a gradient for it."""
    moved, rested = set[str](), set[str]()
    every = [start.weights, *(update.weights for update in updates)]
    for update, (before, after) in zip(updates, pairwise(every), strict=True):
        known = names & before.keys() & after.keys()
        moving = {name for name in known if after[name].digest != before[name].digest}
        if moving:
            moved |= moving
            records = {n: update.gradient[n] for n in known - moving if n in update.gradient}
            rested |= {name for name, record in records.items() if record.square()}
    return bool(moved) and moved <= rested


def _wait(tally: Tally, name: str, *, moved: bool) -> None:
    """Count a tensor of the script's own optimizer: compared if it moved later, else missing."""
    if moved:
        tally.compared += 1
    else:
        tally.miss(
            f"{name} never moved: the script's own optimizer steps tensors in turn, and "
            "its turn did not come; run longer"
        )


def _is_in_no_group(trace: Trace, rank: int, name: str) -> bool:
    stepped = {held for event in trace.of(Ruled) if event.rank == rank for held in event.names}
    return bool(stepped) and name not in stepped


def _rest(start: Start, name: str, live: Sequence[Update]) -> list[Update]:
    known = [update for update in live if name in update.weights]
    digest = start.weights[name].digest
    return list(takewhile(lambda update: update.weights[name].digest == digest, known))


def _dead(tally: Tally, trace: Trace, name: str, rest: Sequence[Update], message: str) -> None:
    last = rest[STEPS_TO_MOVE - 1]
    shown = {"tensor": name, "expected": "a change", "got": last.weights[name].digest}
    tally.check(False, message, **shown, **evidence.place(trace, last))


def _local(trace: Trace, rank: int, name: str) -> dict[int, np.ndarray[Any, Any]]:
    """Return step -> gradient of `name` in the rank's last shard, divided by the shard's weight."""
    gradients = {}
    for shard in trace.of(Shard):
        if shard.rank == rank and name in shard.gradient:
            values = shard.gradient[name].elements()
            if values is not None:
                gradients[shard.step] = values / max(shard.weight, 1.0)
    return gradients


def _may_rest(
    tally: Tally,
    trace: Trace,
    start: Start,
    name: str,
    rest: Sequence[Update],
    local: Mapping[int, np.ndarray[Any, Any]],
    *,
    moved: bool,
) -> bool:
    """Return False if a gradient of `name` was large enough to change its weights, otherwise True.

    True means that the tensor may stay unchanged in the updates `rest`. It is counted as missing if
    it never `moved` and all its gradients were zero, or if values were not recorded. For updates
    without a recorded gradient, the shard's gradient in `local` is used.
    """
    skipped = evidence.skipped_without_gradients(trace) - local.keys()
    if skipped and (few := evidence.too_few_left(trace, least=STEPS_TO_MOVE)):
        tally.miss(few)
        return True
    rest = [update for update in rest if update.step not in skipped]
    weight = start.weights[name].elements()
    some_gradient, num_known = False, 0
    if tally.observed and trace.scenario.world_size == 1 and _is_taken_away(name, rest, local):
        tally.note(
            f"{name} did not move on one worker: the script removes its gradient before each "
            "step (for an epoch, say); the runs on several workers decide"
        )
        return True
    for update in rest:
        record = update.gradient.get(name)
        if record is None and update.gradient and (moved or update.step not in local):
            # The tensor had no gradient, or the script removed the gradient until the tensor should
            # move.
            continue
        gradient = local.get(update.step) if record is None else record.elements()
        if weight is None or gradient is None or gradient.size != weight.size:
            why = f"{name} did not move, and its weight or gradient is unknown"
            missing.ask(tally, why, facts.values_of("Start.weights and Update.gradient"))
            return True
        step = update.rate_of(name) * _shrunk(update) * np.abs(gradient.astype(np.float64))
        if (step > HALF_ULP * np.abs(weight)).any() or _is_longer(update, start, name):
            return False
        num_known += 1
        some_gradient |= bool(gradient.any()) or bool(record and record.square())
    has_rested = not (moved or some_gradient)
    if has_rested and num_known == len(rest) and _cancels(trace, start.rank, name):
        tally.compared += 1
        tally.note(
            f"{name} never moved: its gradient is zero, but the gradient of its layer's weight "
            "is not, so the loss does not change if all outputs of the layer are shifted"
        )
        return True
    if has_rested:
        steps = "in all steps" if num_known == len(rest) else "in the steps that had one"
        reason = (
            f"its gradient was zero {steps} on rank {start.rank}: the loss does not depend on it "
            "yet (behind a zero weight or gate, rows that no sample uses)"
            if num_known
            else f"never had a gradient on rank {start.rank}: it is detached from the loss, "
            "or unused"
        )
        tally.miss(
            f"{name} never moved and {reason}; run longer, or declare it frozen: "
            "observe(..., frozen=(...))"
        )
    return True


def _is_taken_away(name: str, rest: Sequence[Update], local: Mapping[int, Any]) -> bool:
    """Return whether backward passes gave `name` gradients, and no step applied them."""
    return all(u.gradient and name not in u.gradient and u.step in local for u in rest)


def _cancels(trace: Trace, rank: int, name: str) -> bool:
    # The gradient of a layer's bias is a sum over rows, which may cancel out. The gradient of the
    # layer's weight shows that gradients come through the layer's outputs. Other passes may train
    # another model.
    weight = f"{name.removesuffix('bias')}weight"
    gradients = [shard.gradient for shard in trace.of(Shard) if shard.rank == rank]
    passes = [gave for gave in gradients if name in gave or weight in gave]
    if not (name.endswith("bias") and passes) or len(trace.shapes.get(weight, ())) < 2:
        return False
    return all(name in gave and weight in gave and bool(gave[weight].square()) for gave in passes)


def _is_longer(update: Update, start: Start, name: str) -> bool:
    """Return whether the norms of a gradient and its weight show that an element must change."""
    if name not in update.gradient:
        return False
    slope, weight = (tensors[name].square() for tensors in (update.gradient, start.weights))
    if slope is None or weight is None:
        return False
    step = update.rate_of(name) * _shrunk(update) * math.sqrt(slope)
    return step > HALF_ULP * math.sqrt(weight)


def _shrunk(update: Update) -> float:
    return update.applied_norm / update.grad_norm if update.applied_norm and update.grad_norm else 1


ROWS = (
    Check(
        name="liveness",
        id="F-TI-004",
        decides="every trainable tensor moves, and no frozen tensor does",
        spoken_of="frozen trainable lora adapters detached",
        judge=judge,
        plan=plans.movement,
        explores=True,
        takes_turned=True,
    ),
)
