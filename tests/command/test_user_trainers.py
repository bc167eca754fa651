"""Scripts as users write them: what is right is left alone, and each broken twin is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrenar_py.verdict import Verdict
from falsification.user_trainers import TWINS, Twin
from tests.command import scripts, zygote

# What no run of the example says anything about, or not enough: why is in its reason.
OPEN = {
    "ddp.py": {"recovery", "resume"},
    "plain_loop.py": {"recovery", "resume", "optimizer_state"},
    "accumulation.py": {"recovery", "resume"},
    "resume.py": {"recovery", "step_rule"},
}
WANTED = ("coverage", "finiteness", "determinism", "resume", "parity")


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(OPEN))
def test_no_alarm_on_what_is_right(script: str, tmp_path: Path) -> None:
    """On no clause; and all that the script reveals is held."""
    # What becomes of a worker that is killed is a matter of the launcher: tried with one script.
    wanted = (*WANTED, "recovery") if script == "ddp.py" else WANTED
    told = scripts.command(scripts.EXAMPLES / script)
    traces = scripts.record(told, wanted, tmp_path, launch=zygote.launch)
    found = scripts.findings(traces)
    assert {name: one for name, one in found.items() if one.verdict is Verdict.FALSIFIED} == {}
    undecided = {name for name, one in found.items() if one.verdict is Verdict.INCONCLUSIVE}
    assert undecided == OPEN[script], {name: found[name].reason for name in undecided}
    assert all(one.compared for name, one in found.items() if name not in undecided)


@pytest.mark.parametrize("twin", TWINS, ids=[one.name.replace(" ", "-") for one in TWINS])
def test_every_broken_twin_is_found(twin: Twin, tmp_path: Path) -> None:
    """By its check, and where it is broken."""
    text = (scripts.EXAMPLES / twin.script).read_text()
    for before, after in twin.changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    script = tmp_path / twin.script
    script.write_text(text)
    traces = scripts.record(
        scripts.command(script),
        {twin.check},
        tmp_path / "runs",
        world_sizes=(twin.world_size,),
        launch=zygote.launch,
    )
    finding = scripts.findings(traces, {twin.check})[twin.check]
    assert finding.verdict is Verdict.FALSIFIED, finding
    found = finding.counterexample
    assert found is not None
    for name in ("step", "rank", "tensor"):
        due = getattr(twin, name)
        assert due in (None, getattr(found, name)), (name, finding)
    assert twin.words in finding.reason
