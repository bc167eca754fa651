"""The optimizer that the files of a run's ranks show it had."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entrenar_py.errors import UsageError
from entrenar_py.rank_files.rank_trace import RankTrace
from entrenar_py.trace import Traits, Update
from entrenar_py.trace.traits import CONSTANTS

# torch.optim's optimizers whose rule is known to the checks, and the one in a scenario's words.
_KINDS = {"SGD": "momentum", "Adam": "adamw", "AdamW": "adamw"}


@dataclass(frozen=True, kw_only=True)
class ShownOptimizer:
    """A scenario's fields on the optimizer, and in `traits` what differs from the usual.

    `rule: other` where no check knows what the optimizer makes of a gradient, `schedule: other`
    where the learning rate changes, `decay: coupled` where decay is a part of the gradient.
    """

    kind: str
    learning_rate: float
    weight_decay: float
    traits: Mapping[str, Any]


def of(ranks: Sequence[RankTrace], updates: Sequence[Update]) -> ShownOptimizer:
    """Return the optimizer of the first rank's header, and how the run departs from it."""
    header: Mapping[str, Any] = ranks[0].header if ranks else {}
    groups: Sequence[Mapping[str, Any]] = header.get("groups") or [{}]
    name, first = header.get("optimizer", ""), groups[0]
    decays = {float(group.get("weight_decay") or 0) for group in groups} - {0.0}
    rate = float(first.get("initial_lr", first.get("lr", 0.0)))
    kind = _KINDS.get(name, "momentum")
    if name == "SGD" and not first.get("momentum"):
        kind = "sgd"
    traits = {} if kind == "sgd" or name not in _KINDS else _unusual(first)
    if name not in _KINDS or len(decays) > 1 or _is_mixed(groups) or _has_changed(ranks):
        traits["rule"] = "other"
    if decays and name == "Adam" and not first.get("decoupled_weight_decay"):
        traits["decay"] = "coupled"
    if any(update.learning_rate != rate for update in updates):
        traits["schedule"] = "other"
    return ShownOptimizer(
        kind=kind,
        learning_rate=rate,
        weight_decay=max(decays, default=0.0),
        traits=traits,
    )


def _unusual(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants of a parameter group that differ from the usual ones.

    Where one is nothing that torch.optim would take, no check knows the rule.
    """
    constants = {name: group[name] for name in CONSTANTS if name in group}
    if isinstance(constants.get("nesterov"), int):
        constants["nesterov"] = bool(constants["nesterov"])
    try:
        return Traits.from_dict(constants).to_dict()
    except UsageError:
        return {"rule": "other"}


def _is_mixed(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether parameter groups differ, or have a rule that no check knows."""
    first = groups[0]
    return any(
        group.get("maximize")
        or group.get("amsgrad")
        or any(group.get(name) != first.get(name) for name in CONSTANTS)
        for group in groups
    )


def _has_changed(ranks: Sequence[RankTrace]) -> bool:
    """Return whether constants changed while a rank trained, or differ between ranks and lives."""
    return any(rank.changed for rank in ranks) or len({_declared(rank) for rank in ranks}) > 1


def _declared(rank: RankTrace) -> str:
    """Return as text the optimizer that a rank declared when it began, but for its rates."""
    groups: Sequence[Mapping[str, Any]] = rank.header.get("groups") or ()
    constants = [[group.get(name) for name in (*CONSTANTS, "weight_decay")] for group in groups]
    return json.dumps([rank.header.get("optimizer", ""), constants])
