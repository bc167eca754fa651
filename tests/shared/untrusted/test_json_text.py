"""JSON from outside: what is read can be copied and written, and all else is a ValueError."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared.untrusted import json_text

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(JSON)
def test_it_reads_what_json_reads(value: object) -> None:
    """Whatever JSON holds is read as json.loads reads it, from text and bytes, also within one."""
    text = json.dumps(value)
    assert json_text.load(text) == json_text.load(f" {text}\n".encode()) == value
    assert json_text.load(text, names_once=True, values_max=len(text)) == value
    assert json_text.load_at(f"[{text}]", 1) == (value, 1 + len(text))
    json_text.require_texts(value)
    if isinstance(value, dict | list):
        assert json_text.end_of(f"[{text}]", 1) == 1 + len(text)


def nested(depth: int) -> str:
    return '{"a": [' * (depth // 2) + "1" + "]}" * (depth // 2)


def test_what_is_read_can_be_copied_and_written() -> None:
    """The deepest value that is read is no trouble to anything later."""
    value = json_text.load(nested(json_text.DEPTH_MAX))
    assert json.loads(json.dumps(copy.deepcopy(value), indent=1)) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (nested(json_text.DEPTH_MAX + 2), "nested more than 64 levels deep"),
        (nested(10**6), "nested more than 64 levels deep"),
        ("[" * 10**6, "nested more than 64 levels deep"),
        ("9" * 5000, "4300 digits"),
        ('{"a": 1', "Expecting ',' delimiter"),
        ("[1] 2", "Extra data"),
        ("", "Expecting value"),
        (b"\xff", "invalid start byte"),
        ('["[,{",1,1]', "it seems to have 3 values; at most 2 are read"),
        ('[{"a": 1, "b": 2, "a": 1}]', "'a' appears 2 times"),
    ],
    ids=lambda text: str(text)[:20],
)
def test_what_is_not_read(text: str | bytes, problem: str) -> None:
    """Each bound, and bad syntax, is a ValueError with the reason."""
    values_max = 2 if text == '["[,{",1,1]' else None
    with pytest.raises(ValueError, match=problem):
        json_text.load(text, values_max=values_max, names_once=True)


def test_marks_within_texts_are_no_values() -> None:
    """A bound on values leaves long texts alone."""
    assert json_text.load('[",,,,[[{{\\",", "]"]', values_max=2) == [',,,,[[{{",', "]"]


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, {"a": [{"b": ("\udc00",)}]}])
def test_half_a_character_is_no_text(value: object) -> None:
    """A half is found in names and values."""
    with pytest.raises(ValueError, match=r"has half of a character \(\\ud"):
        json_text.require_texts(value)


@pytest.mark.parametrize("text", ['[["]]"]]', '{"a": "\\"}"}', '["\\\\"]'])
def test_brackets_within_texts_end_nothing(text: str) -> None:
    """The end of a value that can't be parsed is found by its brackets outside of texts."""
    assert json_text.end_of(f"{text}, [1]", 0) == len(text)
    assert json_text.end_of(text[:-1], 0) == len(text) - 1
