"""Test whether a tensor's name means the same tensor in both runs, and a whole copy on each rank.

A user's wrapper adds parts to the names, and often wraps only with several workers. Model
parallelism that a script implements itself in plain tensors looks like data parallelism: ranks hold
tensors of the same names and shapes, with different values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.causes import explanations, loss_terms
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.evidence import step_sums
from entrenar_py.check.evidence.run_names import run_name
from entrenar_py.shared.faults import JOINED, MIRRORED
from entrenar_py.shared.trace import Event, Shard, Start, Synchronised, Trace, Update
from entrenar_py.shared.wording import listed

_SHOWN = 2  # names in a reason, at most


def other_names(compared: Compared) -> str:
    """Return why names don't mean the same tensors in two runs, or on ranks; "" if they do."""
    for trace in (compared.trace, compared.model):
        if why := apart_on_ranks(trace):
            return why
    if compared.is_one_run:
        return ""
    names, model_names = known_names(compared.trace), known_names(compared.model)
    if not names or not model_names or names == model_names:
        return ""
    only, model_only = sorted(names - model_names), sorted(model_names - names)
    run, model = run_name(compared.trace), run_name(compared.model)
    parts = [
        f"{name} holds {listed(some, most=_SHOWN)}"
        for name, some in ((run, only), (model, model_only))
        if some
    ]
    return (
        f"the runs name their tensors differently: {', '.join(parts)}: give observe() the same "
        "module in every run, the model itself and not a wrapper around it"
    )


def apart_on_ranks(trace: Trace) -> str:
    """Return why ranks without a layout hold tensors of different names; "" if they don't."""
    by_rank = names_of_ranks(trace)
    if trace.traits.shared or len(by_rank) < 2:
        return ""
    (first, names), *others = sorted(by_rank.items())
    for rank, held in others:
        if apart := sorted(held ^ names):
            owner = rank if apart[0] in held else first
            return (
                f"ranks {first} and {rank} hold tensors of different names (only rank {owner} "
                f"holds {apart[0]}): say how the ranks share the model, "
                'observe(..., layout={"pp": ...}) for stages, {"ep": ...} for experts'
            )
    return ""


def names_of_ranks(trace: Trace) -> Mapping[int, Set[str]]:
    """Return rank -> the names of the weights at its first start, if they were recorded."""
    names: dict[int, Set[str]] = {}
    for start in trace.of(Start):
        if start.weights:
            names.setdefault(start.rank, start.weights.keys())
    return names


def known_names(trace: Trace) -> Set[str]:
    """Return the names of all weights at the start of any rank."""
    return frozenset[str]().union(*names_of_ranks(trace).values())


def aligned(model: Trace, trace: Trace) -> Trace:
    """Return `model` with its tensors named as in `trace`, if only one renaming is possible.

    Otherwise return `model` unchanged.
    """
    names, like = (
        known_names(run) | {name for start in run.of(Start) for name in start.buffers}
        for run in (model, trace)
    )
    if known_names(model) == known_names(trace):
        return model
    named = _matched(names, like)
    return model if named is None else renamed(model, named)


def _matched(names: Set[str], like: Set[str]) -> dict[str, str] | None:
    """Return name -> the name in `like` of the same tensor; None if that is unclear.

    Two names correspond if they are equal without the parts (between dots) that occur in one run
    only, or without the leading parts that all names of their run share.
    """
    parts, like_parts = ({p for n in some for p in n.split(".")} for some in (names, like))
    for short, short_like in (
        (_without_parts(names, parts - like_parts), _without_parts(like, like_parts - parts)),
        (_without_beginning(names), _without_beginning(like)),
    ):
        is_clear = len(short) == len(names) and len(short_like) == len(like)
        if is_clear and short.keys() == short_like.keys():
            return {name: short_like[key] for key, name in short.items()}
    return None


def _without_parts(names: Iterable[str], parts: Set[str]) -> dict[str, str]:
    return {".".join(p for p in name.split(".") if p not in parts): name for name in names}


def _without_beginning(names: Set[str]) -> dict[str, str]:
    """Return short name -> name; the short name lacks the leading parts that all names share."""
    split = [name.split(".") for name in names]
    common = 0
    while split and all(len(parts) > common + 1 for parts in split):
        if len({parts[common] for parts in split}) > 1:
            break
        common += 1
    return {".".join(parts[common:]): ".".join(parts) for parts in split}


def renamed(trace: Trace, named: Mapping[str, str]) -> Trace:
    """Return `trace` with its tensors renamed; `named` maps old names to new ones."""
    return replace(trace, events=tuple(evidence.event_renamed(e, named) for e in trace.events))


# --- tensors that every rank holds whole ----------------------------------------------------------


_ALIKE = 1e-3  # relative: factors by different numbers of workers differ by more
_SAME_LOSS = 1e-4  # relative; losses that couple samples, or of different samples, differ by more
Shape = tuple[int, ...]
_FIELDS = ("weights", "buffers", "gradient")


def lacking(compared: Compared) -> str:
    """Return why some tensors of the judged run may not be whole copies; "" if all are."""
    return _pieces_told(compared, pieces(compared)) or _own_told(compared, own(compared))


def without(compared: Compared) -> Compared | None:
    """Return the comparison without tensors that may not be copies; None if nothing is left."""
    lost = pieces(compared).keys() | own(compared)
    if not compared.is_one_run or known_names(compared.trace) <= lost:
        return None
    return compared.both(lambda trace: _without(trace, lost))


def pieces(compared: Compared) -> Mapping[str, tuple[Shape, Shape]]:
    """Return name -> (shape on a rank, shape in the other run), for tensors that differ in shape.

    The other run is `compared.model`, or the run on one worker if only one run is compared. If the
    other run lacks the tensor, the largest shape on any rank is used.
    """
    due, shapes_of = _due_shapes(compared), _shapes(compared.trace)
    wholes = {
        name: due.get(name) or {max(shapes, key=lambda shape: (math.prod(shape), shape))}
        for name, shapes in shapes_of.items()
    }
    return {
        name: (min(shapes - wholes[name]), min(wholes[name]))
        for name, shapes in shapes_of.items()
        if shapes - wholes[name]
    }


def _pieces_told(compared: Compared, shapes_of: Mapping[str, tuple[Shape, Shape]]) -> str:
    if not shapes_of:
        return ""
    name, (shape, due) = next(iter(shapes_of.items()))
    model = compared.alone if compared.is_one_run else compared.model
    if model is None or name not in _due_shapes(compared):
        return (
            f"in {run_name(compared.trace)} {name} has {_elements(shape)} on one rank and "
            f"{_elements(due)} on another: the name means different tensors; if each rank has a "
            "part of the model, give observe() a module in which its tensors have names of their "
            'own (stages.1.0.weight), and say layout={"pp": 2}'
        )
    held = f"in {run_name(compared.trace)} a rank's {name} has {_elements(shape)}"
    return (
        f"{held}, in {run_name(model)} {_elements(due)}: ranks that hold pieces in plain tensors "
        "can't be compared; keep the pieces as DTensors (DTensor.from_local), so that their "
        "positions are known"
    )


def _elements(shape: Shape) -> str:
    return f"{'x'.join(map(str, shape)) or 1} elements"


def _due_shapes(compared: Compared) -> dict[str, set[Shape]]:
    model = compared.alone if compared.is_one_run else compared.model
    if model is None or model is compared.trace:
        return {}
    return _shapes(aligned(model, compared.trace))


def _shapes(trace: Trace) -> dict[str, set[Shape]]:
    """Return tensor -> its shapes on the ranks that recorded them.

    Files of earlier releases have no shapes. For these a shape is the number of elements, if known.
    """
    shapes: dict[str, set[Shape]] = {}
    for start in trace.of(Start):
        shape_of: dict[str, Shape] = dict(start.shapes)
        if not shape_of:
            sizes = {name: record.size for name, record in start.weights.items()}
            shape_of = {name: (size,) for name, size in sizes.items() if size is not None}
        for name, shape in shape_of.items():
            shapes.setdefault(name, set()).add(tuple(shape))
    return shapes


# --- tensors that belong to one rank --------------------------------------------------------------


def own(compared: Compared) -> Set[str]:
    """Return the tensors that may belong to each rank separately, like experts and pieces.

    Ranks begin with different values for them and apply different gradients. (A tensor that was
    merely not broadcast gets the same gradients.) If shapes show that no tensor is a piece, ranks
    must also train other tensors on which they agree: otherwise nothing is synchronised at all.
    Return none if a layout is declared, since it says which ranks hold copies.
    """
    trace = compared.trace
    starts = {s.rank: s for s in reversed(trace.of(Start)) if s.step == 0 and not s.resumed}
    first = evidence.updates(trace).get(0, {})
    if trace.traits.shared or len(starts) < 2 or starts.keys() != first.keys():
        return frozenset()
    trained = starts[min(starts)].trainable
    apart = {
        name
        for name in trained
        if evidence.differ(name, [start.weights for start in starts.values()])
        and evidence.differ(name, [update.gradient for update in first.values()])
    }
    agreed = any(
        not evidence.differ(name, [update.weights for update in first.values()])
        and evidence.differ(name, [starts[min(starts)].weights, first[min(first)].weights])
        for name in trained
    )
    is_whole = bool(_due_shapes(compared) and _shapes(trace)) and not pieces(compared)
    return frozenset(apart) if agreed or not is_whole else frozenset()


def _own_told(compared: Compared, names: Set[str]) -> str:
    if not names:
        return ""
    size = compared.trace.scenario.world_size
    unknown = (
        "" if _due_shapes(compared) else " (the run on one worker, which would tell, is missing)"
    )
    return (
        f"each rank begins with its own {listed(sorted(names), most=_SHOWN)} and applies its own "
        f"gradients to it: a copy, a piece or an expert{unknown}; if these should be copies, say "
        f'observe(..., layout={{"dp": {size}}}); if each rank has an expert, give it a name of '
        f'its own (experts.3.weight), and say layout={{"ep": {size}}}'
    )


def shared_samples(compared: Compared) -> str:
    """Return why ranks may share the samples that they draw; "" if each draws its own.

    They may share samples if all draw the same ones in each step, and hold different tensors, or
    pieces of the same tensors.
    """
    trace = compared.trace
    apart, size = bool(apart_on_ranks(trace)), trace.scenario.world_size
    if trace.traits.shared or not (apart or lacking(compared)) or not _all_draw_alike(trace):
        return ""
    if apart:
        axis, other = "pp", 'or "ep" in place of "pp" for experts'
    else:
        axis, other = "tp", "if each rank has a part of each layer"
    return (
        "all ranks draw the same samples, and hold different tensors of the model: "
        "if they share the model, say so: observe(..., "
        f'layout={{"{axis}": {size}}}), {other}'
    )


def summed_parts(compared: Compared) -> str:
    """Return why a sum over a batch may rightly depend on the number of workers; or "".

    There are two cases. All ranks draw the same rows, and torch's layers are told that the batch is
    cut by rows: then the rows of each rank count as different ones, and a sum over them contains
    each row once per rank. Or the script sets the size of one worker's batch, and one worker got
    the batches of all: then the mean of the workers' sums is a sum over one worker's number of
    samples, but one worker's sum is over all.
    """
    trace, num_workers = compared.trace, compared.trace.scenario.world_size
    factor = _factor_of_all(compared)
    if factor is None or compared.model.scenario.world_size == num_workers:
        return ""
    shards = trace.of(Shard)
    is_found = trace.traits.shared and trace.traits.losses == "backward"
    if is_found and _is_near(factor, num_workers) and loss_terms.are_all(shards, means=False):
        return (
            f"all {num_workers} ranks draw the same rows, and their sum counts "
            f"{num_workers} times: right if each rank has a part of the batch, and "
            "wrong if each has the whole batch; in the first case seed each rank "
            "differently, in the second take the mean over the rows"
        )
    kinds = {fault.kind for fault in compared.model.scenario.faults}
    is_merged = not kinds.isdisjoint(JOINED) and MIRRORED not in kinds
    runs = (compared.model, trace)
    is_mean = loss_terms.are_all(shards, means=True) or all(
        map(loss_terms.are_means_of_steps, runs)
    )
    if is_merged and _is_near(factor, 1 / num_workers) and not is_mean:
        return (
            f"{num_workers} workers take the mean of their losses, and each may be a "
            "sum over a worker's batch: it is unknown what one worker would compute "
            "instead; take the mean over the batch"
        )
    return ""


def not_given(compared: Compared) -> str:
    """Return what may make one worker train differently with several workers' batches; or "".

    One worker's batches were replaced by those of several workers. Something that was not replaced
    with them may make the runs differ.
    """
    if not explanations.is_given(compared.model) or compared.difference is None:
        return ""
    workers = compared.trace.scenario.world_size
    return (
        f"one worker draws different samples from {workers} workers, and trains "
        "differently even if its model gets their samples: the script may be "
        "wrong, or something else depends on the samples; divide the global batch "
        "by the number of workers ({share:GLOBAL} in the command does), and draw "
        "it in the same way for any number of workers"
    )


def have_one_loss(compared: Compared) -> bool:
    """Return whether the first loss is known to be the same in both runs."""
    means = [_first_loss(run) for run in (compared.model, compared.trace)]
    known = [mean for mean in means if mean is not None]
    return len(known) == len(means) and math.isclose(*known, rel_tol=_SAME_LOSS)


def _first_loss(trace: Trace) -> float | None:
    shards = evidence.shards(trace).get(0, ())
    sums = [shard.loss_sum for shard in shards if shard.loss_sum is not None]
    weight = sum(shard.weight for shard in shards)
    return sum(sums) / weight if weight and len(sums) == len(shards) else None


def _factor_of_all(compared: Compared) -> float | None:
    due, got = evidence.updates(compared.model), evidence.updates(compared.trace)
    step = min(due.keys() & got.keys(), default=None)
    if step is None:
        return None
    right, applied = (evidence.any_rank(updates[step]).gradient for updates in (due, got))
    return step_sums.ratio(right, applied, _ALIKE)


def _is_near(factor: float, due: float) -> bool:
    return abs(factor - due) <= _ALIKE * due


def _all_draw_alike(trace: Trace) -> bool:
    """Return whether all ranks draw the same samples in each step, and some are known."""
    drawn: dict[int, dict[int, list[int]]] = {}
    for shard in trace.of(Shard):
        drawn.setdefault(shard.step, {}).setdefault(shard.rank, []).extend(shard.ids)
    num_ranks = trace.scenario.world_size
    return bool(drawn) and all(
        len(of_step) == num_ranks and len({*map(tuple, of_step.values())}) == 1
        for of_step in drawn.values()
    )


# --- what remains ---------------------------------------------------------------------------------


def _without(trace: Trace, names: Set[str]) -> Trace:
    return replace(trace, events=tuple(_event_without(event, names) for event in trace.events))


def _event_without(event: Event, names: Set[str]) -> Event:
    if not isinstance(event, Start | Update | Shard | Synchronised):
        return event
    changes: dict[str, Any] = {
        field: {name: item for name, item in held.items() if name not in names}
        for field in _FIELDS
        if (held := getattr(event, field, None))
    }
    if state := getattr(event, "optimizer", None):
        changes["optimizer"] = {
            key: item for key, item in state.items() if key.partition("/")[0] not in names
        }
    return replace(event, **changes)
