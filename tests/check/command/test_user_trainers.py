"""Scripts as users write them: correct ones cause no alarm, and each planted bug is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from entrenar_py.check.clauses import CHECKS, language_model
from entrenar_py.check.clauses import knobs as knob_table
from entrenar_py.check.command import judging, run_plan, runs
from entrenar_py.check.command.launch import OUTPUT, Ended
from entrenar_py.check.command.run_settings import Run, RunSettings
from entrenar_py.check.contract import Binding, Position
from entrenar_py.shared.verdict import Verdict
from falsification.twins import Twin, family
from tests import traces
from tests.check.command import scripts, twins, zygote
from tests.traces import clause, scenario

# What no run of the example says anything about, or not enough: why is in its reason.
OPEN = {
    "ddp.py": {"recovery", "resume"},
    "plain_loop.py": {"recovery", "resume", "optimizer_state"},
    "accumulation.py": {"recovery", "resume"},
    "resume.py": {"recovery"},
    "fsdp.py": {"recovery", "resume"},
    "tensor_parallel.py": {"recovery", "resume"},
    "knobs.py": {"recovery", "resume"},
    "lora.py": {"recovery", "resume"},
    "uneven.py": {"recovery", "resume"},
    "ema.py": {"recovery", "resume"},
    "experts.py": {"recovery", "resume"},
}
# One of each knob; `make twins` has the others.
TRIED = ("GA-MEAN", "GA-STEP-EACH", "CLIP-BEFORE", "TP-PARTIAL", "weights are not")
REPORTED = ("units are drawn anew", "a share of the parameters")
BROKEN = (
    *family("trainers"),
    *(one for one in family("knobs") if one.name.startswith(TRIED)),
    *(one for one in family("reported") if one.check and one.name.startswith(REPORTED)),
)
LANGUAGE = {check.name for check in language_model.ROWS}
WANTED = ("coverage", "finiteness", "determinism", "resume", "parity")


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(OPEN))
def test_no_alarm_on_what_is_right(script: str, tmp_path: Path) -> None:
    """No clause is falsified, and every clause that the script shows enough of is held."""
    # What becomes of a worker that is killed is a matter of the launcher: tried with one script.
    wanted = (*WANTED, "recovery") if script == "ddp.py" else WANTED
    turned = scripts.KNOBS if script == "knobs.py" else ()
    told = scripts.command(scripts.EXAMPLES / script, turned)
    recorded = scripts.record(told, wanted, tmp_path, launch=zygote.launch)
    # No example has an outer optimizer, which the clauses of local SGD judge, or is given tokens.
    found = {
        name: one
        for name, one in scripts.findings(recorded).items()
        if not name.startswith("outer_") and name not in LANGUAGE
    }
    assert {name: one for name, one in found.items() if one.verdict is Verdict.FALSIFIED} == {}
    undecided = {name for name, one in found.items() if one.verdict is Verdict.INCONCLUSIVE}
    assert undecided == OPEN[script], {name: found[name].reason for name in undecided}
    assert all(one.compared for name, one in found.items() if name not in undecided)


@pytest.mark.parametrize("twin", BROKEN, ids=[one.name.replace(" ", "-") for one in BROKEN])
def test_every_broken_twin_is_found(twin: Twin, tmp_path: Path) -> None:
    """Each bug is found by its check, at its place."""
    assert twins.problem(twin, twins.findings(twin, tmp_path)) == ""


def test_knobs_are_turned_one_by_one() -> None:
    """Each knob is turned alone, and with the knobs among which it may be applied wrongly."""
    command = ("train", "{world_size}", "{clip}", "{loss_scale}")
    usual = run_plan.Plan(command=command, needs=CHECKS["parity"].needs, folder=Path())
    trace = traces.hand_written()
    turned = {name: settings.turn for name, settings in usual.pairs(trace).items()}
    assert list(turned) == ["2-workers-clip-0.001", "2-workers-loss_scale-1024"]
    first = turned["2-workers-clip-0.001"]
    assert first is not None
    assert first.values == {"clip": "0.001", "loss_scale": "1024"}
    assert not replace(usual, needs=CHECKS["coverage"].needs).pairs(trace)
    assert list(replace(usual, needs=CHECKS["step_rule"].needs).pairs(trace)) == [
        "2-workers-clip-0.001"
    ]


@pytest.mark.parametrize(("spelled", "clipping"), [("1e9", "told"), ("1.0", "other")])
def test_the_usual_norm_may_be_spelled(spelled: str, clipping: str, tmp_path: Path) -> None:
    """A script whose usual norm is another number than ours may clip in every run."""

    def launched(*_: object, folder: Path, **__: object) -> Ended:
        return Ended(code=0, seconds=0.0, tail=(), output=folder / OUTPUT, num_left=0)

    texts = {} if spelled == "1e9" else {"clip": {"1e9": spelled}}
    told = {"command": ("train", "{clip}"), "needs": (), "spelled": texts, "launch": launched}
    plan = run_plan.Plan(folder=tmp_path, **told)  # type: ignore[arg-type]
    ((_, run),) = runs.record(plan, lambda *_: None)
    assert run.trace.traits.clipping == clipping


def test_what_nothing_tries_is_said_of_a_command_too() -> None:
    """A clause without a check has a reason; one bound to systems of the harness doesn't apply."""
    place = Position("b.yaml", 1, 1)
    why = Binding(kind="test", item="A", position=place, untried="no check measures time")
    ours = Binding(kind="test", item="B", position=place, systems=("ring", "mesh"))
    unbound = replace(clause("parity"), id="F-NEW", check=None)
    clauses = [replace(unbound, binding=why), unbound, replace(clause("parity"), binding=ours)]
    tasks = judging.tasks(clauses)
    entries = [*judging.judge(tasks, {})]
    reasons = [one.finding.reason for one in entries]
    assert reasons[0] == "nothing was compared: no check measures time"
    assert "no check covers it: nothing was compared" in reasons[1]
    assert len(reasons) == 2
    (other,) = judging.elsewhere(clauses)
    assert other.reason == "its binding is for ring, mesh only"


def test_knobs_that_a_command_does_not_have() -> None:
    """An entry has the missing knobs that its check compares runs by."""
    trace = traces.hand_written(subject=scenario(system="command", workload="own"))
    (task,) = [one for one in judging.tasks([clause("parity")]) if one.check is not None]
    run = Run(settings=RunSettings(world_size=2, seed=0), trace=trace)
    (entry,) = judging.judge([task], {Path("2-workers.jsonl"): run})
    assert set(entry.untried) == set(knob_table.KNOBS)
