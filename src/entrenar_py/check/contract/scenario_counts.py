"""Counts the scenarios that a contract's entries expand to, and requires that each is valid."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from entrenar_py.shared import scenario
from entrenar_py.shared.config.composer import MapNode
from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.errors import UsageError

SCENARIOS_MAX = 10_000  # in one contract; running more would take too long


class Room:
    """The number of scenarios that a contract may still have: all entries share SCENARIOS_MAX."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._left = SCENARIOS_MAX

    def take(self, node: MapNode, record: Mapping[str, Any], what: str) -> None:
        """Count an entry's scenarios. Record an error if they are invalid, none, or too many."""
        if self._left < 0:
            return  # already reported
        num = 0
        try:
            num = sum(1 for _ in islice(scenario.expand(record), self._left + 1))
            if num == 0:
                message = "a list is empty, so nothing would run; fill it"
                self._problems.error(node.at, f"{what}: scenarios: {message}")
        except UsageError as error:
            self._problems.error(node.at, f"{what}: scenarios: {error}")
        self._left -= num
        if self._left < 0:
            message = f"the contract's lists multiply to over {SCENARIOS_MAX} scenarios"
            self._problems.error(node.at, f"{what}: scenarios: {message}; use shorter lists")
