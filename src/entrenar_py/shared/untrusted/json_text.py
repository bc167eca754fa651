"""A reader of JSON from outside, with limits on depth and size.

The values can be copied, shown and written again. `json.loads` alone accepts any depth that the
caller's stack happens to allow, so that `copy.deepcopy` or `json.dumps` may later fail with a
RecursionError. It keeps the last value if a name appears twice, and it spends fifty bytes of memory
on an empty list, which takes two in the text. Here every error is a ValueError with the reason; the
caller adds the place.

Whole numbers have at most 4,300 digits, which is Python's own limit. NaN and infinities are
numbers, as Python writes them, since a field that nobody uses may hold one.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

DEPTH_MAX = 64  # levels of nested lists and objects; schemas of functions have about twenty
_DEEP = "nested more than {} levels deep"
_HALF = re.compile("[\ud800-\udfff]")
# A whole string, or a bracket outside of strings. An unclosed string runs to the end.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)|[\[{\]}]', re.DOTALL)
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")


def load(text: str | bytes, *, values_max: int | None = None, names_once: bool = False) -> Any:
    """Return the value that the JSON `text` holds; bytes are decoded as UTF-8.

    With `values_max`, a text with more values is refused before they take memory; this is for
    messages from peers. With `names_once`, an object with a repeated name is refused. Raises
    ValueError, which is json.JSONDecodeError for bad syntax.
    """
    if isinstance(text, bytes):
        text = text.decode()
    if values_max is not None and _num_marks(text) > values_max:
        num_marks = _num_marks(_TEXT.sub("", text))  # most brackets and commas are within strings
        if num_marks > values_max:
            raise ValueError(f"it seems to have {num_marks} values; at most {values_max} are read")
    value, end = load_at(text, skip_space(text, 0), names_once=names_once)
    end = skip_space(text, end)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    if text.count("[") + text.count("{") > DEPTH_MAX:
        require_flat(value)
    return value


def load_at(text: str, at: int, *, names_once: bool = False) -> tuple[Any, int]:
    """Return the JSON value that begins at index `at` of `text`, and the index after it.

    Any depth that can be parsed is accepted.
    """
    try:
        return (_ONCE if names_once else _PLAIN).raw_decode(text, at)
    except RecursionError:
        raise ValueError(_DEEP.format(DEPTH_MAX)) from None


def skip_space(text: str, at: int) -> int:
    """Return the index of the first character of `text`, from `at` on, that is not a space."""
    match = _SPACE.match(text, at)
    assert match is not None, "no space at all matches, too"
    return match.end()


def end_of(text: str, at: int) -> int:
    """Return the index after the list or object that begins at `at`, of any depth.

    If it is never closed, that is the end of the text. The content need not be JSON.
    """
    depth = 0
    for token in _TOKEN.finditer(text, at):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth <= 0:
            return token.end()
    return len(text)


def require_flat(value: Any, depth_max: int = DEPTH_MAX) -> None:
    """Raise ValueError if lists and mappings in `value` are nested too deeply to copy or show."""
    level, depth = [value], 0
    while level := [part for part in level if isinstance(part, Mapping | list | tuple)]:
        depth += 1
        if depth > depth_max:
            raise ValueError(_DEEP.format(depth_max))
        level = [inner for part in level for inner in _inner(part)]


def require_texts(value: Any) -> None:
    """Raise ValueError for a name or text in `value` that has a lone surrogate.

    UTF-8 can't encode one, so neither a file nor a tokenizer would accept it. `value` passed
    `require_flat`.
    """
    if isinstance(value, str):
        if not value.isascii() and (half := _HALF.search(value)):
            raise ValueError(
                f"has half of a character ({half[0].encode('unicode_escape').decode()})"
            )
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            require_texts(name)
            require_texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            require_texts(inner)


def num_chars(value: Any) -> int:
    """Return the total length of the texts, bytes and names in `value` (see `require_flat`)."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(num_chars(name) + num_chars(inner) for name, inner in value.items())
    return sum(map(num_chars, value)) if isinstance(value, list | tuple) else 0


def _num_marks(text: str) -> int:
    return sum(map(text.count, ",[{"))


def _inner(value: Any) -> Any:
    return value.values() if isinstance(value, Mapping) else value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        name, times = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{reprlib.repr(name)} appears {times} times")
    return record


# Created once: `json.loads` with options would create a decoder on each call.
_PLAIN, _ONCE = json.JSONDecoder(), json.JSONDecoder(object_pairs_hook=_once)
