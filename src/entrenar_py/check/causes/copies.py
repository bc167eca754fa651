"""Tell what tensors' names mean: the same tensor in both runs, and on each rank a whole copy of it.

A wrapper of the user's own puts parts into the names, and often wraps only with several workers.
Model parallelism written by hand in plain tensors looks like data parallelism: each rank holds
tensors of the same names and shapes, with other values.
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

_SHOWN = 2  # names in a reason


def other_names(compared: Compared) -> str:
    """Return why the names of two runs, or of the ranks of one, don't mean the same tensors."""
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
    """Return why ranks that declare no layout hold tensors of different names; "" if they don't."""
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
    """Return by rank the names of the weights that it holds at its first start, if recorded."""
    names: dict[int, Set[str]] = {}
    for start in trace.of(Start):
        if start.weights:
            names.setdefault(start.rank, start.weights.keys())
    return names


def known_names(trace: Trace) -> Set[str]:
    """Return the names of all weights at the start of any rank."""
    return frozenset[str]().union(*names_of_ranks(trace).values())


def aligned(model: Trace, trace: Trace) -> Trace:
    """Return `model` with the names that `trace` has, if the two correspond in only one way.

    Otherwise return `model` as it is.
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
    """Return for each of `names` the one of `like` that means the same tensor; None if unclear.

    Names correspond if they are equal without the parts that occur in one run only, or without the
    parts that all names of their run begin with.
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
    """Return names by what is left of them without the parts that all begin with."""
    split = [name.split(".") for name in names]
    common = 0
    while split and all(len(parts) > common + 1 for parts in split):
        if len({parts[common] for parts in split}) > 1:
            break
        common += 1
    return {".".join(parts[common:]): ".".join(parts) for parts in split}


def renamed(trace: Trace, named: Mapping[str, str]) -> Trace:
    """Return `trace` with the tensors in `named` under their new names."""
    return replace(trace, events=tuple(evidence.event_renamed(e, named) for e in trace.events))


# --- tensors that every rank holds whole ----------------------------------------------------------


_ALIKE = 1e-3  # numbers of workers differ by more
_SAME_LOSS = 1e-4  # relative; a loss that couples samples, or of other samples, differs by more
Shape = tuple[int, ...]
_FIELDS = ("weights", "buffers", "gradient")


def lacking(compared: Compared) -> str:
    """Return why some tensors of the judged run may not be copies; "" if all are."""
    return _pieces_told(compared, pieces(compared)) or _own_told(compared, own(compared))


def without(compared: Compared) -> Compared | None:
    """Return the comparison without the tensors that may not be copies."""
    lost = pieces(compared).keys() | own(compared)
    if not compared.is_one_run or known_names(compared.trace) <= lost:
        return None
    return compared.both(lambda trace: _without(trace, lost))


def pieces(compared: Compared) -> Mapping[str, tuple[Shape, Shape]]:
    """Return by name the shapes on a rank and in the other run, for tensors where they differ.

    The other run is the model; for a single run, it is the run on one worker. Where that lacks the
    tensor, the rank with the most elements of it shows its shape.
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
            f"in {run_name(compared.trace)} {name} has {_elements(shape)} on one rank, on another "
            f"{_elements(due)}: the name means other tensors there; if each rank has a part of "
            "the model, give observe() a module in which its tensors have names of their own "
            '(stages.1.0.weight), and say layout={"pp": 2}'
        )
    held = f"in {run_name(compared.trace)} a rank's {name} has {_elements(shape)}"
    return (
        f"{held}, in {run_name(model)} {_elements(due)}: ranks that hold pieces in plain tensors "
        "can't be compared; keep the pieces as DTensors (DTensor.from_local): their places are "
        "known"
    )


def _elements(shape: Shape) -> str:
    return f"{'x'.join(map(str, shape)) or 1} elements"


def _due_shapes(compared: Compared) -> dict[str, set[Shape]]:
    model = compared.alone if compared.is_one_run else compared.model
    if model is None or model is compared.trace:
        return {}
    return _shapes(aligned(model, compared.trace))


def _shapes(trace: Trace) -> dict[str, set[Shape]]:
    """Return the shapes of each weight on the ranks that recorded them.

    Files of earlier releases have no shapes: then it is the number of elements, if known.
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


# --- tensors of a rank's own ----------------------------------------------------------------------


def own(compared: Compared) -> Set[str]:
    """Return the tensors that each rank may have for itself, as experts and pieces are.

    Ranks begin with other values of them and apply other gradients to them. A tensor that was only
    not broadcast gets the same gradients. If shapes show that tensors are no pieces, there must be
    others that ranks train and agree on, else nothing is synchronised. If a layout is declared, it
    is known which ranks hold copies.
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
        "" if _due_shapes(compared) else " (the run on one worker, which would show, is lacking)"
    )
    return (
        f"each rank begins with its own {listed(sorted(names), most=_SHOWN)} and applies its own "
        f"gradients to it: a copy, a piece or an expert{unknown}; if these are to be copies, say "
        f'observe(..., layout={{"dp": {size}}}); if each rank has an expert, give it a name of its '
        f'own (experts.3.weight), and say layout={{"ep": {size}}}'
    )


def shared_samples(compared: Compared) -> str:
    """Return why ranks may share the samples that they draw; "" if each draws its own.

    They may if all draw the same in each step, and hold other tensors, or pieces of the same.
    """
    trace = compared.trace
    apart, size = bool(apart_on_ranks(trace)), trace.scenario.world_size
    if trace.traits.shared or not (apart or lacking(compared)) or not _all_draw_alike(trace):
        return ""
    axis, other = ("pp", 'or "ep" for "pp"') if apart else ("tp", "for parts of each layer")
    return (
        "all ranks draw the same samples, and hold other tensors of the model: if they share it, "
        f'say so, observe(..., layout={{"{axis}": {size}}}), {other}'
    )


def summed_parts(compared: Compared) -> str:
    """Return why a sum over a batch may rightly differ by the number of workers; "" if it may not.

    Where a batch is cut along its rows, as torch's layers can be told, each rank's rows are taken
    for other ones. If all ranks draw the same, a sum over the rows has each of them once per rank.
    And if a script has the size of a worker's batch, the mean of the workers' sums is the sum over
    as many samples as one worker has. Where that one has the share of a rank, it is the sum itself.
    """
    trace, num_workers = compared.trace, compared.trace.scenario.world_size
    factor = _factor_of_all(compared)
    if factor is None or compared.model.scenario.world_size == num_workers:
        return ""
    shards = trace.of(Shard)
    is_found = trace.traits.shared and trace.traits.losses == "backward"
    if is_found and _is_near(factor, num_workers) and loss_terms.are_all(shards, means=False):
        return (
            f"all {num_workers} ranks draw the same rows, and their sum counts {num_workers} "
            "times: right if each rank's rows are a part of the batch, and wrong if all are the "
            "batch; seed each rank's draws differently in the first case, or take the mean over "
            "the rows"
        )
    kinds = {fault.kind for fault in compared.model.scenario.faults}
    is_merged = not kinds.isdisjoint(JOINED) and MIRRORED not in kinds
    runs = (compared.model, trace)
    is_mean = loss_terms.are_all(shards, means=True) or all(
        map(loss_terms.are_means_of_steps, runs)
    )
    if is_merged and _is_near(factor, 1 / num_workers) and not is_mean:
        return (
            f"{num_workers} workers take the mean of their losses, and each may be a sum over "
            "a worker's batch: what one worker would have in its place is open; take the mean over "
            "the batch"
        )
    return ""


def not_given(compared: Compared) -> str:
    """Return why one worker was maybe not given all that several workers train on; "" if it was.

    Something that was not replaced may make the runs differ.
    """
    if not explanations.is_given(compared.model) or compared.difference is None:
        return ""
    workers = compared.trace.scenario.world_size
    return (
        f"one worker draws other samples than {workers} workers, and trains otherwise though its "
        "model was given theirs: the script may be wrong, or something else follows from its "
        "samples; divide the global batch by the number of workers ({share:GLOBAL} in the command "
        "does), and draw it alike"
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
    """Return whether in each step all ranks draw the same samples, and some are known."""
    drawn: dict[int, dict[int, list[int]]] = {}
    for shard in trace.of(Shard):
        drawn.setdefault(shard.step, {}).setdefault(shard.rank, []).extend(shard.ids)
    num_ranks = trace.scenario.world_size
    return bool(drawn) and all(
        len(of_step) == num_ranks and len({*map(tuple, of_step.values())}) == 1
        for of_step in drawn.values()
    )


# --- what is left ---------------------------------------------------------------------------------


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
