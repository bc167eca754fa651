"""Reads how a script spells the values of knobs, as its configuration says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def read(given: Any, name: str, tell: Callable[..., None]) -> dict[str, dict[str, str]]:
    """Knob -> value -> what stands for it in the command, of the table of tables `given`.

    What is wrong is told, and left out. Which knobs there are is looked at with the command.
    """
    if not isinstance(given, dict):
        tell(f'{name} is a table of tables: {name}.strategy = {{on = "ddp", off = "none"}}', name)
        return {}
    found: dict[str, dict[str, str]] = {}
    for knob, values in given.items():
        if not isinstance(values, dict):
            tell(f'{name}.{knob} is a table: value = "what stands for it"', name, knob)
            continue
        for value, text in values.items():
            if type(text) in (str, int, float):
                found.setdefault(knob, {})[value] = str(text)
            else:
                tell(f"{name}.{knob}.{value} = {text}: give text or a number", name, knob, value)
    return found
