"""Functions, shared by several judges, to read and compare traces."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from entrenar_py.checks import factors, run_names
from entrenar_py.checks.needs import CALM, Traces
from entrenar_py.faults import SURVIVED
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Event, Shard, Start, TensorRecord, Tensors, Trace, Update
from entrenar_py.verdict import Tally

Values = NDArray[Any]


def usable(traces: Iterable[Trace], tally: Tally) -> list[Trace]:
    """Return the traces of runs that did not fail. Count the failed ones as missing."""
    kept = []
    for trace in traces:
        if trace.end.status == "failed":
            scenario = trace.scenario
            who = f"{scenario.system} with {scenario.world_size} workers did not run to an end"
            if tally.observed:
                who = f"{run_names.of(scenario)} failed"
            tally.miss(f"{who}: {trace.end.reason}")
        else:
            kept.append(trace)
    return kept


def usable_runs(runs: Traces, tally: Tally) -> Traces:
    """Return `runs` without the failed ones, and count those as missing."""
    usable(runs, tally)
    return runs.chosen(lambda trace: None if trace.end.status == "failed" else trace)


def is_as_trained(trace: Trace) -> bool:
    """Return whether the scenario has no fault that changes the results of the training."""
    return all(fault.kind in SURVIVED for fault in trace.scenario.faults)


def could_run(tally: Tally, trace: Trace) -> bool:
    """Return whether a run began. If not, count the reason as missing."""
    if trace.end.status == "failed" and not trace.of(Start):
        tally.miss(f"{trace.scenario.system} could not be run: {trace.end.reason}")
        return False
    return True


def calm_run(tally: Tally, trace: Trace, runs: Traces) -> Trace | None:
    """Return the run without faults whose bits `trace` must have; if None, count why as missing."""
    if not could_run(tally, trace):
        return None
    if "bitwise" not in trace.promises:
        tally.miss(f"{trace.scenario.system} promises no bits to compare")
        return None
    if not runs.of(CALM):
        tally.miss("no undisturbed run of the same training to compare with: record one, too")
        return None
    return runs.of(CALM)[0]


def place(trace: Trace, event: Event) -> dict[str, Any]:
    """Return a counterexample's fields: step, rank and shard of `event`, scenario and shapes."""
    known = {
        name: getattr(event, name) for name in ("step", "rank", "shard") if hasattr(event, name)
    }
    return {**known, "scenario": trace.scenario, "shapes": trace.shapes}


def updates(trace: Trace) -> dict[int, dict[int, Update]]:
    """Return step -> rank -> the last update in the step, without updates that a resume undid."""
    by_step: dict[int, dict[int, Update]] = defaultdict(dict)
    for update in trace.standing.of(Update):
        by_step[update.step][update.rank] = update
    return dict(by_step)


def shards(trace: Trace) -> dict[int, list[Shard]]:
    """Return step -> shards, sorted by number, for the steps that were made and not undone."""
    kept = trace.standing
    committed = {update.step for update in kept.of(Update)}
    by_step: dict[int, list[Shard]] = defaultdict(list)
    for shard in kept.of(Shard):
        if shard.step in committed:
            by_step[shard.step].append(shard)
    return {step: sorted(part, key=lambda s: (s.shard, s.rank)) for step, part in by_step.items()}


def with_losses(trace: Trace) -> Trace:
    """Return `trace` with each missing loss of an update computed from the step's shards.

    Losses of an unknown scale are no means, and are left out.
    """
    if trace.traits.losses == "backward" or all(
        update.loss is not None for update in trace.of(Update)
    ):
        return trace
    means = {}
    for step, of_step in shards(trace).items():
        weight = sum(shard.weight for shard in of_step)
        sums = [shard.loss_sum for shard in of_step if shard.loss_sum is not None]
        if weight and len(sums) == len(of_step):
            means[step] = sum(sums) / weight
    events = (
        replace(event, loss=means.get(event.step))
        if isinstance(event, Update) and event.loss is None
        else event
        for event in trace.events
    )
    return replace(trace, events=tuple(events))


def non_finite(tensors: Tensors) -> tuple[str, int | None] | None:
    """Return the tensor's name and element's index of the first recorded NaN or Inf, or None.

    The index is None if the tensor has only a sketch.
    """
    for name, record in tensors.items():
        if record.sketch is not None and not math.isfinite(record.square() or 0.0):
            return name, None
        values = record.values()
        if values is not None and not (finite := np.isfinite(values)).all():
            return name, int(finite.argmin())
    return None


def any_rank(by_rank: Mapping[int, Update]) -> Update:
    """Return the update of the lowest rank."""
    return by_rank[min(by_rank)]


def compare_exact(
    tally: Tally, expected: Tensors, got: Tensors, message: str, *, words: str = "", **place: Any
) -> None:
    """Compare bit for bit, one comparison per tensor. A tensor on one side only is a difference.

    The message ends with `words`, or with how one tensor follows from the other if that is simple.
    """
    for name in [*expected, *(name for name in got if name not in expected)]:
        left, right = expected.get(name), got.get(name)
        if left is None or right is None:
            holder = "expected" if right is None else "got"
            tally.check(False, f"{message}: only {holder} holds {name}", tensor=name, **place)
        elif left.digest == right.digest:
            tally.compared += 1
        else:
            shown = difference(left, right)
            told = f": {words}" if words else _relation(left, right, place.get("scenario"))
            tally.check(False, f"{message}: {name} differs{told}", tensor=name, **shown, **place)


def _relation(expected: TensorRecord, got: TensorRecord, scenario: Scenario | None) -> str:
    left, right = expected.vector(), got.vector()
    if left is None or right is None:
        return ""
    words = factors.of(left, right, scenario)
    return f": {words}" if words else ""


def compare_updates(
    tally: Tally, model: Trace, trace: Trace, part: str, message: str, *, before: float = math.inf
) -> None:
    """Compare `part` of each update with `model`'s lowest rank's, bitwise, before step `before`."""
    expected = updates(model)
    for step, by_rank in ranks_by_step(trace):
        for _, update in sorted(by_rank.items()):
            if step < before and step not in expected:
                tally.check(False, f"step {step} is not in the other run", **place(trace, update))
            elif step < before:
                wanted, got = getattr(any_rank(expected[step]), part), getattr(update, part)
                compare_exact(tally, wanted, got, message, **place(trace, update))


def compare_steps_made(tally: Tally, lost: Iterable[int], trace: Trace, words: str = "") -> None:
    """Count one comparison, which fails if there are steps `lost` that the run did not make."""
    steps = sorted(lost)
    message = f"{words}steps {steps[:5]} were never made"
    tally.check(not steps, message, step=min(steps, default=None), scenario=trace.scenario)


def difference(expected: TensorRecord, got: TensorRecord) -> dict[str, Any]:
    """Return the first differing element, with both values; digests if values are unknown."""
    left, right = expected.values(), got.values()
    if left is None or right is None:
        return {"expected": expected.digest, "got": got.digest}
    if (left.size, left.dtype) != (right.size, right.dtype):
        return {
            "expected": f"{left.size} elements of {left.dtype}",
            "got": f"{right.size} elements of {right.dtype}",
        }
    bits = left.view(np.uint8) != right.view(np.uint8)
    if not bits.any():  # the values were edited, or the digest was
        return {"expected": expected.digest, "got": got.digest}
    element = int(bits.argmax()) // left.itemsize
    return {"element": element, "expected": str(left[element]), "got": str(right[element])}


# A gradient's rounding error is proportional to its terms. In one tensor these may cancel almost
# completely, so each tensor's norm is taken to be at least 1 / NOISE_SHARE of the norm of all.
NOISE_SHARE = 32


# |P x|^2 / |x|^2 of a projection P x (`trace.Sketch`) has a chi-square distribution of 32 degrees,
# over 32, or a narrower one. A distance is over twice the true one with a probability of 1e-13, and
# under half of it of 1e-6. So distances of projections may be this much larger than allowed.
PROJECTED = 2.0


def norm_l2(tensors: Tensors) -> float | None:
    """Return the L2 norm of all elements of all tensors; None without values and sketches."""
    squares = [record.square() for record in tensors.values()]
    known = [square for square in squares if square is not None]
    return math.sqrt(sum(known)) if known and len(known) == len(squares) else None


def compare_close(
    tally: Tally,
    expected: Tensors,
    got: Tensors,
    bound: float,
    message: str,
    floor: float = 0.0,
    *,
    explain: Callable[[], str] = str,
    **place: Any,
) -> bool:
    """Count one comparison per tensor: |got - expected| <= bound |expected| + floor, in L2 norms.

    |expected| is the tensor's own norm, so that a small tensor can't hide behind a large one. It is
    taken to be at least 1 / NOISE_SHARE of the norm over all tensors, so that a tensor of rounding
    noise does not fail. The distance of tensors with sketches is that of their projections, which
    may be PROJECTED times as large. `explain` says why a tensor is off that is no simple multiple
    of the right one. Return False, and count nothing, if a tensor has neither values
    nor a sketch, or if one side alone has a sketch of it.
    """
    gaps = distances(expected, got)
    if gaps is None:
        return False
    for name, record in expected.items():
        if name not in gaps:
            if name not in got or got[name].size != record.size:
                what = f"{message}: {name} is missing or reshaped"
                tally.check(False, what, tensor=name, **place)
            continue
        gap = gaps[name]
        sketched = record.sketch is not None
        allowed = PROJECTED * bound if sketched else bound
        near = gap.distance <= allowed * gap.size + (PROJECTED * floor if sketched else floor)
        words = ""
        if not near:
            words = factors.of(gap.expected, gap.got, place.get("scenario"), bound)
            if not words and tally.would_keep(place.get("step", 0)):
                words = explain()
        tally.check(
            near,
            f"{message}: {name} is off by {gap.relative:.2g} of its norm, allowed {allowed:.2g}"
            f"{words and f': {words}'}",
            tensor=name,
            **_furthest(record, got[name], gap.elements),
            **place,
        )
    return True


class Gap(NamedTuple):
    """Two tensors' values or projections, flat, and how far they are apart.

    `elements` are the distances of each, `distance` their L2 norm, and `size` the norm that it is
    compared with.
    """

    expected: Values
    got: Values
    elements: Values
    distance: float
    size: float

    @property
    def relative(self) -> float:
        """The distance as a share of the size, or by itself if that is zero."""
        return self.distance / self.size if self.size else self.distance


def distances(expected: Tensors, got: Tensors) -> dict[str, Gap] | None:
    """Return how far tensors of a name are apart, those that are empty or of other sizes left out.

    Return None if a tensor has neither values nor a sketch, or if one side alone has a sketch.
    """
    left, right, scale = vectors(expected), vectors(got), norm_l2(expected)
    if left is None or right is None or scale is None:
        return None
    if any(
        (record.sketch is None) != (got[name].sketch is None)
        for name, record in expected.items()
        if name in got
    ):
        return None
    gaps = {}
    for name, value in left.items():
        if name not in right or got[name].size != expected[name].size or not value.size:
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(right[name].astype(np.float64) - value)
            distance = float(np.sqrt(np.square(apart).sum()))
        size = max(math.sqrt(expected[name].square() or 0.0), scale / NOISE_SHARE)
        gaps[name] = Gap(value, right[name], apart, distance, size)
    return gaps


def _furthest(expected: TensorRecord, got: TensorRecord, gap: Values) -> dict[str, Any]:
    """Return the element that differs most, with both values; norms if these are unknown."""
    left, right = expected.values(), got.values()
    if left is None or right is None:
        norms = (math.sqrt(record.square() or 0.0) for record in (expected, got))
        return dict(zip(("expected", "got"), (f"norm {norm:.9g}" for norm in norms), strict=True))
    element = int(gap.argmax()) if np.isfinite(gap).all() else int(np.argmin(np.isfinite(gap)))
    return {"element": element, "expected": str(left[element]), "got": str(right[element])}


def vectors(tensors: Tensors) -> dict[str, Values] | None:
    """Return the elements of each tensor, flat, or its projection; None if one has neither."""
    vector_of = {name: record.vector() for name, record in tensors.items()}
    known = {name: vector for name, vector in vector_of.items() if vector is not None}
    return known if known and len(known) == len(vector_of) else None


def elements(tensors: Tensors) -> dict[str, Values] | None:
    """Return the elements of each tensor, flat, or those in its sketch; None if one has neither."""
    elements_of = {name: record.elements() for name, record in tensors.items()}
    known = {name: found for name, found in elements_of.items() if found is not None}
    return known if known and len(known) == len(elements_of) else None


def has_values(tensors: Tensors) -> bool:
    """Return whether the values or a sketch of at least one tensor were recorded."""
    return any(record.data is not None or record.sketch for record in tensors.values())


def ranks_by_step(trace: Trace) -> Iterator[tuple[int, Mapping[int, Update]]]:
    """Yield each step with its updates by rank, in step order."""
    yield from sorted(updates(trace).items())
