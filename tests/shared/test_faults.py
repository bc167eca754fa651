"""Fault records: the fields that each kind allows and requires."""

from __future__ import annotations

import json
from typing import Any

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import (
    KINDS,
    LASTING,
    NEEDED,
    ON_THE_WAY,
    OPTIONAL,
    PLACES,
    SILENT,
    Fault,
)
from entrenar_py.train.wire.messages import MESSAGES

GIVEN: dict[str, Any] = {
    "step": 1,
    "rank": 0,
    "shard": 2,
    "tensor": "bias",
    "element": 3,
    "value": "nan",
    "backend": "cpu",
    "at": "Commit",
    "seconds": 1.5,
}

# What kinds take that would not take those.
OTHERS: dict[str, dict[str, Any]] = {
    "huge_gradient": {"value": "1e38"},
    "nudged_weights": {"value": "1e-6"},
    **{kind: {"value": "2"} for kind in LASTING},
    **{kind: {"value": "0.5"} for kind in SILENT},
    "lie": {"value": "twice", "at": "Staged"},
    "stranger": {"value": "taken_rank"},
}
WRONG: dict[str, Any] = {"kind": "corrupt_worker", "step": 1, "rank": 0}
LIE: dict[str, Any] = {"kind": "lie", "step": 1, "rank": 0}
STRANGER: dict[str, Any] = {"kind": "stranger", "step": 0}
FROZEN: dict[str, Any] = {"kind": "freeze", "step": 0, "rank": 0, "at": "Commit"}


def _given(kind: str, names: tuple[str, ...]) -> dict[str, Any]:
    fitting = {**GIVEN, **OTHERS.get(kind, {})}
    return {name: fitting[name] for name in names}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives_json(kind: str) -> None:
    """to_dict, JSON, from_dict: the same fault, and no key that is not set."""
    given = _given(kind, (*NEEDED[kind], *OPTIONAL.get(kind, ())))
    fault = Fault(kind=kind, **given)
    assert fault.to_dict() == {"kind": kind, **given}
    assert Fault.from_dict(json.loads(json.dumps(fault.to_dict()))) == fault


@pytest.mark.parametrize(("kind", "names"), NEEDED.items())
def test_what_a_kind_needs_can_not_be_left_out(kind: str, names: tuple[str, ...]) -> None:
    """A fault without a required field is refused, as it would silently never strike."""
    for missing in names:
        rest = _given(kind, tuple(name for name in names if name != missing))
        with pytest.raises(UsageError, match=f"fault {kind} {missing}=None: {kind} needs"):
            Fault(kind=kind, **rest)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_kind_does_not_look_at_is_refused(kind: str) -> None:
    """A field that the kind ignores is refused; the message lists the fields that it takes."""
    given = _given(kind, (*NEEDED[kind], *(("rank",) if kind == "stranger" else ())))
    taken = (*NEEDED[kind], *OPTIONAL.get(kind, ()))
    for name in GIVEN.keys() - set(taken):
        message = f"fault {kind} {name}=.*: this kind doesn't take it; it takes {', '.join(taken)}"
        with pytest.raises(UsageError, match=message):
            Fault(kind=kind, **given, **{name: GIVEN[name]})


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "NaN", "-Infinity"])
def test_non_finite_values_are_text(value: str) -> None:
    """Every text that float() reads as not finite is allowed."""
    assert Fault(kind="non_finite_loss", step=0, value=value).value == value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "meteor"}, "fault kind='meteor': allowed are non_finite_gradient"),
        ({"kind": []}, r"fault kind=\[\]: allowed are"),
        ({"kind": "absent", "rank": True}, "rank=True: use a whole number >= 0"),
        ({"kind": "absent", "rank": 1.0}, r"rank=1\.0: use a whole number >= 0"),
        ({"kind": "absent", "shard": "1"}, "shard='1': use a whole number >= 0"),
        ({"kind": "absent", "element": -1}, "element=-1: use a whole number >= 0"),
        ({"kind": "absent", "tensor": 3}, "tensor=3: use text"),
        ({"kind": "absent", "backend": ["cpu"]}, r"backend=\['cpu'\]: use text"),
        ({"kind": "absent", "value": "nan"}, "value='nan': this kind doesn't take it"),
        ({"kind": "leave", "step": 0, "rank": 0, "value": "nan"}, "this kind doesn't take it"),
        ({"kind": "cut", "step": 0, "rank": 0, "at": 3}, "at=3: use text"),
        ({"kind": "cut", "step": 0, "rank": 0, "at": "Hello"}, "at='Hello': use one of Assign"),
        ({**FROZEN, "seconds": 0}, "seconds=0: use a number > 0"),
        ({**FROZEN, "seconds": -1.0}, r"seconds=-1\.0: use a number > 0"),
        ({**FROZEN, "seconds": float("nan")}, "seconds=nan: use a number > 0"),
        ({**FROZEN, "seconds": float("inf")}, "seconds=inf: use a number > 0"),
        ({**FROZEN, "seconds": "1"}, "seconds='1': use a number > 0"),
        ({**FROZEN, "seconds": True}, "seconds=True: use a number > 0"),
        ({"kind": "non_finite_loss", "step": 0, "value": float("nan")}, "value=nan: use text"),
        ({"kind": "non_finite_loss", "step": 0, "value": "3"}, "value='3': use nan, inf or -inf"),
        ({"kind": "non_finite_loss", "step": 0, "value": "naan"}, "use nan, inf or -inf"),
        ({"kind": "huge_gradient", "step": 0, "value": "inf"}, "value='inf': use a finite number"),
        ({**WRONG, "value": "nan"}, "value='nan': use a finite number"),
        ({**LIE, "at": "Staged", "value": "nan"}, "lie value='nan': use one of old_step, too_l"),
        ({**LIE, "at": "Commit", "value": "twice"}, "at='Commit': use one of TreeNode,"),
        (
            {**LIE, "at": "Staged", "value": "too_long"},
            "use one of TreeNode, Partial with value=too_long",
        ),
        ({**LIE, "step": 0, "at": "Staged", "value": "old_step"}, "step=0: there is no previous"),
        ({**STRANGER, "value": "friend"}, "value='friend': use one of taken_rank, one_too_many"),
        ({**STRANGER, "value": "taken_rank"}, "rank=None: value=taken_rank needs a rank"),
        ({**STRANGER, "rank": 1, "value": "silent"}, "rank=1: value=taken_rank needs a rank"),
    ],
)
def test_impossible_faults_are_refused(fields: dict[str, Any], message: str) -> None:
    """Each message gives the value and what is allowed."""
    with pytest.raises(UsageError, match=message):
        Fault(**fields)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "fault None: use a mapping"),
        (["leave"], r"fault \['leave'\]: use a mapping"),
        ({}, "fault without kind: add what is missing"),
        ({"kind": "leave", "when": 3}, "fault key='when': allowed are kind, step"),
        ({"kind": "leave", 3: 3, None: 1}, "fault key=3: allowed are"),
    ],
)
def test_what_is_no_fault_is_refused(record: Any, message: str) -> None:
    """A record that is no fault gives a UsageError, never a TypeError."""
    with pytest.raises(UsageError, match=message):
        Fault.from_dict(record)


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("kind", ON_THE_WAY)
def test_what_befalls_messages(kind: str, at: str) -> None:
    """Each kind is possible at each message that has a step; whole seconds are allowed."""
    given = {**_given(kind, NEEDED[kind]), "at": at}
    if "seconds" in given:
        given["seconds"] = 2
    fault = Fault(kind=kind, **given)
    assert Fault.from_dict(fault.to_dict()) == fault
    assert at in {one.__name__ for one in MESSAGES.values() if "step" in one.__dataclass_fields__}
