"""The fuzzer's targets without the fuzzer, on its seeds and on nearly valid inputs."""

from __future__ import annotations

import struct
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py.train.wire import frames
from entrenar_py.train.wire.frames import Encoder
from entrenar_py.train.wire.messages import Message
from tests.fuzz import corpus
from tests.fuzz.corpus import Said
from tests.fuzz.door import Door, hello_of, session_key
from tests.fuzz.targets import COMPLETED, TARGETS, script, spoken

SEEDS = [(name, number) for name, seeds in corpus.seeds().items() for number in range(len(seeds))]
PARTS = {"take_part": corpus.part_of_a_worker(), "listen": corpus.part_of_a_coordinator()}
FILES = ("read_rank_file", "read_counterexample", "read_coordinator", "read_checkpoint")
# Values by annotation: extreme ones, and valid ones in the wrong place.
ODD: dict[str, list[Any]] = {
    "int": [0, 1, 2, 3, 4, 63, 64, 2**32, 2**63 - 1],
    "float": [0.0, -0.0, -1.0, -4.0, 1e-310, 1e308, float("nan"), float("inf"), float("-inf")],
    "tuple[int, ...]": [(), (0,), (2,), (3, 2), (2, 2), (0, 1, 2, 3), (4,), (2**63 - 1,)],
    "bool": [True],
    "Proof": ["0" * 64],
    "str | None": ["tensor"],
}


def test_every_target_has_seeds() -> None:
    """A new target must have seeds."""
    assert corpus.seeds().keys() == TARGETS.keys()


@pytest.mark.parametrize(("name", "number"), SEEDS)
def test_seeds_are_found_right(name: str, number: int) -> None:
    """The fuzzer's seeds are not findings."""
    TARGETS[name](corpus.seeds()[name][number])


def test_a_seed_goes_all_the_way() -> None:
    """The seed of a well-behaved worker is accepted to its end."""
    door, hello = Door(0, 1), hello_of(1)
    door.say(b"".join(Encoder().encode(hello)))
    for frame in spoken(
        corpus.seeds()["take_part"][0], session_key(hello), direction=frames.TO_COORDINATOR
    ):
        assert door.end.finished is None
        door.say(frame)
        door.work()
    assert door.end.finished == COMPLETED


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in FILES])
@settings(max_examples=60)
@given(data=st.data())
def test_anything_nearly_right(name: str, data: st.DataObject) -> None:
    """A seed has bytes changed, removed and inserted."""
    nearly_right(name, data)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=15)
@given(data=st.data())
def test_files_nearly_right(name: str, data: st.DataObject) -> None:
    """The same for files that take longer to read; `make fuzz` tries more of them."""
    nearly_right(name, data)


def nearly_right(name: str, data: st.DataObject) -> None:
    seed = data.draw(st.sampled_from(corpus.seeds()[name]))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(seed)))
        end = data.draw(st.integers(start, min(start + 8, len(seed))))
        seed = seed[:start] + data.draw(st.binary(max_size=8)) + seed[end:]
    TARGETS[name](seed)


@pytest.mark.parametrize("name", PARTS)
@settings(max_examples=60)
@given(data=st.data())
def test_a_part_with_odd_words(name: str, data: st.DataObject) -> None:
    """Some messages of a valid conversation have another value, or come twice, late, or never."""
    said = list(PARTS[name])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(said) - 1))
        match data.draw(st.sampled_from(["odd", "odd", "odd", "again", "late", "never", "bits"])):
            case "odd":
                said[place] = (data.draw(st.sampled_from(_odd(said[place][0]))), said[place][1])
            case "again":
                said.insert(place, said[place])
            case "late":
                said.append(said.pop(place))
            case "never":
                del said[place]
            case _:
                message, payload = said[place]
                said[place] = message, _bent(payload, data) if payload else payload
    TARGETS[name](script(*said))


@pytest.mark.parametrize("name", PARTS)
def test_every_odd_word_alone(name: str) -> None:
    """Each field of each message gets each value of its kind."""
    for place, (message, payload) in enumerate(PARTS[name]):
        for odd in _odd(message):
            said: list[Said] = [*PARTS[name]]
            said[place] = odd, payload
            TARGETS[name](script(*said))


def _odd(message: Message) -> list[Message]:
    """Return `message` with another value in one field, or unchanged if it has no such field."""
    return [
        replace(message, **{field.name: value})
        for field in fields(message)
        for value in ODD.get(str(field.type), [])
    ] or [message]


def _bent(payload: bytes, data: st.DataObject) -> bytes:
    """Return `payload` with four bytes changed: a float, or part of an integer."""
    at = 4 * data.draw(st.integers(0, len(payload) // 4 - 1))
    value = struct.pack("<f", data.draw(st.floats(width=32)))
    return payload[:at] + value + payload[at + 4 :]
