"""The tables and the picture on scale are current, and the formulas fit the simulated runs."""

from __future__ import annotations

import pytest

from docs import scale_page

CLOSE = 0.12  # the formulas know nothing of how messages of different phases overlap
FEW = 8  # with fewer workers a step's seconds are mostly those of a few random shards


def test_the_page_is_current() -> None:
    """Run `python docs/scale_page.py` if not."""
    page = scale_page.PAGE.read_text("utf-8")
    assert scale_page.page(page) == page
    assert scale_page.PICTURE.read_text("utf-8") == scale_page.picture()


def test_the_formulas_fit_the_simulated_runs() -> None:
    """From FEW workers on they give the seconds of a step within CLOSE.

    Every run had the bits of one worker.
    """
    runs = scale_page.KEPT["simulated"]
    assert {run["workers"] for run in runs} >= {8, 100, 1000, 10_000}
    for run in runs:
        assert (run["status"], run["digest"]) == ("completed", "same")
        if run["workers"] >= FEW:
            assert scale_page.expected_s(run) == pytest.approx(run["step_s"], rel=CLOSE)


def test_every_level_of_aggregators_adds_up() -> None:
    """A level has places for FAN_IN times as many workers as the one below."""
    counts = [1, 32, 33, 1024, 1025, 2**15, 2**15 + 1]
    assert [scale_page.num_levels(workers) for workers in counts] == [1, 1, 2, 2, 3, 3, 4]
