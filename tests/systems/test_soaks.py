"""The soaks themselves: what they draw can be run, a short one is right, and growth is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py import systems
from entrenar_py.systems.star.server import Server
from tests.systems import soak_hour, soak_real
from tests.systems.holdings import Holdings
from tests.systems.soak_real import Held, Soak

NUM_SEEDS = 100


def test_what_is_drawn_can_be_run() -> None:
    """By real processes, and as an hour of the simulator's."""
    for seed in range(NUM_SEEDS):
        scenario = soak_real.draw(seed)
        systems.require_possible(scenario)
        assert all(fault.seconds in (None, 0.2, 2.0) for fault in scenario.faults)
    for seed in range(5):
        systems.require_possible(soak_hour.draw(seed))


@pytest.fixture
def _closer_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 20 steps, so that few of them are enough."""
    monkeypatch.setattr(soak_hour, "LOOK_EVERY", 20)


@pytest.mark.usefixtures("_closer_look")
@pytest.mark.slow
def test_some_minutes_of_an_hour() -> None:
    """On the undisturbed bits, with nothing left open and nothing grown."""
    star, virtual_s = soak_hour.soak(soak_hour.draw(3, num_steps=120))
    assert star.seen.wrong == []
    assert star.seen.struck.total() > 8
    assert star.seen.num_rejoins > 4
    assert virtual_s > 120


@pytest.mark.usefixtures("_closer_look")
def test_an_hour_sees_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 KiB a step that nobody lets go."""
    kept: list[bytearray] = []
    apply_average = Server.apply_average

    def forgetful(self: Server, step: int) -> None:
        kept.append(bytearray(2**14))
        apply_average(self, step)

    monkeypatch.setattr(Server, "apply_average", forgetful)
    star, _ = soak_hour.soak(soak_hour.draw(3, num_steps=60).with_(faults=()))
    assert [complaint[:16] for complaint in star.seen.wrong] == ["memory has grown"]


def test_growth_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Any more files, processes, threads or objects are told, and memory above the allocator's."""
    before = Held(Holdings(files=8, processes=2, threads=1, objects=0), 300 * soak_real.MIB)
    after = Held(replace(before.holdings, files=9), 310 * soak_real.MIB)
    assert soak_real._grown(before, before) == []
    assert soak_real._grown(before, after) == ["files"]
    assert soak_real._grown(before, replace(after, rss_bytes=330 * soak_real.MIB)) == [
        "MiB resident",
        "files",
    ]
    assert "files                                  8               9" in capsys.readouterr().out


def test_a_real_run_is_counted() -> None:
    """The faults that struck are counted, and the ranks that came back."""
    soak = Soak()
    seed = next(
        n for n in range(NUM_SEEDS) if {"kill"} <= {f.kind for f in soak_real.draw(n).faults}
    )
    soak_real.attempt(seed, soak)
    assert soak.wrong == {}
    assert soak.num_runs == 1
