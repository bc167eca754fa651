"""The parts of a contract that the published rules refer to, in each layout of the format.

Later versions of the format rename some keys and allow equations in a list; both forms are read.
A key that is missing, null or blank counts as empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from entrenar_py.check.contract import layout
from entrenar_py.shared.config.composer import ListNode, MapNode, Node, ScalarNode
from entrenar_py.shared.config.problems import Position

# Kinds of contract that need proofs; the format's other kinds don't.
PROVED = ("kernel", "competitive-parity")
KINDS = (
    *PROVED,
    *("registry", "model-family", "model-family-variant", "tokenizer", "training-loop"),
    *("pretraining-corpus", "training-precondition-gate", "corpus-assembly", "pattern", "schema"),
    *("beat-benchmark", "kaizen"),
)
# Kind of a contract that states clauses and names no kind: clauses are tried, nothing is proved.
CLAUSES = "clauses"

_BLOCKS = ("equations", "proof_obligations", "falsification_tests", "kani_harnesses")
# Key -> its names in later versions of the format.
_ALSO = {
    "property": ("statement",),
    "formal": ("verification",),
    "prediction": ("expected",),
    "if_fails": ("fails_if",),
}


@dataclass(frozen=True, kw_only=True)
class Item:
    """An item of a list, or an equation; `path` is its dotted path (`falsification_tests.FT-1`)."""

    path: str
    name: str
    node: Node

    def find(self, key: str) -> Node | None:
        """Return the value of `key` or of its later name; None if it is empty."""
        if not isinstance(self.node, MapNode):
            return None
        for name in (key, *_ALSO.get(key, ())):
            value_node = self.node.fields.get(name)
            if value_node is not None and is_filled(value_node):
                return value_node
        return None

    def text(self, key: str) -> str:
        """Return the text of `key`; "" if it is empty or not text."""
        value_node = self.find(key)
        return value_node.text.strip() if isinstance(value_node, ScalarNode) else ""

    def at(self, key: str) -> Position:
        """Return the place of the value of `key`, even if empty; the item's if it lacks the key."""
        if isinstance(self.node, MapNode):
            for name in (key, *_ALSO.get(key, ())):
                if name in self.node.fields:
                    return self.node.fields[name].at
        return self.node.at


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A contract as the rules see it; `items` are grouped by the names of their blocks.

    `kind` is the kind it is judged as; `declared` says whether the contract itself names a kind.
    """

    root: MapNode
    metadata: Item
    items: Mapping[str, tuple[Item, ...]]
    kind: str
    declared: bool

    @property
    def must_be_proved(self) -> bool:
        """Return whether the rules for kernels apply to it; they do for an unknown kind too."""
        return self.kind not in (*KINDS, CLAUSES) or self.kind in PROVED

    def at(self, block: str) -> Position:
        """Return the place of the value of the key `block`, or the file's beginning without one."""
        found = self.root.fields.get(block)
        return self.root.at if found is None else found.at


def outline(root: MapNode) -> Outline:
    """Return the outline of the contract whose tree is `root`."""
    node = root.fields.get("metadata", root)
    has_metadata = isinstance(root.fields.get("metadata"), MapNode)
    # Without a metadata block, the version stands at the top level of the file.
    metadata = Item(path="metadata" if has_metadata else "", name="metadata", node=node)
    kind, declared = _kind(root, metadata)
    return Outline(
        root=root,
        metadata=metadata,
        items={block: tuple(_items(root, block)) for block in _BLOCKS},
        kind=kind,
        declared=declared,
    )


def is_filled(node: Node) -> bool:
    """Return whether `node` has content. A list has some if one of its items has."""
    if isinstance(node, ScalarNode):
        return node.value is not None and bool(node.text.strip())
    if isinstance(node, ListNode):
        return any(map(is_filled, node.items))
    return isinstance(node, MapNode) and bool(node.fields)


def _kind(root: MapNode, metadata: Item) -> tuple[str, bool]:
    kind = metadata.text("kind")
    registry = metadata.find("registry")
    is_registry = isinstance(registry, ScalarNode) and registry.text.strip().lower() == "true"
    if is_registry and kind in ("", "kernel"):
        return "registry", True
    if kind:
        return kind, True
    clauses = chain(layout.clauses(root), layout.named_invariants(root))
    has_clauses = next(clauses, None) is not None
    return (CLAUSES if has_clauses and "kani_harnesses" not in root.fields else "kernel"), False


def _items(root: MapNode, block: str) -> Iterator[Item]:
    block_node = root.fields.get(block)
    if block == "equations" and isinstance(block_node, MapNode):
        for name, node in block_node.fields.items():
            yield Item(path=f"equations.{name}", name=name, node=node)
    for number, node in enumerate(block_node.items if isinstance(block_node, ListNode) else ()):
        item = Item(path="", name="", node=node)
        name = item.text("id") or item.text("name")
        path = f"{block}.{name}" if name else f"{block}[{number}]"
        yield Item(path=path, name=name, node=node)
