"""How many scenarios the entries of a list stand for, and whether each of them is one."""

from __future__ import annotations

from itertools import islice

from entrenar_py import scenario
from entrenar_py.contract.binding_file import Entry
from entrenar_py.contract.problems import Problems
from entrenar_py.contract.rules import SCENARIOS_MAX
from entrenar_py.errors import UsageError


def check(entry: Entry, problems: Problems) -> None:
    """Says where an entry of a binding's scenarios is none, or stands for too many."""
    what = f"{entry.record.what}: scenarios"
    nodes = entry.record.maps("scenarios")
    for node, record in zip(nodes, entry.scenarios, strict=True):
        try:
            count = sum(1 for _ in islice(scenario.expand(record), SCENARIOS_MAX + 1))
        except UsageError as error:
            problems.error(node.at, f"{what}: {error}")
            continue
        if not 0 < count <= SCENARIOS_MAX:
            message = f"stand for {'over ' if count else ''}{count and SCENARIOS_MAX}"
            problems.error(node.at, f"{what}: {message}; use 1 to {SCENARIOS_MAX}")
