"""The trace of a run of a command: its traits as it was told them."""

from __future__ import annotations

import pytest

from entrenar_py.check.command import run_trace
from entrenar_py.check.command.run_settings import RunSettings, Turn
from entrenar_py.shared.trace import Traits


@pytest.mark.parametrize(
    ("declared", "told", "kept"),
    [(1.0, "", None), (1e9, "", 1e9), (0.25, "0.25", 0.25), (1.0, "0.25", None), (None, "", None)],
)
def test_a_declared_norm_that_a_knob_replaces(
    declared: float | None, told: str, kept: float | None
) -> None:
    """A script that was told its clipping norm is judged by that, not by another it declares."""
    settings = RunSettings(world_size=2, seed=0, turn=Turn("clip", told) if told else None)
    traits = run_trace._as_told_to_clip(Traits(clipping="other", clip_norm=declared), settings)
    assert traits.clip_norm == kept
    assert traits.clipping == ("other" if told else "told")
