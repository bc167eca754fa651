"""Dataclasses as plain records, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared.codec import INT_MAX, Form, Schema, many, plain
from entrenar_py.shared.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A record with a field of every form."""

    count: int
    share: float
    name: str | None = None
    sizes: tuple[int, ...] = ()
    pair: tuple[str, tuple[float, ...]] = ("", ())
    by_name: Mapping[str, float] = field(default_factory=dict)
    flag: bool = False


SCHEMA = Schema(Sample, what="sample")
SPARSE = Schema(Sample, sparse=True)
_floats = st.floats(allow_nan=False)
SAMPLES = st.builds(
    Sample,
    count=st.integers(-INT_MAX, INT_MAX),
    share=_floats,
    name=st.none() | st.text(),
    sizes=st.lists(st.integers(0, 9)).map(tuple),
    pair=st.tuples(st.text(), st.lists(_floats).map(tuple)),
    by_name=st.dictionaries(st.text(), _floats),
    flag=st.booleans(),
)


@given(SAMPLES)
def test_what_is_written_is_read_again(sample: Sample) -> None:
    """Records survive strict JSON; a sparse record has only the fields that aren't the default."""
    record = json.loads(json.dumps(SCHEMA.dump(sample), allow_nan=False))
    assert list(record) == [*Sample.__dataclass_fields__]
    assert SCHEMA.load(record) == sample
    sparse = SPARSE.dump(sample)
    assert SPARSE.load(json.loads(json.dumps(sparse, allow_nan=False))) == sample
    assert ("flag" in sparse) is sample.flag


def test_no_number_is_lost() -> None:
    """NaN survives, although JSON lacks it."""
    record = SCHEMA.dump(Sample(count=1, share=math.nan, by_name={"a": -math.inf}))
    assert (record["share"], record["by_name"]) == ("nan", {"a": "-inf"})
    assert math.isnan(SCHEMA.load(record).share)
    assert plain({"a": (math.inf, 1, "x")}) == {"a": ["inf", 1, "x"]}


@pytest.mark.parametrize(
    ("changes", "field_name", "message"),
    [
        ({"count": True}, "count", "sample count=True: use a whole number of at most 63 bits"),
        ({"count": 2**63}, "count", "sample count=9223372036854775808: use a whole"),
        ({"share": 10**400}, "share", "use a number, or nan, inf, -inf"),
        ({"share": "1"}, "share", "sample share='1': use a number"),
        ({"name": 1}, "name", "sample name=1: use text"),
        ({"sizes": "1"}, "sizes", r"sample sizes='1': use a list"),
        ({"sizes": ["a"]}, "sizes", r"sample sizes=\['a'\]: use a whole number"),
        ({"pair": ["a"]}, "pair", r"sample pair=\['a'\]: use a list of 2"),
        ({"by_name": []}, "by_name", r"sample by_name=\[\]: use a mapping"),
        ({"flag": 0}, "flag", "sample flag=0: use true or false"),
        ({"counts": 1}, "", "sample key='counts': did you mean 'count'?"),
        ({1: 1}, "", "sample key=1: allowed are count, share"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[Any, Any], field_name: str, message: str) -> None:
    """A wrong field is named with its value and what is allowed."""
    with pytest.raises(UsageError, match=f"{message}") as caught:
        SCHEMA.load({"count": 1, "share": 0.5} | changes)
    assert caught.value.field == field_name


def test_records_that_are_none() -> None:
    """Another type, or a record without a required field, is refused."""
    with pytest.raises(UsageError, match=r"^sample \[\]: use a mapping of count, share, \.\.\.$"):
        SCHEMA.load([])
    with pytest.raises(
        UsageError, match=r"^sample without count, share: add what is missing$"
    ) as caught:
        SCHEMA.load({})
    assert caught.value.field == "count"


def test_forms_of_ones_own() -> None:
    """A custom form replaces a name in an annotation, or all of it."""
    few = Schema(
        Sample,
        forms={
            "int": Form(lambda value: value + 1),
            "tuple[int, ...]": many(Form(lambda value: -value), most=1),
        },
    )
    loaded = few.load({"count": 1, "share": 0, "sizes": [7]})
    assert (loaded.count, loaded.sizes) == (2, (-7,))
    with pytest.raises(UsageError, match=r"sizes=\[7, 8\]: use a list of at most 1$"):
        few.load({"count": 1, "share": 0, "sizes": [7, 8]})

    @dataclass
    class Strange:
        when: complex

    with pytest.raises(TypeError, match="annotation complex: no form is known for it"):
        Schema(Strange)
