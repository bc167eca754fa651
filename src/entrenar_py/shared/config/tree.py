"""The tree of a YAML file: plain values with their places. Independent of the YAML parser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from entrenar_py.shared.config.problems import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A value and its place. `size` counts this node and all below it, with aliases expanded."""

    at: Position
    size: int = 1
    height: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarNode(Node):
    """A scalar: `text` as written; `value` is None, bool, int, float or str (YAML 1.1)."""

    text: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ListNode(Node):
    """A sequence."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapNode(Node):
    """A mapping. Keys are texts as written (`yes` stays "yes"); `keys` holds their places."""

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
