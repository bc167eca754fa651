"""A YAML composer: turns the bytes of a file into a tree with the line and column of each value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from entrenar_py.shared.config.problems import Position, Problems
from entrenar_py.shared.untrusted import escaping, files


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A value and its place in the file.

    `size` counts this node and all nodes below it, with aliases expanded. `height` is the number of
    levels, 1 for a scalar.
    """

    at: Position
    size: int = 1
    height: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarNode(Node):
    """A scalar. `text` is as written; `value` is None, bool, int, float or str by YAML 1.1."""

    text: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ListNode(Node):
    """A sequence."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapNode(Node):
    """A mapping. Its keys are texts as written (`yes` stays "yes"); `keys` has their places."""

    fields: dict[str, Node]
    keys: dict[str, Position]


def plain(node: Node) -> Any:
    """Return the data under `node` as dicts, lists and scalars."""
    if isinstance(node, MapNode):
        return {key: plain(child) for key, child in node.fields.items()}
    if isinstance(node, ListNode):
        return [plain(item) for item in node.items]
    assert isinstance(node, ScalarNode)
    return node.value


TAG = "tag:yaml.org,2002:"
# YAML 1.1 reads 1:1:1 in base 60, in time quadratic in its length. Text longer than this stays
# text.
NUMBER_CHARS_MAX = 100

_RESOLVER: Any = yaml.resolver.Resolver()
_CONSTRUCTOR: Any = yaml.constructor.SafeConstructor()
_BUILDERS: dict[str, Callable[[yaml.ScalarNode], Any]] = {
    f"{TAG}int": _CONSTRUCTOR.construct_yaml_int,
    f"{TAG}float": _CONSTRUCTOR.construct_yaml_float,
    f"{TAG}bool": _CONSTRUCTOR.construct_yaml_bool,
    f"{TAG}null": lambda node: None,
    f"{TAG}str": lambda node: node.value,
    "!": lambda node: node.value,
}


def resolve(event: Any, at: Position, problems: Problems) -> ScalarNode:
    """Return the scalar of a `yaml.ScalarEvent`. Record an error if its text doesn't fit its tag.

    Only int, float, bool and null are converted. Dates, other kinds of values, and values with
    errors remain text.
    """
    text: str = event.value
    tag = event.tag or _implicit_tag(event)
    value: Any = text
    if tag not in _BUILDERS:
        problems.error(at, tag_message(tag))
    else:
        try:
            value = _build(tag, text)
        except (ValueError, KeyError, IndexError):  # SafeConstructor found a wrong text
            kind = tag.removeprefix(TAG)
            given = escaping.shortened(text, chars_max=80)
            problems.error(at, f"{given!r} is no {kind}; quote it to make it text")
    return ScalarNode(at=at, text=text, value=value)


def tag_message(tag: str) -> str:
    """Return the error message for a YAML tag that is not allowed."""
    return (
        f"tag {tag!r}: no tag builds an object here; allowed are !!str !!int !!float !!bool !!null"
    )


def _implicit_tag(event: Any) -> str:
    if event.implicit[0] and len(event.value) <= NUMBER_CHARS_MAX:
        tag: str = _RESOLVER.resolve(yaml.ScalarNode, event.value, (True, False))
        if tag in _BUILDERS:
            return tag
    return f"{TAG}str"


def _build(tag: str, text: str) -> Any:
    if tag != f"{TAG}str" and len(text) > NUMBER_CHARS_MAX:
        raise ValueError
    return _BUILDERS[tag](yaml.ScalarNode(tag, text))


BYTES_MAX = 1 << 20
NODES_MAX = 50_000
DEPTH_MAX = 64

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


CONTRACT_FORM = "a contract is a mapping (metadata, clauses, ...)"


def load(path: Path, problems: Problems, *, form: str = CONTRACT_FORM) -> MapNode | None:
    """Return the tree of the file at `path`. If there is a problem, record it and return None."""
    data = read(path, problems)
    return None if data is None else compose(data, str(path), problems, form=form)


def read(path: Path, problems: Problems) -> bytes | None:
    """Return the file's bytes, at most BYTES_MAX.

    Record a problem and return None if the file is larger, is a folder or device, or can't be read.
    """
    try:
        return files.read(path, bytes_max=BYTES_MAX)
    except OSError as error:
        message = f"can't be read: {error.strerror}; give a YAML file"
        problems.error(Position(str(path), 1, 1), message)
        return None


def compose(
    data: bytes, file: str, problems: Problems, *, form: str = CONTRACT_FORM
) -> MapNode | None:
    """Return the tree of `data`, which must be one document, or record a problem and return None.

    `form` completes the message about a document that isn't a mapping: what was expected. Duplicate
    keys, unknown tags and keys that aren't text are also problems, but the tree is returned.
    """
    root = _document(data, file, problems)
    if root is None or isinstance(root, MapNode):
        return root
    _refuse(root, form, problems)
    return None


def compose_list(data: bytes, file: str, problems: Problems, *, form: str) -> ListNode | None:
    """Return the list in `data`, the only document, or record a problem and return None."""
    root = _document(data, file, problems)
    if root is None or isinstance(root, ListNode):
        return root
    _refuse(root, form, problems)
    return None


def _document(data: bytes, file: str, problems: Problems) -> Node | None:
    """Return the root of the only document in `data`. If there is none, record why; return None."""
    text = _decode(data, file, problems)
    if text is None:
        return None
    composer = _Composer(file, problems)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            composer.take(event)
    except yaml.MarkedYAMLError as error:
        at = composer.position(error.problem_mark)
        problems.error(at, f"invalid YAML: {_words(error, text, at)}")
        return None
    if composer.root is None:
        return ScalarNode(at=Position(file, 1, 1), text="", value=None)
    return composer.root


def _refuse(root: Node, form: str, problems: Problems) -> None:
    kind = {MapNode: "a mapping", ListNode: "a list"}.get(type(root), "a single value")
    if isinstance(root, ScalarNode) and root.value is None:
        kind = "nothing: the file is empty"
    problems.error(root.at, f"{form}; found {kind}")


def _decode(data: bytes, file: str, problems: Problems) -> str | None:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8", "replace")
        problems.error(
            _end(before, file), f"not UTF-8: byte 0x{data[error.start]:02x}; save as UTF-8"
        )
        return None
    bad = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if bad:
        at = _end(text[: bad.start()], file)
        problems.error(
            at, f"control character U+{ord(bad.group()):04X}: YAML allows none; remove it"
        )
        return None
    return text


def _end(before: str, file: str) -> Position:
    line_start = before.rfind("\n") + 1
    return Position(file, before.count("\n") + 1, len(before) - line_start + 1)


def _words(error: yaml.MarkedYAMLError, text: str, at: Position) -> str:
    words = "; ".join(part for part in (error.context, error.problem) if part)
    line = "".join(text.split("\n")[at.line - 1 : at.line])
    tab = "\t" in line[: len(line) - len(line.lstrip())]
    return f"{words}: a tab; indent with spaces" if tab else words


@dataclass(slots=True)
class _Open:
    """A list or mapping during parsing, before its end event. `keys` is None for a list."""

    at: Position
    anchor: str | None
    is_map: bool
    items: list[Node] = field(default_factory=list)
    fields: dict[str, Node] = field(default_factory=dict)
    keys: dict[str, Position] = field(default_factory=dict)
    key: tuple[str, Position] | None = None


class _Composer:
    """Builds the tree from parser events, with a stack instead of recursion."""

    def __init__(self, file: str, problems: Problems) -> None:
        self.root: Node | None = None
        self._file = file
        self._problems = problems
        self._anchors: dict[str, Node] = {}
        self._open: list[_Open] = []
        self._num_nodes = 0

    def position(self, mark: Any) -> Position:
        return Position(self._file, mark.line + 1, mark.column + 1)

    def take(self, event: yaml.Event) -> None:
        """Add one parser event. Raises ComposerError if the document must be refused as a whole."""
        if isinstance(event, yaml.ScalarEvent):
            node = resolve(event, self.position(event.start_mark), self._problems)
            self._count(1, event)
            self._name(event.anchor, node)
            self._place(node, event)
        elif isinstance(event, yaml.AliasEvent):
            self._place(self._alias(event), event)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._start(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            top = self._open.pop()
            closed: Node = self._map(top) if top.is_map else _list(top)
            self._name(top.anchor, closed)
            self._place(closed, event)
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise _stop("a second document; only one is read, split the file", event)

    def _count(self, num_nodes: int, event: yaml.Event) -> None:
        self._num_nodes += num_nodes
        if self._num_nodes > NODES_MAX:
            raise _stop(f"more than {NODES_MAX} values, aliases expanded; split the file", event)

    def _check_depth(self, height: int, event: yaml.Event) -> None:
        if len(self._open) + height > DEPTH_MAX:
            raise _stop(f"nested deeper than {DEPTH_MAX} levels; use a flatter layout", event)

    def _name(self, anchor: str | None, node: Node) -> None:
        if anchor is not None:
            self._anchors[anchor] = node

    def _alias(self, event: yaml.AliasEvent) -> Node:
        if any(top.anchor == event.anchor for top in self._open):
            raise _stop(f"alias *{event.anchor} is inside its own anchor; remove it", event)
        if event.anchor not in self._anchors:
            problem = f"alias *{event.anchor} has no anchor &{event.anchor} before it; add one"
            raise _stop(problem, event)
        node = self._anchors[event.anchor]
        self._count(node.size, event)
        self._check_depth(node.height, event)
        return node

    def _start(self, event: Any) -> None:
        self._count(1, event)
        self._check_depth(1, event)
        at = self.position(event.start_mark)
        is_map = isinstance(event, yaml.MappingStartEvent)
        if event.tag not in (None, "!", f"{TAG}{'map' if is_map else 'seq'}"):
            self._problems.error(at, tag_message(event.tag))
        self._open.append(_Open(at, event.anchor, is_map))

    def _place(self, node: Node, event: yaml.Event) -> None:
        if not self._open:
            self.root = node
            return
        top = self._open[-1]
        if not top.is_map:
            top.items.append(node)
        elif top.key is None:
            top.key = self._key(node, event)
        else:
            self._add(top, top.key, node)
            top.key = None

    def _key(self, node: Node, event: yaml.Event) -> tuple[str, Position]:
        at = node.at if not isinstance(event, yaml.AliasEvent) else self.position(event.start_mark)
        if isinstance(node, ScalarNode) and node.text:
            return node.text, at
        self._problems.error(at, "a key is one non-empty text, not a list, a mapping or nothing")
        return "", at

    def _add(self, top: _Open, key: tuple[str, Position], node: Node) -> None:
        text, at = key
        if text in top.fields:
            first = top.keys[text].line
            message = f"key {text!r} is given twice, on lines {first} and {at.line}; keep one"
            self._problems.error(at, message)
        elif text:
            top.fields[text], top.keys[text] = node, at

    def _map(self, top: _Open) -> MapNode:
        merged = top.fields.pop("<<", None)
        if merged is not None:
            self._merge(top, merged)
        return MapNode(
            at=top.at,
            size=1 + sum(1 + child.size for child in top.fields.values()),
            height=1 + max((child.height for child in top.fields.values()), default=0),
            fields=top.fields,
            keys=top.keys,
        )

    def _merge(self, top: _Open, merged: Node) -> None:
        """Add to `top` the keys under `<<` that it lacks; the first source of a key wins."""
        for source in merged.items if isinstance(merged, ListNode) else (merged,):
            if not isinstance(source, MapNode):
                self._problems.error(top.keys["<<"], "<< takes a mapping or a list of mappings")
                continue
            for key, child in source.fields.items():
                if key not in top.fields:
                    top.fields[key], top.keys[key] = child, source.keys[key]


def _list(top: _Open) -> ListNode:
    return ListNode(
        at=top.at,
        size=1 + sum(item.size for item in top.items),
        height=1 + max((item.height for item in top.items), default=0),
        items=tuple(top.items),
    )


def _stop(message: str, event: Any) -> yaml.composer.ComposerError:
    return yaml.composer.ComposerError(None, None, message, event.start_mark)
