"""The probe `wire` really decodes bytes, and records the true outcome."""

from __future__ import annotations

import pytest

from entrenar_py import systems
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Admission, Carried, Refused
from entrenar_py.train.upstream.frames import WIRE_MESSAGES
from entrenar_py.train.wire import frames, messages
from entrenar_py.train.wire.frames import CHUNK_BYTES

SCENARIO = Scenario(system="wire", workload="linear", world_size=1, seed=5)


def test_every_message_is_carried() -> None:
    """Each kind is carried, without a payload and with odd bytes and several chunks."""
    carried = systems.run(SCENARIO).of(Carried)
    ours = {kind.__name__ for kind in messages.MESSAGES.values()}
    original = {f"original: {kind.__name__}" for kind in WIRE_MESSAGES.values()}
    assert {one.message for one in carried} == ours | original
    for kind in messages.MESSAGES.values():
        sizes = {one.payload_bytes for one in carried if one.message == kind.__name__}
        assert (max(sizes) > 3 * CHUNK_BYTES) == bool(kind.carries)
    assert max(one.pieces for one in carried) > 100


def test_the_same_seed_the_same_events() -> None:
    """Two runs record equal events, but for the memory, which is measured."""
    first, again = (systems.run(SCENARIO) for _ in range(2))
    facts = [[(one.case, one.error) for one in run.of(Refused)] for run in (first, again)]
    assert facts[0] == facts[1]
    assert len(facts[0]) > 64


def test_applicants() -> None:
    """One applicant is entitled, many are not, and each refusal has an answer."""
    asked = systems.run(SCENARIO).of(Admission)
    assert sum(one.entitled for one in asked) == 1
    assert {one.answer for one in asked if not one.let_in} == {"Refuse"}


def test_a_crash_of_the_codec_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another exception than ProtocolError is recorded by its name, not raised."""

    def crash(holds: bool, message: str) -> None:
        if not holds:
            raise ZeroDivisionError(message)

    monkeypatch.setattr(frames, "_require", crash)
    errors = {one.error for one in systems.run(SCENARIO).of(Refused)}
    assert "ZeroDivisionError" in errors
