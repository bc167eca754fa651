"""The rules of validation: the published ones of the contract format, and a few of this project.

`RULES` is the one table that validation, its reports and docs/contract-rules.md read. A rule takes
the `Outline` of a contract, which is the same for all layouts of the format, and yields a `Breach`
for every place that breaks the rule. Ids and demands are the published ones; messages are written
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from entrenar_py.check.contract import layout
from entrenar_py.shared.config.composer import ListNode, MapNode, Node, ScalarNode
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.errors import did_you_mean

# Kinds of contract that need proofs; the format's other kinds don't.
PROVED = ("kernel", "competitive-parity")
KINDS = (
    *PROVED,
    *("registry", "model-family", "model-family-variant", "tokenizer", "training-loop"),
    *("pretraining-corpus", "training-precondition-gate", "corpus-assembly", "pattern", "schema"),
    *("beat-benchmark", "kaizen"),
)
# The kind of a contract that has clauses and names no kind. Clauses are tested, not proved.
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
    """An item of a list, or an equation. `path` is its dotted path (`falsification_tests.FT-1`)."""

    path: str
    name: str
    node: Node

    def find(self, key: str) -> Node | None:
        """Return the value of `key` or of its later name, or None if it is missing or empty."""
        if not isinstance(self.node, MapNode):
            return None
        for name in (key, *_ALSO.get(key, ())):
            value_node = self.node.fields.get(name)
            if value_node is not None and is_filled(value_node):
                return value_node
        return None

    def text(self, key: str) -> str:
        """Return the text of `key`, or "" if it is empty or not text."""
        value_node = self.find(key)
        return value_node.text.strip() if isinstance(value_node, ScalarNode) else ""

    def at(self, key: str) -> Position:
        """Return the place of the value of `key`, or of the item if it lacks the key."""
        if isinstance(self.node, MapNode):
            for name in (key, *_ALSO.get(key, ())):
                if name in self.node.fields:
                    return self.node.fields[name].at
        return self.node.at


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A contract as the rules see it: its `items`, grouped by the names of their blocks.

    The contract is judged as `kind`. `declared` is true if the contract itself names its kind.
    """

    root: MapNode
    metadata: Item
    items: Mapping[str, tuple[Item, ...]]
    kind: str
    declared: bool

    @property
    def must_be_proved(self) -> bool:
        """True if the rules for kernels apply. They also apply to a contract of unknown kind."""
        return self.kind not in (*KINDS, CLAUSES) or self.kind in PROVED

    def at(self, block: str) -> Position:
        """Return the place of the value of the key `block`, or of the file if it lacks the key."""
        found = self.root.fields.get(block)
        return self.root.at if found is None else found.at


def outline(root: MapNode) -> Outline:
    """Return the outline of the contract with the tree `root`."""
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
    """Return whether `node` has content. A list has content if one of its items has."""
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


@dataclass(frozen=True, kw_only=True)
class Breach:
    """A place that breaks a rule. `item` is its dotted path; `message` says what to do."""

    at: Position
    item: str
    message: str


def _filled(block: str, key: str, advice: str) -> Callable[[Outline], Iterator[Breach]]:
    def find(contract: Outline) -> Iterator[Breach]:
        for item in contract.items[block]:
            yield from _if_empty(item, key, advice)

    return find


def _distinct(block: str, key: str, what: str) -> Callable[[Outline], Iterator[Breach]]:
    """Return the rule that no two items of `block` share a `key`.

    Messages call the items `what`.
    """

    def find(contract: Outline) -> Iterator[Breach]:
        first: dict[str, Node] = {}
        for item in contract.items[block]:
            text, node = item.text(key), item.find(key)
            if not text or node is None:
                continue
            if text in first:
                message = f"{what} {text!r} is on line {first[text].at.line}, too; change one"
                yield Breach(at=node.at, item=f"{item.path}.{key}", message=message)
            first.setdefault(text, node)

    return find


def _references(contract: Outline) -> Iterator[Breach]:
    yield from _if_empty(contract.metadata, "references", "cite the papers it rests on")


def _version(contract: Outline) -> Iterator[Breach]:
    top = contract.root.fields.get("version")  # some contracts have it outside of the metadata
    if top is None or not is_filled(top):
        yield from _if_empty(contract.metadata, "version", 'give one, such as "1.0.0"')


def _some_equation(contract: Outline) -> Iterator[Breach]:
    if contract.must_be_proved and not contract.items["equations"]:
        message = f"no equation; write down what the kernel computes{_judged(contract)}"
        yield _in_block(contract, "equations", message)


def _formulas(contract: Outline) -> Iterator[Breach]:
    for equation in contract.items["equations"]:
        if not isinstance(equation.node, ScalarNode):
            yield from _if_empty(equation, "formula", "write it down")
        elif not is_filled(equation.node):
            message = "formula is empty; write it down"
            yield Breach(at=equation.node.at, item=equation.path, message=message)


def _properties(contract: Outline) -> Iterator[Breach]:
    for obligation in contract.items["proof_obligations"]:
        if not isinstance(obligation.node, ScalarNode) or not is_filled(obligation.node):
            yield from _if_empty(obligation, "property", "say what must hold")


def _gate(contract: Outline) -> Iterator[Breach]:
    found = contract.root.fields.get("qa_gate")
    wanted = contract.must_be_proved or contract.kind == CLAUSES
    if wanted and (found is None or not is_filled(found)):
        message = "no qa_gate; say which checks must hold for a pass"
        yield _in_block(contract, "qa_gate", message)


def _provability(contract: Outline) -> Iterator[Breach]:
    if not contract.must_be_proved:
        return
    for block in ("proof_obligations", "falsification_tests", "kani_harnesses"):
        if not contract.items[block]:
            message = f"a kernel's contract has {block}; write some{_judged(contract)}"
            yield _in_block(contract, block, message)
    num_tests = len(contract.items["falsification_tests"])
    num_obligations = len(contract.items["proof_obligations"])
    if num_tests < num_obligations:
        counts = f"{num_tests} for {num_obligations} proof obligations"
        message = f"fewer falsification tests than proof obligations ({counts}); write more"
        yield _in_block(contract, "falsification_tests", message + _judged(contract))


def _some_test(contract: Outline) -> Iterator[Breach]:
    if not contract.items["falsification_tests"]:
        message = "no falsification test, so that nothing could refute the contract; write one"
        yield _in_block(contract, "falsification_tests", message)


def _some_obligation(contract: Outline) -> Iterator[Breach]:
    is_derived = contract.items["proof_obligations"] or contract.kind == CLAUSES
    if contract.items["equations"] and not is_derived:
        message = "equations, but no proof obligation; derive some from the equations"
        yield _in_block(contract, "proof_obligations", message)


def _in_block(contract: Outline, block: str, message: str) -> Breach:
    return Breach(at=contract.at(block), item=block, message=message)


def _if_empty(item: Item, key: str, advice: str) -> Iterator[Breach]:
    if item.find(key) is None:
        path = f"{item.path}.{key}" if item.path else key
        yield Breach(at=item.at(key), item=path, message=f"{path} is empty; {advice}")


def _judged(contract: Outline) -> str:
    if contract.declared:
        return ""
    return " (metadata.kind is not given: judged as a kernel)"


def _known_kind(contract: Outline) -> Iterator[Breach]:
    if contract.declared and contract.kind not in KINDS:
        hint = did_you_mean(contract.kind, KINDS)
        message = f"metadata.kind {contract.kind!r} is unknown: judged as a kernel; {hint}"
        at = contract.metadata.at("kind")
        yield Breach(at=at, item="metadata.kind", message=message)


class Level(StrEnum):
    """The level of a rule's findings. Only an error makes the contract invalid."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


# First part of a published id -> the source of its rule and level.
_SOURCES = {
    "SCHEMA": "https://github.com/paiml/provable-contracts/blob/main/"
    "crates/provable-contracts/src/schema/validator.rs",
    "AUDIT": "https://github.com/paiml/provable-contracts/blob/main/"
    "crates/provable-contracts/src/audit/mod.rs",
    "PROVABILITY": "https://github.com/paiml/aprender/blob/main/"
    "crates/aprender-contracts/src/schema/validator.rs",
    "PV": "https://github.com/paiml/aprender/blob/main/crates/aprender-contracts/src/lint/rules.rs",
}

UNREADABLE = "PV-VAL-001"
OURS = "ENTRENAR-001"
NOTE = "ENTRENAR-002"


@dataclass(frozen=True)
class Rule:
    """A rule: its default `level`, its demand, its remedy, and `find`, which yields breaches."""

    id: str
    level: Level
    demands: str
    remedy: str
    find: Callable[[Outline], Iterable[Breach]] = lambda contract: ()

    @property
    def published(self) -> str:
        """The address of the rule's source; "" for a rule of this project."""
        return _SOURCES.get(self.id.partition("-")[0], "")


_OBLIGATIONS, _TESTS, _HARNESSES = _BLOCKS[1:]
_PROVES = _filled(_HARNESSES, "obligation", "name the proof obligation that it proves")
_ERROR, _WARNING, _INFO = Level.ERROR, Level.WARNING, Level.INFO

# The first seventeen rules and the PV rule have published ids and levels.
RULES: tuple[Rule, ...] = (
    Rule(
        "SCHEMA-001",
        _ERROR,
        "`metadata.references` names the sources of the contract",
        "Cite the paper, specification or contract that the clauses come from.",
        _references,
    ),
    Rule(
        "SCHEMA-002",
        _ERROR,
        "`metadata.version` is not empty",
        'Give a version, such as "1.0.0".',
        _version,
    ),
    Rule(
        "SCHEMA-003",
        _ERROR,
        "a kernel's contract has at least one equation",
        "Write down what the kernel computes, or say in metadata.kind what else it is.",
        _some_equation,
    ),
    Rule(
        "SCHEMA-004", _ERROR, "each equation has a `formula`", "Write the formula down.", _formulas
    ),
    Rule(
        "SCHEMA-005",
        _ERROR,
        "each proof obligation has a `property`",
        "Say what must hold.",
        _properties,
    ),
    Rule(
        "SCHEMA-006",
        _WARNING,
        "no two proof obligations have the same `formal` predicate",
        "Change one, or make one obligation of the two.",
        _distinct(_OBLIGATIONS, "formal", "formal predicate"),
    ),
    Rule(
        "SCHEMA-007",
        _ERROR,
        "no two falsification tests have the same `id`",
        "Rename one.",
        _distinct(_TESTS, "id", "id"),
    ),
    Rule(
        "SCHEMA-008",
        _ERROR,
        "each falsification test has a `prediction`",
        "Say what the test observes if the contract holds.",
        _filled(_TESTS, "prediction", "say what the test observes if the contract holds"),
    ),
    Rule(
        "SCHEMA-009",
        _WARNING,
        "each falsification test has `if_fails`",
        "Say what a failure would mean.",
        _filled(_TESTS, "if_fails", "say what a failure would mean"),
    ),
    Rule(
        "SCHEMA-010",
        _ERROR,
        "no two Kani harnesses have the same `id`",
        "Rename one.",
        _distinct(_HARNESSES, "id", "id"),
    ),
    Rule(
        "SCHEMA-011",
        _ERROR,
        "each Kani harness names its `obligation`",
        "Name the proof obligation that the harness proves.",
        _PROVES,
    ),
    Rule(
        "SCHEMA-012",
        _WARNING,
        "each Kani harness has a `bound`",
        "Give the number of times that loops are unwound.",
        _filled(_HARNESSES, "bound", "give the number of times that loops are unwound"),
    ),
    Rule(
        "SCHEMA-013",
        _WARNING,
        "a kernel's contract, or a contract of clauses, has a `qa_gate`",
        "Say which checks must hold for a pass.",
        _gate,
    ),
    Rule(
        "PROVABILITY-001",
        _ERROR,
        "a kernel's contract has proof obligations, at least as many falsification tests, "
        "and Kani harnesses",
        "Write what is missing, or say in metadata.kind what else the contract is.",
        _provability,
    ),
    Rule(
        "AUDIT-001",
        _WARNING,
        "the contract has a falsification test",
        "Write one: a contract that no test could refute says nothing.",
        _some_test,
    ),
    Rule(
        "AUDIT-002",
        _ERROR,
        "each Kani harness can be traced to a proof obligation: `obligation` is not empty",
        "Name the proof obligation that the harness proves.",
        _PROVES,
    ),
    Rule(
        "AUDIT-003",
        _WARNING,
        "a contract with equations also has proof obligations, or clauses",
        "Derive proof obligations from the equations.",
        _some_obligation,
    ),
    Rule(
        UNREADABLE,
        _ERROR,
        "the file can be read as a contract: it is YAML, and has the structure of the format",
        "Correct the file; docs/contract-format.md has the format.",
    ),
    Rule(
        OURS,
        _WARNING,
        "entrenar-check reads every key of the contract, and can decide every clause",
        "Correct the name, or say by which check the clause is decided.",
        _known_kind,
    ),
    Rule(
        NOTE,
        _INFO,
        "nothing: the note says how entrenar-check understood a valid part of the contract",
        "Nothing has to be done.",
    ),
)
BY_ID = {rule.id: rule for rule in RULES}
