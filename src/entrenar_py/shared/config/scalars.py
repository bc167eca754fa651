"""Resolves a YAML scalar by the safe rules of YAML 1.1. No tag builds an object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from entrenar_py.shared.config.problems import Position, Problems
from entrenar_py.shared.config.tree import ScalarNode
from entrenar_py.shared.untrusted import escaping

TAG = "tag:yaml.org,2002:"
# YAML 1.1 reads 1:1:1 in base 60, at a cost quadratic in the length. Longer text is no number.
NUMBER_CHARS_MAX = 100

_RESOLVER: Any = yaml.resolver.Resolver()
_CONSTRUCTOR: Any = yaml.constructor.SafeConstructor()
_BUILDERS: dict[str, Callable[[yaml.ScalarNode], Any]] = {
    f"{TAG}int": _CONSTRUCTOR.construct_yaml_int,
    f"{TAG}float": _CONSTRUCTOR.construct_yaml_float,
    f"{TAG}bool": _CONSTRUCTOR.construct_yaml_bool,
    f"{TAG}null": lambda node: None,
    f"{TAG}str": lambda node: node.value,
    "!": lambda node: node.value,
}


def resolve(event: Any, at: Position, problems: Problems) -> ScalarNode:
    """Return the scalar of a `yaml.ScalarEvent`. Record an error if its tag doesn't fit.

    Only int, float, bool and null are converted. Dates, other kinds and errors stay text.
    """
    text: str = event.value
    tag = event.tag or _implicit_tag(event)
    value: Any = text
    if tag not in _BUILDERS:
        problems.error(at, tag_message(tag))
    else:
        try:
            value = _build(tag, text)
        except (ValueError, KeyError, IndexError):  # what SafeConstructor raises on such text
            kind = tag.removeprefix(TAG)
            given = escaping.shortened(text, chars_max=80)
            problems.error(at, f"{given!r} is no {kind}; quote it to make it text")
    return ScalarNode(at=at, text=text, value=value)


def tag_message(tag: str) -> str:
    """Return the error message for a tag that is not allowed."""
    return (
        f"tag {tag!r}: no tag builds an object here; allowed are !!str !!int !!float !!bool !!null"
    )


def _implicit_tag(event: Any) -> str:
    if event.implicit[0] and len(event.value) <= NUMBER_CHARS_MAX:
        tag: str = _RESOLVER.resolve(yaml.ScalarNode, event.value, (True, False))
        if tag in _BUILDERS:
            return tag
    return f"{TAG}str"


def _build(tag: str, text: str) -> Any:
    if tag != f"{TAG}str" and len(text) > NUMBER_CHARS_MAX:
        raise ValueError
    return _BUILDERS[tag](yaml.ScalarNode(tag, text))
