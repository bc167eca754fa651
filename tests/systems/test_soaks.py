"""The soaks themselves: their scenarios can run, a short one passes, and growth is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.shared import systems
from entrenar_py.train.coordinator.server import Server
from tests.systems import soak_hour, soak_real
from tests.systems.holdings import Holdings
from tests.systems.soak_real import Held, Soak

NUM_SEEDS = 100


def test_what_is_drawn_can_be_run() -> None:
    """Every scenario drawn is possible, for real processes and for the simulated hour."""
    for seed in range(NUM_SEEDS):
        scenario = soak_real.draw(seed)
        systems.require_possible(scenario)
        assert all(fault.seconds in (None, 0.2, 2.0) for fault in scenario.faults)
    for seed in range(5):
        systems.require_possible(soak_hour.draw(seed))


@pytest.fixture
def _closer_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examine the run every 20 steps, so that a short one is enough."""
    monkeypatch.setattr(soak_hour, "LOOK_EVERY", 20)


@pytest.mark.usefixtures("_closer_look")
@pytest.mark.slow
def test_some_minutes_of_an_hour() -> None:
    """A short run has the undisturbed bits, and nothing is left open or grows."""
    star, virtual_s = soak_hour.soak(soak_hour.draw(3, num_steps=80))
    assert star.seen.wrong == []
    assert star.seen.struck.total() > 8
    assert star.seen.num_rejoins > 4
    assert virtual_s > 80


@pytest.mark.usefixtures("_closer_look")
def test_an_hour_sees_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leak of 16 KiB a step is reported."""
    kept: list[bytearray] = []
    apply_average = Server.apply_average

    def forgetful(self: Server, step: int) -> None:
        kept.append(bytearray(2**14))
        apply_average(self, step)

    monkeypatch.setattr(Server, "apply_average", forgetful)
    star, _ = soak_hour.soak(soak_hour.draw(3, num_steps=60).with_(faults=()))
    assert [complaint[:16] for complaint in star.seen.wrong] == ["memory has grown"]


def test_growth_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Additional files, processes, threads or objects are reported, and memory above the limit."""
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
    """Faults that struck and ranks that came back are counted."""
    soak = Soak()
    seed = next(
        n for n in range(NUM_SEEDS) if {"kill"} <= {f.kind for f in soak_real.draw(n).faults}
    )
    soak_real.attempt(seed, soak)
    assert soak.wrong == {}
    assert soak.num_runs == 1
