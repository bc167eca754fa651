"""Picks the files of a checkpoint that a stage needs, by the names of the weights in them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import json_text

INDEX = "model.safetensors.index.json"


def read(text: str | bytes) -> dict[str, Any]:
    """Return the content of INDEX. Raises UsageError unless it names a file for each weight."""
    try:
        index = json_text.load(text)
        weights = index["weight_map"].items()
        is_known = all(isinstance(one, str) for pair in weights for one in pair)
    except (AttributeError, KeyError, TypeError, ValueError):
        is_known = False
    if not is_known:
        raise UsageError(f"{INDEX} can't be read: it has no weight_map of names; copy it again")
    found: dict[str, Any] = index
    return found


def of_stage(index: Mapping[str, Any], stack: str, own: range) -> set[str]:
    """Return the names of the files that have weights of the blocks `own`, or of no block.

    `index` is the content of INDEX, and `stack` the last part of the name of the list of blocks.
    """
    block = re.compile(rf"(?:^|\.){re.escape(stack)}\.(\d{{1,9}})\.")
    needed = set[str]()
    for name, file in index["weight_map"].items():
        found = block.search(name)
        if found is None or int(found[1]) in own:
            needed.add(file)
    return needed


def narrowed(index: Mapping[str, Any], files: set[str]) -> str:
    """Return the content of INDEX for a folder that has only `files` of the weights."""
    weights = {name: file for name, file in index["weight_map"].items() if file in files}
    return json.dumps({**index, "weight_map": weights})
