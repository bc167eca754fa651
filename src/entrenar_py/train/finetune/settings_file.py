"""Reads a configuration: every key must be known, in its place and within its limits.

All problems are reported at once, each as `file:line:column: error: ...`.

Keys, types and limits come from the records in `train.model.settings`; `settings_forms` writes what
users see of them. `_Conflicts` and `of_pipeline` have the
rules about several keys: they check the record, and report at a place in the tree.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from entrenar_py.shared import wording
from entrenar_py.shared.config import composer
from entrenar_py.shared.config.composer import ListNode, MapNode, Node, ScalarNode, plain
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Position, Problems
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.finetune import foreign_keys
from entrenar_py.train.model.settings import (
    CANONICAL,
    CUDNN,
    LAYER_PIPELINE,
    Keep,
    Key,
    Settings,
    StagePlan,
    limits_of,
    spelled,
)

_PLACES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("data", "packing"), "data.packing"),
    (("data", "validation"), "rows to evaluate on"),
    (("data", "validation_share"), "rows to evaluate on"),
    (("trust_remote_code",), "trust_remote_code"),
)


def of_pipeline(settings: Settings, root: MapNode) -> Iterator[tuple[Position, str]]:
    """Yield each problem of a layer pipeline with its place; `root` is the configuration."""
    for keys, what in _PLACES:
        if attrgetter(".".join(keys))(settings):
            at = innermost(root, keys).at
            yield at, f"strategy: {LAYER_PIPELINE} does not read {what}; leave it out"
    for key in ("compile", "attention"):
        if key in root.fields:
            yield (
                root.fields[key].at,
                f"strategy: {LAYER_PIPELINE} does not read {key}: a stage runs its blocks as they "
                "are; leave it out",
            )
    wait = ("coordinator", "wait_for")
    if (node := innermost(root, wait)) is not innermost(root, wait[:1]):
        yield (
            node.at,
            f"strategy: {LAYER_PIPELINE} does not read wait_for: a step needs all stages; leave it "
            "out",
        )
    if settings.stages and "workers" in root.fields:
        yield (
            root.fields["workers"].at,
            f"workers={settings.workers} with stages: each stage names its own workers; "
            "leave it out",
        )
    yield from _of_workers(settings, root)
    yield from _of_layers(settings, root)


def _of_workers(settings: Settings, root: MapNode) -> Iterator[tuple[Position, str]]:
    """Yield problems: workers that are named twice, and stages with more workers than shards."""
    num_shards = settings.training.num_shards
    stage_of = dict[str, int]()
    for index, (stage, item) in enumerate(_both(settings, root)):
        at = innermost(item, ("worker",)).at
        for name in stage.worker:
            first = stage_of.setdefault(name, index)
            if first != index or stage.worker.count(name) > 1:
                where = "it is named twice" if first == index else f"stages[{first}] has it, too"
                yield at, f"stages[{index}] worker={name}: {where}; a worker has one stage"
        if len(stage.worker) > num_shards:
            yield (
                at,
                f"stages[{index}] has {len(stage.worker)} workers, and "
                f"training.num_shards={num_shards}: one would have no shard; use num_shards >= "
                f"{len(stage.worker)}, or fewer workers",
            )


def _of_layers(settings: Settings, root: MapNode) -> Iterator[tuple[Position, str]]:
    """Yield problems of stages: without blocks, with gaps or overlaps, or out of order."""
    both = list(_both(settings, root))
    layers = [stage.layers for stage, _ in both]
    if _is_whole(sorted(layers)) and not _is_whole(layers):
        index = next(i for i, own in enumerate(sorted(layers)) if own != layers[i])
        own = sorted(layers)[index]
        yield (
            innermost(both[index][1], ("layers",)).at,
            f"stages[{index}] layers={[*layers[index]]}: stages are listed in the order "
            f"of their blocks; put the one with layers: {[*own]} here",
        )
        return
    end = 0
    for index, ((start, stop), (_, item)) in enumerate(zip(layers, both, strict=True)):
        if problem := _of_place(start, stop, end, index):
            at = innermost(item, ("layers",)).at
            yield at, f"stages[{index}] layers={[start, stop]}: {problem}"
        end = max(end, stop)


def _of_place(start: int, stop: int, end: int, index: int) -> str:
    """Return what is wrong with a stage that follows `end` blocks; "" if nothing is."""
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
    starts = [0, *(stop for _, stop in layers)]
    return all(start == end < stop for (start, stop), end in zip(layers, starts, strict=False))


def _both(settings: Settings, root: MapNode) -> Iterator[tuple[StagePlan, Node]]:
    node = root.fields.get("stages")
    items = node.items if isinstance(node, ListNode) else ()
    return zip(settings.stages, items, strict=False)


def require_other(settings: Settings, path: Path, command: str) -> None:
    """Raise UsageError if the configuration at `path` is for a layer pipeline.

    `command` is the command that can't run it.
    """
    if settings.strategy == LAYER_PIPELINE:
        raise UsageError(
            f"{path}: {command} does not run strategy: {LAYER_PIPELINE}; `entrenar pipeline plan "
            f"{path}` shows its stages, `entrenar coordinator {path}` trains, with an `entrenar "
            "worker --id NAME` for each stage"
        )


T = TypeVar("T")
_UNREAD: Any = object()  # the value of a key that has a problem
_FORM = "a configuration is a mapping (model, task, output, data, ...)"
_NAMES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    bool | str: "auto, true or false",
    str: "text",
    Path: "a path",
    tuple[str, ...]: "a list of texts",
    tuple[int, int]: "a list of two whole numbers",
}


class Field(NamedTuple):
    """A field of a section: its type without `None`, and its default, MISSING if required."""

    name: str
    kind: Any
    is_optional: bool
    default: Any
    key: Key

    @property
    def is_section(self) -> bool:
        """True if the value is a section."""
        return dataclasses.is_dataclass(self.kind)

    @property
    def member(self) -> type[Any] | None:
        """The section type of a list's items; None if the value is not a list of sections."""
        members = get_args(self.kind) if get_origin(self.kind) is tuple else ()
        is_section = bool(members) and dataclasses.is_dataclass(members[0])
        return cast("type[Any]", members[0]) if is_section else None

    @property
    def is_required(self) -> bool:
        """True if the key must be given."""
        return self.default is dataclasses.MISSING


def fields_of(section: type[Any]) -> Iterator[Field]:
    """Yield the fields of a section of `settings`."""
    hints = get_type_hints(section, include_extras=True)
    for field in dataclasses.fields(section):
        kind, key = get_args(hints[field.name])
        is_optional = isinstance(kind, UnionType) and NoneType in get_args(kind)
        if is_optional:
            (kind,) = (one for one in get_args(kind) if one is not NoneType)
        yield Field(field.name, kind, is_optional, field.default, key)


def load(path: Path) -> Settings:
    """Return the configuration at `path`. Relative paths in it start from its folder.

    Raises ContractError with all problems.
    """
    problems = Problems()
    return _settings(read(path, problems), path.parent, problems)


def read(path: Path, problems: Problems) -> MapNode | None:
    """Return the tree of the configuration at `path`; None after reporting why there is none."""
    return composer.load(path, problems, form=_FORM)


def of_text(text: str, name: str) -> Settings:
    """Return the settings in a text that `to_text` returned.

    Raises ContractError with all problems of any other text, with `name` as the file's name.
    """
    problems = Problems()
    data = text.encode(errors="surrogatepass")  # JSON may have surrogates, which are a problem
    root = composer.compose(data, name, problems, form=_FORM)
    return _settings(root, Path(), problems)


def _settings(root: MapNode | None, folder: Path, problems: Problems) -> Settings:
    settings: object = None
    if root is not None:
        settings = _Reader(folder, problems).section(Settings, root, "configuration")
        if isinstance(settings, Settings):
            _Conflicts(settings, root, problems).tell()
    problems.settle(strict=True)
    assert isinstance(settings, Settings), "what can't be read is a problem"
    return settings


def section(kind: type[T], root: MapNode, folder: Path, problems: Problems) -> T | None:
    """Return the record `kind` that the tree of a file describes; None after reporting problems."""
    found = _Reader(folder, problems, lambda record: ()).section(kind, root, "configuration")
    return None if found is _UNREAD else cast("T", found)


def innermost(root: Node, keys: Iterable[str]) -> Node:
    """Return the value of the last of nested `keys` that exists, such as stages, 1, layers."""
    node = root
    for key in keys:
        if isinstance(node, MapNode) and key in node.fields:
            node = node.fields[key]
        elif isinstance(node, ListNode) and key.isdigit() and int(key) < len(node.items):
            node = node.items[int(key)]
    return node


def to_record(section: Any) -> dict[str, Any]:
    """Return settings in a form that JSON can hold, without defaults; paths are absolute."""
    record = dict[str, Any]()
    for field in fields_of(type(section)):
        value = getattr(section, field.name)
        if value == field.default:
            continue
        if field.is_section:
            value = to_record(value)
        elif isinstance(value, Path):
            value = str(value.absolute())
        elif field.member is not None:
            value = [to_record(one) for one in value]
        record[field.name] = list(value) if isinstance(value, tuple) else value
    return record


def to_text(record: Mapping[str, Any]) -> str:
    """Return a record of settings as JSON, which `load` and `of_text` can read."""
    return json.dumps(record, indent=2, ensure_ascii=False)  # YAML knows no pairs of surrogates


class _Reader:
    """Reads sections, each a dataclass of `settings`, from mappings."""

    def __init__(
        self,
        folder: Path,
        problems: Problems,
        read_elsewhere: Callable[[Record], Collection[str]] = lambda record: foreign_keys.tell(
            record, _own_keys
        ),
    ) -> None:
        """`read_elsewhere` returns the keys of a section that are unknown, and reported already."""
        self._folder, self._problems, self._read_elsewhere = folder, problems, read_elsewhere

    def section(self, kind: type[Any], node: MapNode, what: str) -> Any:
        """Return the `kind` that `node` describes; `_UNREAD` after reporting its problems."""
        fields = list(fields_of(kind))
        record = Record(node, what=what, known=[f.name for f in fields], problems=self._problems)
        record.warn_unread(read_elsewhere=self._read_elsewhere(record))
        values = {field.name: self._value(record, field) for field in fields}
        return _UNREAD if _UNREAD in values.values() else kind(**values)

    def _value(self, record: Record, field: Field) -> Any:
        node = record.present(field.name)
        if node is None:
            if field.is_optional and field.name in record.node.fields:
                return None
            if field.is_required:
                record.error(field.name, f"{field.name} is missing: {field.key.meaning}")
                return _UNREAD
            if field.name in record.node.fields and not field.is_section:
                advice = "it has no value; give one, or leave the key out"
                record.error(field.name, f"{field.name}: {advice}")
                return _UNREAD
            return field.default
        if field.is_section and isinstance(node, MapNode):
            return self.section(field.kind, node, field.name)
        if (member := field.member) is not None and _are_sections(node):
            values = tuple(
                self.section(member, cast("MapNode", item), f"{field.name}[{index}]")
                for index, item in enumerate(cast("ListNode", node).items)
            )
            return _UNREAD if _UNREAD in values else values
        is_nested = field.is_section or field.member is not None
        value = _UNREAD if is_nested else _converted(node, field.kind, self._folder)
        if value is _UNREAD:
            other = "a mapping" if field.member is None else "a list of mappings"
            advice = f"use {_NAMES.get(field.kind, other)}"
        else:
            advice = _advice(value, field.key)
        if not advice:
            return value
        record.error(field.name, f"{field.name}={plain(node)!r}: {advice}")
        return _UNREAD


def _own_keys() -> Mapping[str, list[str]]:
    kinds = {field.name: field.kind for field in fields_of(Settings) if field.is_section}
    return {
        name: [f.name for f in fields_of(kind)] for name, kind in {"": Settings, **kinds}.items()
    }


def _are_sections(node: Node) -> bool:
    items = node.items if isinstance(node, ListNode) else ()
    return bool(items) and all(isinstance(item, MapNode) for item in items)


def _converted(node: Node, kind: Any, folder: Path) -> Any:
    """Return the value of `node` as `kind`; `_UNREAD` if that is impossible."""
    if kind == tuple[str, ...]:
        items = node.items if isinstance(node, ListNode) else (node,)
        texts = [item.text for item in items if isinstance(item, ScalarNode) and item.text]
        return tuple(texts) if len(texts) == len(items) else _UNREAD
    if kind == tuple[int, int]:
        items = node.items if isinstance(node, ListNode) else ()
        numbers = [item.value for item in items if isinstance(item, ScalarNode)]
        is_pair = len(items) == len(numbers) == 2 and all(type(one) is int for one in numbers)
        return tuple(numbers) if is_pair else _UNREAD
    if not isinstance(node, ScalarNode):
        return _UNREAD
    if kind is Path:
        return _normal(folder / node.text) if node.text and "\0" not in node.text else _UNREAD
    if kind is str or (kind == bool | str and not isinstance(node.value, bool)):
        return node.text
    if kind == bool | str:
        return node.value
    if kind is float and not isinstance(node.value, bool):
        try:
            return float(node.value)  # also 1e-4, which is a text in YAML 1.1
        except (TypeError, ValueError):
            return _UNREAD
    return node.value if type(node.value) is kind else _UNREAD


def _normal(path: Path) -> Path:
    """Return `path` without `..`, unless a link makes that a different place."""
    short = Path(os.path.normpath(path))
    # Not `Path.resolve`, which raises if links lead in a circle.
    return short if os.path.realpath(short) == os.path.realpath(path) else path


def _advice(value: Any, key: Key) -> str:
    """Return what to use instead of a value outside of its limits; "" for a valid value."""
    if key.choices and value not in key.choices:
        return f"use {' or '.join(map(spelled, key.choices))}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    if math.isinf(value):
        return "use a finite number"
    are_kept = (  # false for NaN
        key.least is None or value >= key.least,
        key.above is None or value > key.above,
        key.most is None or value <= key.most,
        key.below is None or value < key.below,
    )
    return "" if all(are_kept) else f"use a number {_limits(key)}"


def _limits(key: Key) -> str:
    bounds = {">=": key.least, ">": key.above, "<=": key.most, "<": key.below}
    return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)


def holds(field: Field) -> str:
    """Return the values that a key may have, in words."""
    if field.key.choices:
        return ", ".join(f"`{spelled(choice)}`" for choice in field.key.choices)
    return f"{_NAMES[field.kind].removeprefix('a ')} {_limits(field.key)}".strip()


class _Conflicts:
    """Keys that exclude each other, or that the task or the method does not read."""

    def __init__(self, settings: Settings, root: MapNode, problems: Problems) -> None:
        self._settings, self._root, self._problems = settings, root, problems

    def tell(self) -> None:
        """Report each conflict at its place."""
        settings, data, training = self._settings, self._settings.data, self._settings.training
        self._unread()
        if data.validation is not None and data.validation_share:
            self._error("validation and validation_share: give one", "data", "validation_share")
        if "evaluate_every" in self._root.fields and not data.validates:
            self._error(
                "evaluate_every without rows to evaluate on: give data.validation or "
                "data.validation_share",
                "evaluate_every",
            )
        if settings.keep != Keep() and not data.validates:
            self._error("keep without rows to evaluate on: give data.validation, too", "keep")
        if settings.keep != Keep() and settings.strategy is not None:
            self._error(
                f"strategy: {settings.strategy} does not read keep: ranks write only the final "
                "result; leave it out",
                "keep",
            )
        if settings.adapts and not settings.lora.targets:
            self._error(
                "targets is empty: name a layer to adapt, such as q_proj", "lora", "targets"
            )
        for problem in foreign_keys.of_targets(settings.lora.targets):
            self._error(problem, "lora", "targets")
        labels = settings.classes.labels
        if settings.task == "classify" and len(labels) < 2:
            self._error("task: classify needs two classes.labels or more", "classes", "labels")
        if len(set(labels)) < len(labels):
            self._error("classes.labels has a class twice; name each once", "classes", "labels")
        if training.num_shards > training.batch_size:
            self._error(
                f"num_shards={training.num_shards} with batch_size={training.batch_size}: a shard "
                "would have no row; use num_shards <= batch_size",
                *("training", "num_shards"),
            )
        if settings.classes.oversample and settings.classes.weights != "none":
            self._error(
                f"weights={settings.classes.weights} with oversample: true: all classes are "
                "equally frequent then, so each weight would be 1; give only one of the two",
                *("classes", "weights"),
            )
        if settings.attention == CUDNN and settings.precision == "float32":
            self._error(
                f"attention: {CUDNN} with precision: float32: it computes in 16 bits; leave out "
                "one of the two",
                "attention",
            )
        if settings.attention == CUDNN and data.packing:
            self._error(
                f"attention: {CUDNN} with packing: true: packed rows need masks; leave out one of "
                "the two",
                "attention",
            )
        if settings.compile is True and settings.recompute != "none":
            self._error(
                f"compile: true with recompute: {settings.recompute}: blocks that are "
                "computed again are not compiled; leave out one of the two",
                "compile",
            )
        self._of_preference()
        self._of_distillation()
        if settings.lora.modules_to_save and settings.precision != "float32":
            self._error(
                f"modules_to_save with precision: {settings.precision}: they are trained in "
                "float32, and stock peft would compute with fewer bits; use precision: float32",
                *("lora", "modules_to_save"),
            )
        self._of_strategy()
        is_pipeline = settings.strategy == LAYER_PIPELINE
        if settings.num_workers > training.num_shards and not is_pipeline:
            self._error(
                f"workers={settings.workers} with num_shards={training.num_shards}: a worker would "
                "have no shard; use workers <= num_shards",
                "workers",
            )

    def _of_preference(self) -> None:
        """Report settings that exclude preference optimisation."""
        settings = self._settings
        if settings.task != "preference":
            for key in self._given("preference"):
                message = f"task: {settings.task} has no pairs; leave {key} out"
                self._error(message, "preference", key)
            return
        if not settings.adapts:
            self._error(
                "task: preference with method: full: the reference is the model without its "
                "adapters, and with all weights trained a second model would be needed; use "
                "method: lora or qlora",
                "method",
            )
        if settings.data.packing:
            self._error(
                "packing with task: preference: the two sides of a pair are separate rows; "
                "leave packing out",
                *("data", "packing"),
            )
        if settings.data.truncates:
            self._error(
                "on_long: truncate with task: preference: a pair would lose the ends of its "
                "answers; use stop or skip",
                *("data", "on_long"),
            )
        if settings.lora.modules_to_save:
            self._error(
                "modules_to_save with task: preference: the reference is the model without its "
                "adapters, and these layers would be trained in it, too; leave modules_to_save out",
                *("lora", "modules_to_save"),
            )
        if settings.lora.start_from is not None:
            self._error(
                "start_from with task: preference: the reference would be the model without these "
                "adapters; merge them (entrenar merge), and give the merged model as model",
                *("lora", "start_from"),
            )

    def _of_distillation(self) -> None:
        """Report settings that exclude distillation."""
        settings = self._settings
        if settings.distill is None:
            return
        if settings.distill.logits is None and settings.distill.text is None:
            self._error(
                "distill has neither logits nor text: give the folder of the teacher's shards, "
                "or the prompts that the teacher should answer",
                "distill",
            )
        if settings.task not in ("instruct", "text"):
            self._error(
                f"distill with task: {settings.task}: a teacher's logits are for next tokens; use "
                "task: instruct or text",
                "distill",
            )

    def _of_strategy(self) -> None:
        """Report keys that the strategy does not read, and settings that it can't handle."""
        strategy, num_shards = self._settings.strategy, self._settings.training.num_shards
        if strategy != LAYER_PIPELINE and "stages" in self._root.fields:
            self._error(
                f"stages: only strategy: {LAYER_PIPELINE} has stages; leave them out", "stages"
            )
        if self._settings.elastic and strategy != "ddp_canonical":
            self._error(
                f"elastic: true with strategy: {strategy or 'none'}: only with ddp_canonical may "
                "ranks die and join; use strategy: ddp_canonical, or leave elastic out",
                "elastic",
            )
        if strategy is None:
            return
        for limit in limits_of(self._settings, strategy):
            told = f"{limit.setting} with strategy: {strategy}: {limit.advice}, or none"
            self._error(told, *limit.keys)
        if strategy == LAYER_PIPELINE:
            for at, message in of_pipeline(self._settings, self._root):
                self._problems.error(at, message)
            return
        if "workers" in self._root.fields:
            self._error(
                f"strategy: {strategy} does not read workers; leave it out, and give torchrun "
                "--nproc_per_node",
                "workers",
            )
        if strategy in CANONICAL and num_shards & (num_shards - 1):
            self._error(
                f"num_shards={num_shards} with strategy: {strategy}: ranks share a tree evenly; "
                "use 1, 2, 4, 8 ...",
                *("training", "num_shards"),
            )

    def _unread(self) -> None:
        task = self._settings.task
        if task == "classify" and self._settings.data.packing:
            self._error(
                "packing with task: classify: a class is predicted from the end of a sequence; "
                "leave packing out",
                *("data", "packing"),
            )
        read = {
            "classify": {"text_field", "label_field"},
            "text": {"text_field"},
            "preference": set[str](),
        }
        fields = read.get(task, {"messages_field"})
        for key in ("text_field", "label_field", "messages_field"):
            if key in self._given("data") and key not in fields:
                self._error(f"task: {task} does not read {key}; leave it out", "data", key)
        for key in self._given("classes") if task != "classify" else ():
            self._error(f"task: {task} has no classes; leave {key} out", "classes", key)
        for key in self._given("lora") if not self._settings.adapts else ():
            self._error(
                f"method: {self._settings.method} has no adapters; leave {key} out", "lora", key
            )

    def _given(self, section: str) -> Mapping[str, Node]:
        node = self._root.fields.get(section)
        return node.fields if isinstance(node, MapNode) else {}

    def _error(self, message: str, *keys: str) -> None:
        self._problems.error(innermost(self._root, keys).at, message)
