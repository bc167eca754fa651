"""The rounds of ranks that step alone and are brought together, as their files show them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.shared.trace import Event, Synchronised


def shown(
    ranks: Sequence[RankTrace], events: Sequence[Event]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the scenario's options and the traits of the outer step; both empty without a rule.

    The option `inner_steps` is left out if it was not declared and rounds have several lengths, or
    none are known.
    """
    rules = [rank.outer for rank in ranks if rank.outer]
    meetings: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if isinstance(event, Synchronised):
            meetings[event.rank].add(event.step)
    if not rules:
        return {}, {}
    first = rules[0]
    options: dict[str, Any] = {}
    declared = next((rule["inner_steps"] for rule in rules if "inner_steps" in rule), None)
    length = declared or usual_length([sorted(steps) for steps in meetings.values()])
    if length is not None:
        options["inner_steps"] = length
    if first["rule"] == "other" or any(_bare(rule) != _bare(first) for rule in rules):
        return options, {"outer": "other"}
    options |= {"outer_learning_rate": first["lr"], "outer_momentum": first["momentum"]}
    return options, {} if first["rule"] == "nesterov" else {"outer": first["rule"]}


def _bare(rule: Any) -> dict[str, Any]:
    return {name: value for name, value in rule.items() if name != "inner_steps"}


def usual_length(meetings: Sequence[Sequence[int]]) -> int | None:
    """Return the number of steps of a round; None without any, or if all have several lengths.

    The last round may be shorter. If ranks differ, it is the length that most rounds have.
    """
    if not meetings:
        return None
    rounds = [
        [step - before for before, step in zip((-1, *steps), steps, strict=False)]
        for steps in meetings
    ]
    if all(lengths == rounds[0] for lengths in rounds):
        whole = rounds[0][:-1] or rounds[0]
        return whole[0] if len({*whole}) == 1 and rounds[0][-1] <= whole[0] else None
    ((length, _),) = Counter(length for lengths in rounds for length in lengths).most_common(1)
    return length
