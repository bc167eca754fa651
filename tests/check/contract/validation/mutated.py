"""Contracts changed at random, as a careless edit, another tool or a merge would change them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

Change = Callable[[random.Random, Any, Any], None]

ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1e400, float("nan"), 10**30, "", " ", "id", "F-DP-001", "1%", "a: b"),
    *("\u202e\x1b[2J", "x" * 3000, [], {}, [[]], [None], [{}], {"id": {}}, {"": ""}),
    *([{"id": ["a"]}], [{"id": "T-1"}, {"id": "T-1"}], {"formula": {"formula": "x"}}),
    *([["a", {"b": ["c"]}]], {"0": 0, "true": True}, "F-DP-001..F-DP-999999999", "2026-11-22"),
)
NAMES = (
    *("id", "rule", "kind", "metadata", "equations", "proof_obligations", "falsification_tests"),
    *("kani_harnesses", "qa_gate", "checks", "scenarios", "mutants", "tolerance", "bindings"),
    *("invariants", "version", "registry", "formula", "property", "obligation", "depends_on"),
)


def mutated(contract: Any, rng: random.Random, *, num_changes: int) -> Any:
    """Return a copy of the plain data `contract` with some changes at random places."""
    changed = {"root": copy.deepcopy(contract)}
    for _ in range(num_changes):
        holder, place = rng.choice([*_places(changed)])
        rng.choice(CHANGES)(rng, holder, place)
    return changed.get("root")


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Yield (container, key or index) of every value under `node`."""
    found: list[tuple[Any, Any]] = []
    waiting = [node]
    while waiting:
        holder = waiting.pop()
        keys = range(len(holder)) if isinstance(holder, list) else list(holder)
        for place in keys:
            found.append((holder, place))
            if isinstance(holder[place], dict | list):
                waiting.append(holder[place])
    return found


def _replace(rng: random.Random, holder: Any, place: Any) -> None:
    holder[place] = copy.deepcopy(rng.choice(ODD))


def _remove(rng: random.Random, holder: Any, place: Any) -> None:
    if place != "root":
        del holder[place]


def _repeat(rng: random.Random, holder: Any, place: Any) -> None:
    if isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[place]))
    else:
        _rename(rng, holder, place)


def _rename(rng: random.Random, holder: Any, place: Any) -> None:
    if isinstance(holder, dict) and place != "root":
        holder[rng.choice((*NAMES, f"{place}s", ""))] = holder.pop(place)


def _wrap(rng: random.Random, holder: Any, place: Any) -> None:
    inner = holder[place]
    holder[place] = rng.choice(([inner], {rng.choice(NAMES): inner}, [[inner]], [inner, inner]))


CHANGES: tuple[Change, ...] = (_replace, _replace, _remove, _repeat, _rename, _wrap)
