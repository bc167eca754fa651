"""A reader of one YAML mapping, field by field. A wrong value is a recorded problem, never a crash.

Contracts, the coordinator's configurations, lists of workers and files of earlier frameworks are
read with it. Each method returns a usable value even after an error, so that one load finds all
problems. `error` and `warn` put the mapping's name before a message. `refuse` takes a message that
already names the key and its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from entrenar_py.shared.config.composer import ListNode, MapNode, Node, ScalarNode, plain
from entrenar_py.shared.config.problems import Position, Problems
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping

T = TypeVar("T")
WHOLE_MAX = 2**63 - 1
_FLAGS = {"true": True, "yes": True, "false": False, "no": False}


class Record:
    """A mapping with the keys `known`. Messages call it `what`, such as `clause F-DP-001`."""

    def __init__(
        self, node: MapNode, *, what: str, known: Collection[str], problems: Problems
    ) -> None:
        self.node, self.what, self.known, self.problems = node, what, known, problems

    def error(self, key: str, message: str, *, rule: str = "") -> None:
        """Record an error at the value of `key`, or at the mapping if it lacks the key."""
        self.problems.error(self.place(key), f"{self.what}: {message}", rule=rule)

    def refuse(self, key: str, message: str) -> None:
        """Record an error at the value of `key`. `message` names the key itself."""
        self.problems.error(self.place(key), message)

    def warn(self, key: str, message: str, *, rule: str = "") -> None:
        """Record a warning at the value of `key`, or at the mapping if it lacks the key."""
        self.problems.warn(self.place(key), f"{self.what}: {message}", rule=rule)

    def warn_unread(self, *, read_elsewhere: Collection[str] = ()) -> None:
        """Warn about every key that is neither in `known` nor in `read_elsewhere`."""
        for key in self.node.keys:
            if key in self.node.fields and key not in self.known and key not in read_elsewhere:
                self._warn_unread(key)

    def extra(self, kind: str, *, read_elsewhere: Collection[str] = ()) -> dict[str, Any]:
        """Return the keys that are neither in `known` nor in `read_elsewhere`, with plain values.

        A key that looks like a misspelling is a warning. For all others, one note per `kind` of
        mapping is recorded.
        """
        data = {}
        for key, child in self.node.fields.items():
            if key in self.known or key in read_elsewhere:
                continue
            data[key] = plain(child)
            if self.problems.is_near(key, self.known):
                self._warn_unread(key)
            else:
                self.problems.unread(self.node.keys[key], kind, key)
        return data

    def _warn_unread(self, key: str) -> None:
        hint = self.problems.hint(key, self.known)
        self.problems.warn(self.node.keys[key], f"{self.what}: key {key!r} is not read{hint}")

    def place(self, key: str) -> Position:
        """Return the place of the value of `key`, or of the mapping if it lacks the key."""
        value_node = self.node.fields.get(key)
        return self.node.at if value_node is None else value_node.at

    def present(self, key: str) -> Node | None:
        """Return the value of `key`, or None if it is missing or null."""
        value_node = self.node.fields.get(key)
        if isinstance(value_node, ScalarNode) and value_node.value is None:
            return None
        return value_node

    def text(self, key: str) -> str:
        """Return the text of `key` as written, "" if missing. A list is joined by `; `."""
        return "; ".join(self.texts(key))

    def texts(self, key: str) -> tuple[str, ...]:
        """Return the non-blank texts of `key`; a single text counts as a list of one.

        A list item that YAML reads as a mapping (`- note: a = b`) also counts as a text.
        """
        return tuple(item.text.strip() for item in self.scalars(key, prose=True))

    def scalars(self, key: str, *, prose: bool = False) -> tuple[ScalarNode, ...]:
        """Return the texts of `key` with their places; `prose` allows list items like `a: b`."""
        node = self.present(key)
        if node is None:
            return ()
        items = node.items if isinstance(node, ListNode) else (node,)
        scalars = [
            read for item in items if (read := _sentence(item, colon=prose and item is not node))
        ]
        if len(scalars) < len(items):
            self.error(key, f"{key} is text or a list of texts")
        return tuple(scalar for scalar in scalars if scalar.text.strip())

    def filled(self, key: str, *, rule: str = "") -> str:
        """Return the text of `key`. If it is empty or missing, record an error citing `rule`."""
        text = self.text(key)
        if not text:
            self.error(key, f"{key} is empty; write it down", rule=rule)
        return text

    def identifier(self) -> str:
        """Return the text of `id`. If it is missing, record an error and return ""."""
        node = self.present("id")
        if isinstance(node, ScalarNode) and node.text.strip():
            return node.text.strip()
        self.error("id", "id is empty; give one text")
        return ""

    def flag(self, key: str) -> bool:
        """Return the value of `key`, quoted or not, as a bool; False if it is missing."""
        node = self.present(key)
        if node is None:
            return False
        if isinstance(node, ScalarNode) and node.text.lower() in _FLAGS:
            return _FLAGS[node.text.lower()]
        self.error(key, f"{key} is true or false{_given(node)}")
        return False

    def choice(
        self, key: str, allowed: Collection[str], *, words: Mapping[str, str] | None = None
    ) -> str | None:
        """Return the value of `key` if it is in `allowed`, else record an error and return None.

        `words` maps synonyms to allowed values. A missing key is no error.
        """
        node = self.present(key)
        if node is None:
            return None
        if isinstance(node, ScalarNode):
            word = (words or {}).get(node.text.strip().upper(), node.text)
            if word in allowed:
                return word
        self.error(key, f"{key} is one of {', '.join(allowed)}{_given(node)}")
        return None

    def read_as(self, kind: type[T], /, **values: Any) -> T:
        """Return an instance of the dataclass `kind`; `values` are fields already read."""
        readers: dict[str, Callable[[str], Any]] = {"str": self.text, "tuple[str, ...]": self.texts}
        for field in fields(kind):  # type: ignore[arg-type]
            if field.name not in values and str(field.type) in readers:
                values[field.name] = readers[str(field.type)](field.name)
        return kind(**values)

    def number(self, key: str) -> float | None:
        """Return the number at `key`, even quoted ("1e-4"); None unless it is finite and >= 0."""
        node = self.present(key)
        if node is None:
            return None
        number = _number(node)
        if number is None:
            self.error(key, f"{key} is a finite number >= 0, never a formula{_given(node)}")
        return number

    def whole(self, key: str, default: int, *, least: int = 1, most: int = WHOLE_MAX) -> int | None:
        """Return the whole number at `key`, or `default` if it is missing.

        Record an error and return None if it is outside `least` to `most`.
        """
        node = self.present(key)
        value = default if node is None else plain(node)
        if type(value) is int and least <= value <= most:
            return value
        allowed = f">= {least}" if most == WHOLE_MAX else f"from {least} to {most}"
        self.refuse(key, f"{key}={value!r}: use a whole number {allowed}")
        return None

    def path(self, key: str, folder: Path) -> Path | None:
        """Return the path at `key`, relative to `folder`, or None if it is missing."""
        text = self.text(key)
        if "\0" in text:
            self.refuse(key, f"{key}={text!r}: a path can't contain a NUL; remove it")
            return None
        return folder / text if text else None

    def block(self, key: str, known: Collection[str]) -> Record | None:
        """Return the mapping at `key`, which has `known` keys, or None if it is missing."""
        node = self.present(key)
        if node is None:
            return None
        if not isinstance(node, MapNode):
            self.refuse(key, f"{key} is a mapping of {', '.join(known)}")
            return None
        record = Record(node, what=key, known=tuple(known), problems=self.problems)
        record.warn_unread()
        return record

    def attempt(self, key: str, read: Callable[[], T]) -> T | None:
        """Return the result of `read()`, or None after recording its UsageError at `key`."""
        try:
            return read()
        except UsageError as error:
            self.refuse(key, str(error))
            return None

    def numbers(self, key: str, kind: Callable[..., T], known: Collection[str]) -> T:
        """Return `kind(**numbers)` for the numbers at `key`, a mapping with the keys `known`."""
        record = self.block(key, known)
        if record is None:
            return kind()
        values = {name: record.number(name) for name in known}
        try:
            return kind(**{name: value for name, value in values.items() if value is not None})
        except UsageError as error:
            record.refuse(error.field, str(error))
            return kind()

    def data(self, key: str) -> dict[str, Any]:
        """Return the mapping at `key` as plain data: {} if missing, {key: value} for other data."""
        node = self.present(key)
        if node is None:
            return {}
        data = plain(node)
        return data if isinstance(node, MapNode) else {key: data}

    def is_percentage(self, key: str) -> bool:
        """Return whether the text of `key` is a percentage (`1%`)."""
        node = self.present(key)
        return isinstance(node, ScalarNode) and _percentage(node) is not None

    def amount(self, key: str) -> float | None:
        """Return `number(key)`, and a percentage as a fraction: 0.01 for `1%`."""
        node = self.present(key)
        share = _percentage(node) if isinstance(node, ScalarNode) else None
        return self.number(key) if share is None else share

    def maps(self, key: str) -> tuple[MapNode, ...]:
        """Return the mappings in the list at `key`, () if missing. Anything else is an error."""
        node = self.present(key)
        if node is None:
            return ()
        items = node.items if isinstance(node, ListNode) else (node,)
        maps = tuple(item for item in items if isinstance(item, MapNode))
        if not isinstance(node, ListNode) or len(maps) < len(items):
            self.error(key, f"{key} is a list of mappings")
        return maps


def _number(node: Node) -> float | None:
    if not isinstance(node, ScalarNode) or isinstance(node.value, bool):
        return None
    try:
        number = float(node.value)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _percentage(node: ScalarNode) -> float | None:
    digits, percent, rest = node.text.strip().partition("%")
    if not percent or rest:
        return None
    number = _number(ScalarNode(at=node.at, text=digits, value=digits))
    return None if number is None else number / 100


def _sentence(node: Node, *, colon: bool) -> ScalarNode | None:
    """Return `node` if it is a scalar. With `colon`, make a mapping of one key a text `a: b`."""
    if isinstance(node, ScalarNode):
        return node
    if colon and isinstance(node, MapNode) and len(node.fields) == 1:
        ((key, value),) = node.fields.items()
        if isinstance(value, ScalarNode):
            text = f"{key}: {value.text}"
            return ScalarNode(at=node.at, text=text, value=text)
    return None


def _given(node: Node) -> str:
    if isinstance(node, ScalarNode):
        return f"; given is {escaping.shortened(node.text, chars_max=80)!r}"
    return f"; given is a {'list' if isinstance(node, ListNode) else 'mapping'}"
