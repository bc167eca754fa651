"""Weights that something other than the optimizer changed, and what explains the change.

If a script changes weights in every step, it does so on purpose, which is only noted. Changes in
some steps need an explanation, which must be exact for all tensors that changed. If several fit, a
benign one is chosen.

What a script writes on purpose to tensors that require no gradient (a memory, a codebook) does not
look like an error. Two common mistakes follow exactly from the records: adapters are added to the
weights that they adapt and yet stay in use, and weight decay by hand shrinks all tensors of a
network, including frozen ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.causes import weight_averages
from entrenar_py.check.causes.explanations import Explanation
from entrenar_py.check.evidence import precision
from entrenar_py.shared.trace import (
    Declared,
    Shard,
    Start,
    TensorRecord,
    Tensors,
    Trace,
    Update,
)
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import counted, listed, named

Values = NDArray[np.float64]
_TELLING_MIN = 4  # elements: longer tensors aren't multiples of each other by chance
_ROUND_SHARE = 1e-3  # fraction of a distance: a smaller difference may be rounding
_AVERAGE = re.compile(r"ema|average|avg|shadow|polyak|teacher", re.IGNORECASE)
# Roundings of a tensor's norm that are allowed for weights swapped out and back, or averaged.
_ROUNDINGS = 16.0


@dataclass(frozen=True)
class Edit:
    """The weights of a rank `before` and `after` something other than the optimizer changed them.

    `before` is the state after the rank's last step, and `update` the next step, taken with
    `after`. `peers` has the weights of the other ranks before the edit. `last` has the weights
    after the previous edit; if there was none, those at the start and after each step. `averages`
    has the labels of the averages that the rank keeps.
    """

    trace: Trace
    update: Update
    before: Tensors
    after: Tensors
    peers: Mapping[int, Tensors]
    last: Sequence[Tensors]
    averages: Sequence[str] = ()

    def values(self) -> Iterator[tuple[str, Values, Values]]:
        """Yield the name of each tensor that was changed, with its values before and after."""
        for name in self.after:
            was, now = self.before[name].values(), self.after[name].values()
            if was is not None and now is not None and was.shape == now.shape:
                yield name, was.astype(np.float64), now.astype(np.float64)

    def is_in(self, tensors: Tensors) -> bool:
        """Return whether the changed tensors now equal those in `tensors`, bit for bit."""
        return all(
            name in tensors and tensors[name].digest == record.digest
            for name, record in self.after.items()
        )


Explain = Callable[[Edit], str]  # returns a phrase about what happened to the weights, or ""


def judge(tally: Tally, trace: Trace) -> None:
    """Judge what a user's trainer does to its weights between steps."""
    if trace.scenario.workload != "own":
        return
    if _has_climbed(tally, trace):
        return
    # Steps after a start, in which a load or broadcast is only late.
    begun = {start.step for start in trace.of(Start)}
    edits = [edit for edit in _edits(trace) if not _is_put_back(edit)]
    if any(edit.update.step in begun for edit in edits):
        tally.note("weights changed outside of the optimizer between the first pass and its step")
    edits = [edit for edit in edits if edit.update.step not in begun]
    if not edits:
        return
    if harm := _explained(edits, (_drawn_to_an_average,)):
        _tell_harm(tally, trace, edits, harm)
        return
    num_steps = len({update.step for update in trace.standing.of(Update)})
    steps = sorted({edit.update.step for edit in edits})
    names = listed([*edits[0].after], most=2)
    changes = f"{names} changed outside of the optimizer before {counted(len(steps), 'step')}"
    is_large = any(record.sketch is not None for edit in edits for record in edit.after.values())
    if len(steps) >= num_steps - 1 or is_large:
        tally.note(
            f"{changes}, first step {steps[0]}: each step is judged from the changed weights"
        )
        return
    if benign := _explained(edits, _BENIGN):
        tally.note(f"{changes}, first step {steps[0]}: {benign}")
    elif harm := _explained(_with_averages(edits, trace), _HARMFUL):
        if intent := _intended(edits, trace, harm):
            tally.miss(f"before step {steps[0]} {names} {harm}; or {intent}, which is right")
        else:
            _tell_harm(tally, trace, edits, harm)
    elif trace.scenario.world_size == 1 and trace.traits.starts != "one":
        # If an edit synchronises ranks, only the run on several workers shows it.
        tally.note(f"{changes}, first step {steps[0]}: the run on several workers shows how")
    else:
        tally.miss(
            f"{changes} ({named('step', steps[:5])}), and no known cause explains them: find "
            "what writes to the weights there (a save, an evaluation), and whether it restores "
            "what it replaced"
        )


def _has_climbed(tally: Tally, trace: Trace) -> bool:
    """Check that weights that were moved along a gradient are restored before the step.

    Return whether any weights were not restored.
    """
    climbed = [update for update in trace.standing.of(Update) if update.climbed]
    for update in climbed[:1]:
        message = (
            f"before step {update.step} {listed(update.climbed, most=2)} had been moved "
            "along the gradient of the step's first pass, and the optimizer steps from "
            "there: weights that a sharpness-aware step moves must be restored first"
        )
        tally.check(False, message, tensor=update.climbed[0], **evidence.place(trace, update))
    return bool(climbed)


def _tell_harm(tally: Tally, trace: Trace, edits: Sequence[Edit], harm: str) -> None:
    update, names = edits[0].update, listed([*edits[0].after], most=2)
    message = f"before step {update.step} {names} {harm}"
    place = evidence.place(trace, update)
    tally.check(False, message, tensor=next(iter(edits[0].after)), **place)


def _edits(trace: Trace) -> list[Edit]:
    """Return the changes of weights between two steps, for tensors that have a gradient."""
    edits: list[Edit] = []
    starts = {(start.step, start.rank): start.weights for start in trace.standing.of(Start)}
    weights_of: dict[int, Tensors] = {}
    last: dict[int, list[Tensors]] = {}
    edited = set[int]()
    for step, by_rank in evidence.ranks_by_step(trace):
        begun = {rank: starts[at, rank] for at, rank in starts if at == step}
        weights_of = {**weights_of, **begun}
        last |= {rank: [weights] for rank, weights in begun.items()}
        for rank, update in sorted(by_rank.items()):
            before = weights_of.get(rank, {})
            after = {
                name: record
                for name, record in update.edited.items()
                if name in update.gradient
                and name in before
                and before[name].digest != record.digest
            }
            if after:
                peers = {other: weights for other, weights in weights_of.items() if other != rank}
                edits.append(Edit(trace, update, before, after, peers, last.get(rank, [])))
                last[rank] = [{**before, **after}]
                edited.add(rank)
            if rank not in edited:
                last[rank] = [*last.get(rank, []), update.weights]
        weights_of = {rank: update.weights for rank, update in by_rank.items()}
    return edits


def _with_averages(edits: Sequence[Edit], trace: Trace) -> list[Edit]:
    kept = weight_averages.of(trace)
    return [
        replace(edit, averages=[label for label, rank in kept if rank == edit.update.rank])
        for edit in edits
    ]


def _explained(edits: Sequence[Edit], explanations: Sequence[Explain]) -> str:
    for explain in explanations:
        words = [explain(edit) for edit in edits]
        if all(words):
            return words[0]
    return ""


# --- benign ---------------------------------------------------------------------------------------


def _is_put_back(edit: Edit) -> bool:
    near = [_are_near(was, now, edit.after[name]) for name, was, now in edit.values()]
    return len(near) == len(edit.after) and all(near)


def _constrained(edit: Edit) -> str:
    """Explain an edit that constrained each tensor, as the tensor's own values show."""
    telling = [(n, was, now) for n, was, now in edit.values() if was.size >= _TELLING_MIN]
    for name, was, now in telling:
        shape = edit.trace.shapes.get(name, was.shape)
        shaped = [v.reshape(shape) if v.size == np.prod(shape) else v for v in (was, now)]
        if not (_is_masked(was, now) or _is_bounded(was, now) or _is_rescaled(*shaped)):
            return ""
    constrained = "elements are set to zero, held to a bound, or rescaled by rows or columns"
    return constrained if telling else ""


def _is_masked(was: Values, now: Values) -> bool:
    return bool(((now == was) | (now == 0)).all())


def _is_bounded(was: Values, now: Values) -> bool:
    return bool(np.array_equal(np.clip(was, now.min(), now.max()), now))


def _is_rescaled(was: Values, now: Values) -> bool:
    """Return whether the tensor, or each row or column, became a positive multiple of itself."""
    axes = [None, *((axis,) for axis in range(was.ndim))] if was.ndim > 1 else [None]
    for kept in axes:
        summed = tuple(axis for axis in range(was.ndim) if kept is None or axis not in kept)
        if np.prod([was.shape[axis] for axis in summed]) < _TELLING_MIN:
            continue
        square = np.sum(was * was, axis=summed, keepdims=True)
        scale = np.sum(was * now, axis=summed, keepdims=True) / np.where(square, square, 1.0)
        rounding = _ROUNDINGS * precision.FLOAT32 * np.abs(now)
        if (scale >= 0).all() and bool((np.abs(scale * was - now) <= rounding).all()):
            return True
    return False


def _looks_ahead(edit: Edit) -> str:
    """Explain an edit that goes part of the way back to the slow weights of a lookahead.

    The slow weights are those after the previous edit. Before the first edit, they are those at the
    start, or after an earlier step.
    """
    way = {name: edit.before[name] for name in edit.after}
    for weights in edit.last:
        base = {name: weights[name] for name in edit.after if name in weights}
        part = weight_averages.share(base, edit.after, [way])
        if part and part < 1:
            since = "after the last such change, or after an earlier step"
            return f"it moved {part:.3g} of the way from its value {since} (lookahead)"
    return ""


def _averaged(edit: Edit) -> str:
    """Explain an edit that gives a rank the mean of all ranks' weights."""
    for name, was, now in edit.values():
        held = [weights[name].values() for weights in edit.peers.values() if name in weights]
        others = [other for other in held if other is not None and other.shape == was.shape]
        mean = sum(others, was) / (len(others) + 1)
        if not others or not _are_near(mean, now, edit.after[name]):
            return ""
    return "it is the mean of all ranks' weights"


def _brought_together(edit: Edit) -> str:
    """Explain an edit that leaves the same fraction of every distance between ranks.

    Then each rank went the same fraction of the way to one point that no rank had: the mean, or the
    result of an outer optimizer.
    """
    made = evidence.updates(edit.trace)[edit.update.step]
    peers = [(edit.peers[rank], made[rank].edited) for rank in edit.peers if rank in made]
    if any(map(edit.is_in, (edit.before, *edit.peers.values()))):
        return ""
    shares = {
        _share_left(name, (was, now), held) for name, was, now in edit.values() for held in peers
    }
    if len(shares) != 1 or None in shares:
        return ""
    return "ranks had diverged, and were synchronised (local SGD, its outer step)"


def _share_left(
    name: str, own: tuple[Values, Values], peer: tuple[Tensors, Tensors]
) -> float | None:
    """Return the fraction of a tensor's distance from another rank's that an edit leaves.

    Return None if the fraction differs between elements, or if distances don't shrink.
    """
    there = [of[name].values() for of in peer if name in of]
    others = [values for values in there if values is not None and values.shape == own[0].shape]
    if len(others) < len(peer):
        return None
    apart, left = own[0] - others[0], own[1] - others[1]
    size = float(np.vdot(apart, apart))
    share = float(np.vdot(apart, left)) / size if size else 1.0
    rounding = _ROUNDINGS * precision.FLOAT32 * float(np.linalg.norm(own[0]))
    is_share = float(np.linalg.norm(left - share * apart)) <= rounding
    return round(share, 3) if is_share and -_ROUND_SHARE < share < 1 - _ROUND_SHARE else None


def _caught_up(edit: Edit) -> str:
    made = evidence.updates(edit.trace)
    for step, by_rank in made.items():
        for rank, update in by_rank.items():
            if step >= edit.update.step and rank != edit.update.rank and edit.is_in(update.weights):
                return (
                    f"it took the value that rank {rank} has after more steps (a rank without "
                    "batches)"
                )
    return ""


def _are_near(was: Values, now: Values, record: TensorRecord) -> bool:
    unit = precision.unit_of({"": record})
    gap, size = float(np.linalg.norm(now - was)), float(np.linalg.norm(was))
    return gap <= _ROUNDINGS * unit * size


# --- errors ---------------------------------------------------------------------------------------


def _left_in(edit: Edit) -> str:
    """Explain an edit that puts an average into the model, where it stays after its use."""
    for label in edit.averages:
        copy = {name: edit.update.extra.get(f"{label}/{name}") for name in edit.after}
        known = {name: record for name, record in copy.items() if record is not None}
        if edit.is_in(known):
            return (
                f"became the average {label}, which was put into the model to save or evaluate "
                "it, and not removed again"
            )
    return ""


def _drawn_to_an_average(edit: Edit) -> str:
    """Explain an edit that goes part of the way to an average, which itself does not move.

    The target of a lookahead (its slow weights) moves, too, or isn't named like an average. That of
    a pull to other weights, such as a teacher's, is no copy of the weights that the run began with.
    """
    made = evidence.updates(edit.trace).get(edit.update.step - 1, {})
    earlier = made[edit.update.rank].extra if edit.update.rank in made else {}
    declared = {label for event in edit.trace.of(Declared) for label in event.averages}
    extra = edit.update.extra
    for label in {name.partition("/")[0] for name in extra}:
        if label not in declared and not _AVERAGE.search(label):
            continue
        copy = {n: extra[f"{label}/{n}"] for n in edit.after if f"{label}/{n}" in extra}
        stays = all(
            f"{label}/{name}" in earlier and earlier[f"{label}/{name}"].digest == record.digest
            for name, record in copy.items()
        )
        if not stays or copy.keys() != edit.after.keys():
            continue
        if label not in declared and not _is_first(copy, edit):
            continue
        part = weight_averages.share({n: edit.before[n] for n in copy}, edit.after, [copy])
        if part and part < 1:
            return (
                f"went {part:.3g} of the way to {label}, which stays as it was: the weights "
                "follow their average, but the average should follow the weights; exchange "
                "the two"
            )
    return ""


def _is_first(copy: Tensors, edit: Edit) -> bool:
    """Return whether a copy has the weights with which the edit's rank began."""
    begun = next((one for one in edit.trace.of(Start) if one.rank == edit.update.rank), None)
    return begun is not None and all(
        name in begun.weights and begun.weights[name].digest == record.digest
        for name, record in copy.items()
    )


def _of_an_earlier_step(edit: Edit) -> str:
    """Explain an edit that restores an earlier step's weights, but not the optimizer's state."""
    rank, step = edit.update.rank, edit.update.step
    updates = evidence.updates(edit.trace)
    earlier = {
        at: by_rank[rank] for at, by_rank in updates.items() if at < step - 1 and rank in by_rank
    }
    for at, update in earlier.items():
        if edit.is_in(update.weights) and _counts_on(updates[step - 1].get(rank), edit.update):
            return (
                f"has its value from after step {at} again, although the optimizer went on: "
                "weights were swapped for an evaluation and not swapped back"
            )
    return ""


def _intended(edits: Sequence[Edit], trace: Trace, harm: str) -> str:
    """Return what a script may have meant by the edits that `harm` explains; "" if nothing."""
    steps = {edit.update.step for edit in edits}
    swapped = {shard.step for shard in trace.of(Shard) if shard.swapped}
    if harm == _explained(edits, (_of_rank_0,)):
        return ""
    if harm == _explained(edits, (_of_an_earlier_step,)):
        if _may_start_over(edits, trace):
            return "the script loads its best weights again after an evaluation that was worse"
        return "" if steps <= swapped else "the script goes back to these weights and trains on"
    used = swapped.union(trace.traits.saved_after)
    return "" if steps <= used else "the script trains on from the average"


def _may_start_over(edits: Sequence[Edit], trace: Trace) -> bool:
    """Return whether edits follow some evaluations or ends of epochs, but not all of them.

    When the validation loss rises, some scripts go on from the best weights, and leave the
    optimizer as it is. The record shows no loss of an evaluation.
    """
    occasions, epoch = set[int](), 0
    for step, shards in sorted(evidence.shards(trace).items()):
        now = max(shard.epoch for shard in shards)
        if now > epoch or any(shard.evaluated for shard in shards):
            occasions.add(step)
        epoch = max(epoch, now)
    return {edit.update.step for edit in edits} < occasions


def _counts_on(before: Update | None, update: Update) -> bool:
    """Return whether the optimizer's own count of steps continues, as far as it keeps one."""
    counts = [
        [one.optimizer[name].values() for name in one.optimizer if name.endswith("/step")]
        for one in (before, update)
        if one is not None
    ]
    if len(counts) < 2 or not counts[1] or len(counts[0]) != len(counts[1]):
        return False
    return all(
        was is not None and now is not None and was.shape == now.shape and (was + 1 == now).all()
        for was, now in zip(*counts, strict=True)
    )


def _of_rank_0(edit: Edit) -> str:
    if edit.update.rank and edit.is_in(edit.peers.get(0, {})):
        return (
            f"were replaced by rank 0's on rank {edit.update.rank}, which had different values: "
            "ranks had diverged, and the training of this rank is lost"
        )
    return ""


_BENIGN: tuple[Explain, ...] = (
    _constrained,
    _looks_ahead,
    _averaged,
    _brought_together,
    _caught_up,
)
_HARMFUL: tuple[Explain, ...] = (_left_in, _of_an_earlier_step, _of_rank_0)


# --- tensors that require no gradient -------------------------------------------------------------


_UNIT = 16 * precision.FLOAT32  # relative error of a product of adapters, added to a weight
_ROUNDING = 4 * precision.FLOAT32  # relative error of a sum and a difference
_SHRUNK_LEAST = 0.9  # the smallest factor of a weight in one step's decay
_ALIKE = 1e-5
_PARTS_MAX = 3  # parts of a name below the module that has a weight and its adapters, at most


@dataclass(frozen=True)
class Moves:
    """The moves of the frozen tensors `names` of one rank, from `start` through `updates`."""

    trace: Trace
    start: Start
    updates: Sequence[Update]
    names: Sequence[str]

    def of(self, name: str) -> Iterator[tuple[Update, Tensors, Values, Values]]:
        """Yield each move of a tensor: the update, all weights before it, and two arrays of values.

        The arrays are the tensor before and after the move. Moves without recorded values are
        skipped.
        """
        held = [self.start.weights, *(update.weights for update in self.updates)]
        for update, (before, after) in zip(self.updates, pairwise(held), strict=True):
            if name not in before or name not in after:
                continue
            was, now = before[name].values(), after[name].values()
            if before[name].digest != after[name].digest and was is not None and now is not None:
                yield update, before, was.astype(np.float64), now.astype(np.float64)


def explained(moves: Moves) -> Explanation | None:
    """Return the explanation that all moves follow from, or None."""
    return _rounded(moves) or _merged(moves) or _shrunk(moves)


def _rounded(moves: Moves) -> Explanation | None:
    steps = [(was, now) for name in moves.names for _, _, was, now in moves.of(name)]
    if not steps or any(
        np.linalg.norm(now - was) > _ROUNDING * np.linalg.norm(was) for was, now in steps
    ):
        return None
    words = "moved by no more than a rounding: a change was added and subtracted again"
    return Explanation(words, is_wrong=False)


def _merged(moves: Moves) -> Explanation | None:
    """Explain moves by adapters that were added to the weights that they adapt.

    It is a mistake if the adapters stay in use; it is benign if they start over from zero.
    """
    merges = [_merge(moves, name) for name in moves.names]
    known = [merge for merge in merges if merge is not None]
    if not known or len(known) < len(merges):
        return None
    first, second, _ = known[0]
    movement = f"moved by the product of {first} and {second}"
    if all(are_emptied for *_, are_emptied in known):
        return Explanation(f"{movement}, which start over from zero", is_wrong=False)
    if any(are_emptied for *_, are_emptied in known):
        return None
    return Explanation(
        f"it {movement}, which stay in use: adapters were merged into the weights that they "
        "adapt, to save or serve them, and not unmerged",
        tensor=moves.names[0],
    )


def _merge(moves: Moves, name: str) -> tuple[str, str, bool] | None:
    """Return two adapters with a product that moves a tensor, and whether they were reset to zero.

    Return None if there are none, or if the script changed the adapters in a different way when
    they were merged.
    """
    shapes = moves.trace.shapes
    shape, moved = shapes.get(name, ()), [*moves.of(name)]
    near = [other for other in moves.start.trainable if _share_a_module(name, other)]
    for pair in permutations(near, 2):
        second, first = pair
        inner = shapes.get(first, ())[:1]
        flat = (*shapes.get(second, ()), *shapes.get(first, ()))
        if len(shape) != 2 or flat != (shape[0], *inner, *inner, shape[1]):
            continue
        if moved and all(
            _is_multiple(now - was, was, [*_products(move, held, pair, shapes)])
            for move, held, was, now in moved
        ):
            edits = [
                move.edited[n].values() for move, *_ in moved for n in pair if n in move.edited
            ]
            if all(edit is not None and not edit.any() for edit in edits):
                return first, second, bool(edits)
    return None


def _share_a_module(name: str, other: str) -> bool:
    parts, others = name.split("."), other.split(".")
    common = 0
    while parts[common : common + 1] == others[common : common + 1] and common < len(parts):
        common += 1
    return max(len(parts), len(others)) - common <= _PARTS_MAX


def _products(
    update: Update, before: Tensors, pair: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Values]:
    """Yield the products that may be in a weight: of the adapters before and after the step."""
    for held in (before, update.weights):
        values = [held[name].values() if name in held else None for name in pair]
        factors = [
            value.astype(np.float64).reshape(shapes[name])
            for name, value in zip(pair, values, strict=True)
            if value is not None
        ]
        if len(factors) == len(pair):
            yield (factors[0] @ factors[1]).ravel()


def _is_multiple(move: Values, was: Values, products: Sequence[Values]) -> bool:
    """Return whether a tensor moved by a positive multiple of one of `products`."""
    for product in products:
        square = float(product @ product)
        scale = float(product @ move) / square if square else 0.0
        size = np.abs(was) + float(np.linalg.norm(scale * product))
        if scale > 0 and bool((np.abs(move - scale * product) <= _UNIT * size).all()):
            return True
    return False


def _shrunk(moves: Moves) -> Explanation | None:
    """Explain moves that multiply all frozen tensors by one number below 1, in the same steps."""
    frozen = {name for name in moves.start.frozen if _is_telling(moves.start.weights.get(name))}
    factors: dict[int, dict[str, float | None]] = {}
    for name in moves.names:
        for update, _, was, now in moves.of(name):
            factors.setdefault(update.step, {})[name] = _factor(was, now)
    numbers = [number for named in factors.values() for number in named.values()]
    known = [number for number in numbers if number is not None]
    if len(known) < max(2, len(numbers)) or max(known) - min(known) > _ALIKE:
        return None
    if len(frozen) < 2 or any(named.keys() != frozen for named in factors.values()):
        return None
    return Explanation(
        f"all {len(frozen)} tensors that require no gradient are multiplied by {known[0]:.6g}: "
        "the script decays weights by hand, including the weights of a frozen network",
        tensor=moves.names[0],
    )


def _factor(was: Values, now: Values) -> float | None:
    square = float(was @ was)
    factor = float(was @ now) / square if square else 0.0
    fits = bool((np.abs(now - factor * was) <= 2 * precision.FLOAT32 * np.abs(was)).all())
    return factor if fits and _SHRUNK_LEAST <= factor < 1 - _ALIKE else None


def _is_telling(record: TensorRecord | None) -> bool:
    values = None if record is None else record.values()
    return values is not None and bool(values.any())
