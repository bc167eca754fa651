"""Finds what is wrong with the stages of a configuration, each problem at its place.

The number of the model's blocks is not known here: see `pipeline.cut`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from entrenar_py.shared import wording
from entrenar_py.shared.config.composer import ListNode, MapNode, Node
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model.settings import LAYER_PIPELINE, Settings, StagePlan

_PLACES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("data", "packing"), "data.packing"),
    (("data", "validation"), "rows to evaluate on"),
    (("data", "validation_share"), "rows to evaluate on"),
    (("trust_remote_code",), "trust_remote_code"),
)


def of_pipeline(settings: Settings, root: MapNode) -> Iterator[tuple[Position, str]]:
    """Yield each problem of a layer pipeline with its place; `root` is the configuration."""
    for keys, what in _PLACES:
        if _value(settings, keys):
            at = _node(root, keys).at
            yield at, f"strategy: {LAYER_PIPELINE} does not read {what}; leave it out"
    if "compile" in root.fields:
        yield (
            root.fields["compile"].at,
            f"strategy: {LAYER_PIPELINE} does not read compile: a stage runs its blocks as they "
            "are; leave it out",
        )
    wait = ("coordinator", "wait_for")
    if (node := _node(root, wait)) is not _node(root, wait[:1]):
        yield (
            node.at,
            f"strategy: {LAYER_PIPELINE} does not read wait_for: a step needs all stages; leave it "
            "out",
        )
    if settings.stages and "workers" in root.fields:
        yield (
            root.fields["workers"].at,
            f"workers={settings.workers} with stages: each stage names its own; leave it out",
        )
    yield from _of_workers(settings, root)
    yield from _of_layers(settings, root)


def _of_workers(settings: Settings, root: MapNode) -> Iterator[tuple[Position, str]]:
    """Yield workers that are named twice, and stages with more workers than shards."""
    num_shards = settings.training.num_shards
    stage_of = dict[str, int]()
    for index, (stage, item) in enumerate(_both(settings, root)):
        at = _node(item, ("worker",)).at
        for name in stage.worker:
            first = stage_of.setdefault(name, index)
            if first != index or stage.worker.count(name) > 1:
                where = "it is there twice" if first == index else f"stages[{first}] has it, too"
                yield at, f"stages[{index}] worker={name}: {where}; a worker has one stage"
        if len(stage.worker) > num_shards:
            yield (
                at,
                f"stages[{index}] has {len(stage.worker)} workers, and "
                f"training.num_shards={num_shards}: one would have no shard; use num_shards >= "
                f"{len(stage.worker)}, or fewer workers",
            )


def _of_layers(settings: Settings, root: MapNode) -> Iterator[tuple[Position, str]]:
    """Yield stages without blocks, gaps, overlaps, and stages that are out of order."""
    both = list(_both(settings, root))
    layers = [stage.layers for stage, _ in both]
    if _is_whole(sorted(layers)) and not _is_whole(layers):
        index = next(i for i, own in enumerate(sorted(layers)) if own != layers[i])
        own = sorted(layers)[index]
        yield (
            _node(both[index][1], ("layers",)).at,
            f"stages[{index}] layers={[*layers[index]]}: stages stand in the order of their "
            f"blocks; put the one with layers: {[*own]} here",
        )
        return
    end = 0
    for index, ((start, stop), (_, item)) in enumerate(zip(layers, both, strict=True)):
        if problem := _of_place(start, stop, end, index):
            at = _node(item, ("layers",)).at
            yield at, f"stages[{index}] layers={[start, stop]}: {problem}"
        end = max(end, stop)


def _of_place(start: int, stop: int, end: int, index: int) -> str:
    """Return what is wrong with a stage, before which there are `end` blocks; "" if nothing is."""
    if start < 0:
        return "blocks are counted from 0"
    if start >= stop:
        return "it has no block; use [first, last + 1]"
    if start > end:
        return f"no stage has {wording.spanned('block', range(end, start))}; let it begin at {end}"
    if start < end:
        shared = range(start, min(stop, end))
        verb = "is" if len(shared) == 1 else "are"
        which = f"{wording.spanned('block', shared)} {verb} in stages[{index - 1}]"
        return f"{which} or before, too; let it begin at {end}"
    return ""


def _is_whole(layers: list[tuple[int, int]]) -> bool:
    """Return whether stages follow each other from block 0 on, each with a block."""
    starts = [0, *(stop for _, stop in layers)]
    return all(start == end < stop for (start, stop), end in zip(layers, starts, strict=False))


def _both(settings: Settings, root: MapNode) -> Iterator[tuple[StagePlan, Node]]:
    node = root.fields.get("stages")
    items = node.items if isinstance(node, ListNode) else ()
    return zip(settings.stages, items, strict=False)


def _node(node: Node, keys: tuple[str, ...]) -> Node:
    """Return the value of the innermost of `keys` that is given."""
    for key in keys:
        if isinstance(node, MapNode) and key in node.fields:
            node = node.fields[key]
    return node


def _value(settings: object, keys: tuple[str, ...]) -> object:
    for key in keys:
        settings = getattr(settings, key)
    return settings


def require_other(settings: Settings, path: Path, command: str) -> None:
    """Raise UsageError if the configuration at `path` is of a layer pipeline.

    `command` is what can't run it.
    """
    if settings.strategy == LAYER_PIPELINE:
        raise UsageError(
            f"{path}: {command} does not run strategy: {LAYER_PIPELINE}; `entrenar pipeline plan "
            f"{path}` shows its stages, `entrenar coordinator {path}` trains, with an `entrenar "
            "worker --id NAME` for each stage"
        )


def place(root: MapNode, field: str) -> Position:
    """Return the place of the innermost part of `field` that is given, such as stages.1.layers."""
    node: Node = root
    for key in field.split("."):
        if isinstance(node, MapNode) and key in node.fields:
            node = node.fields[key]
        elif isinstance(node, ListNode) and key.isdigit() and int(key) < len(node.items):
            node = node.items[int(key)]
    return node.at
