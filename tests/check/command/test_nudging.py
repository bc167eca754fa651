"""A command is run once more, with nudged weights, where rounding may be why its runs differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from entrenar_py.check.command import judging
from entrenar_py.check.command.run_settings import RunSettings, Turn
from entrenar_py.check.command.witnesses import Nudging
from entrenar_py.check.evidence.needs import NUDGED, REPEATED
from entrenar_py.check.harness import judgement
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.verdict import Verdict
from falsification.twins import family
from tests.check.causes.test_rounding_bounds import moved
from tests.check.command import twins
from tests.conftest import shipped_invariants

TASKS = judging.tasks([*shipped_invariants().values()])
TWO, ONE = RunSettings(world_size=2, seed=0), RunSettings(world_size=1, seed=0)
PLAIN = moved([0.0, 0.0])
NEAR = moved([0.0, 1e-3])


def test_a_run_is_nudged_once() -> None:
    """It is the run on one worker; its fault has the size of the nudge."""
    nudging = Nudging({NUDGED})
    assert nudging.after(TWO, PLAIN) == {}
    nudge = Fault(kind="nudged_weights", step=0, value=repr(256 * 2.0**-24))
    assert nudging.after(ONE, NEAR) == {"1-worker-nudged": replace(ONE, faults=(nudge,))}
    assert nudging.after(replace(TWO, repeat=1), NEAR) == {}


@pytest.mark.parametrize(
    ("settings", "trace"),
    [(ONE, PLAIN), (ONE, moved([1.0, 1.0])), (replace(TWO, turn=Turn("clip", "0.1")), NEAR)],
    ids=["equal", "unlike", "clipped"],
)
def test_no_run_is_nudged(settings: RunSettings, trace: object) -> None:
    """Rounding can't be why runs are unlike, and a clipped run must differ."""
    nudging = Nudging({NUDGED})
    nudging.after(TWO, PLAIN)
    assert nudging.after(settings, trace) == {}  # type: ignore[arg-type]


def test_no_check_needs_it() -> None:
    """The checks of a run decide whether one is nudged at all."""
    nudging = Nudging({REPEATED})
    nudging.after(TWO, PLAIN)
    assert nudging.after(ONE, NEAR) == {}


def test_a_chaotic_training_is_no_bug(tmp_path: Path) -> None:
    """It is compared up to the step from which on rounding decides, also when judged again."""
    right = next(twin for twin in family("chaos") if not twin.check)
    found = twins.findings(right, tmp_path, witnesses=True)
    assert twins.problem(right, found) == ""
    assert found["parity"].verdict is Verdict.HELD
    assert any("rounding alone moves" in note for note in found["parity"].notes)
    kept = judgement.load_stored([tmp_path / "runs"])
    assert "1-worker-nudged" in {file.stem for file in kept}
    (entry,) = judgement.judge_stored(
        [task for task in TASKS if task.invariant.id == "F-DP-005"], kept
    )
    assert entry.verdict is Verdict.HELD


def test_a_bug_in_a_chaotic_training(tmp_path: Path) -> None:
    """It is found in the step that rounding does not decide."""
    bug = next(twin for twin in family("chaos") if twin.check)
    assert twins.problem(bug, twins.findings(bug, tmp_path, witnesses=True)) == ""
