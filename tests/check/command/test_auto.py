"""Scripts without a line are judged as with it, watched, and ended after their steps."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.command import run_plan
from entrenar_py.check.command.run_settings import Run
from entrenar_py.check.observing.auto import Settings
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.verdict import Verdict
from falsification.twins import Twin, family
from tests.check.command import auto_twins, scripts, twins, zygote
from tests.check.command.stripped import bare, stripped

BYPASSED = family("trainers")[0]
HELD = ("coverage", "replica_identity", "randomness", "step_rule", "weighting")
NO_OPTIONS = "argparse.Namespace(epochs=3, dir='.')"
ALTERNATING = """
import torch
from torch import nn

torch.manual_seed(0)
weights = torch.randn(3, 1).requires_grad_()
optimizer = torch.optim.SGD([weights], lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    (torch.randn(4, 3) @ weights).square().mean().backward()
    optimizer.step()
    print("made", step, flush=True)
raise SystemExit(3)
"""

# An epoch of 64 steps, of which the check tries a few; each worker has a batch of the same size.
LONG = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 3), torch.randn(512, 1))
sampler = DistributedSampler(data)
model = DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
dist.destroy_process_group()
"""

SAVING = """
import argparse, os, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

cli = argparse.ArgumentParser()
cli.add_argument("--epochs", type=int)
cli.add_argument("--dir")
told = cli.parse_args()
path = os.path.join(told.dir, "last.pt")
torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
saved = torch.load(path) if os.path.exists(path) else None
if saved:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
for epoch in range(saved["epoch"] if saved else 0, told.epochs):
    order = torch.Generator().manual_seed(epoch)
    for inputs, targets in DataLoader(data, batch_size=2, shuffle=True, generator=order):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "epoch": epoch + 1}, path)
"""


@pytest.mark.parametrize("changed", [stripped, bare])
def test_a_right_script(changed: Callable[[str], str], tmp_path: Path) -> None:
    """What is held of a script with its line is held without it, and by a line that is bare."""
    script = tmp_path / "train.py"
    script.write_text(changed((scripts.EXAMPLES / "ddp.py").read_text()))
    recorded = scripts.record(
        scripts.command(script),
        ("weighting",),
        tmp_path / "runs",
        launch=zygote.launch,
        auto=changed is stripped,
    )
    found = scripts.findings(recorded, HELD)
    assert {name: one.verdict for name, one in found.items()} == dict.fromkeys(HELD, Verdict.HELD)


@pytest.mark.by_hand
@pytest.mark.parametrize("twin", auto_twins.right(), ids=lambda twin: twin.script)
def test_what_auto_sees_a_bare_line_sees(twin: Twin, tmp_path: Path) -> None:
    """No clause that --auto holds is open on an example whose line says nothing more."""
    text = (scripts.EXAMPLES / twin.script).read_text()
    held = []
    for name, auto in (("auto", True), ("bare", False)):
        changed = twin if auto else replace(twin, text=bare(text))
        folder = tmp_path / name
        folder.mkdir()
        found = twins.findings(changed, folder, witnesses=True, auto=auto)
        held.append({check for check, one in found.items() if one.verdict is Verdict.HELD})
    assert held[0] <= held[1]


def test_a_broken_script(tmp_path: Path) -> None:
    """A bug is found at its place without the line."""
    found = twins.findings(BYPASSED, tmp_path, auto=True)
    assert twins.problem(BYPASSED, found) == ""


@pytest.mark.parametrize(
    ("line", "instead", "broken"),
    [
        ("", "", {}),
        ("sampler.set_epoch(epoch)", "pass", {"randomness": "set_epoch"}),
        ("sampler=sampler)", "shuffle=True)", {"coverage": "not shared out"}),
        ("step()", "step(SUM)", {"parity": "twice as large", "weighting": "twice as large"}),
    ],
)
def test_an_epoch_that_is_longer_than_the_tried_steps(
    line: str, instead: str, broken: dict[str, str], tmp_path: Path
) -> None:
    """Its end is seen in a run that shortens it, and one worker is given the workers' batches."""
    script = tmp_path / "train.py"
    summed = "[p.grad.mul_(dist.get_world_size()) for p in model.parameters()] and optimizer.step()"
    text = LONG.replace(line, instead) if line else LONG
    script.write_text(text.replace("optimizer.step(SUM)", summed))
    recorded = scripts.record(
        (*scripts.command(script)[:2], "{world_size}", str(script)),
        {"coverage", "parity", "randomness", "weighting"},
        tmp_path / "runs",
        launch=zygote.launch,
        witnesses=True,
        auto=True,
    )
    found = scripts.findings(recorded, ("coverage", "parity", "randomness", "weighting"))
    assert {name for name, one in found.items() if twins.is_broken(one)} == broken.keys()
    assert all(words in found[name].reason for name, words in broken.items())
    held = {one.verdict for name, one in found.items() if name not in broken}
    assert broken or held == {Verdict.HELD}, found


def test_the_end_after_the_last_step(tmp_path: Path) -> None:
    """A run ends with code 0 after its steps, not with the script's own; no module is called."""
    script = tmp_path / "train.py"
    script.write_text(ALTERNATING)
    told = (*scripts.command(script)[:2], "1", str(script))
    recorded = scripts.record(
        told,
        ("replica_identity",),
        tmp_path / "runs",
        world_sizes=(1,),
        num_steps=3,
        launch=zygote.launch,
        auto=True,
    )
    (run,) = recorded.values()
    assert run.trace.end.status == "completed", run.trace.end.reason
    assert run.trace.scenario.num_steps == 3
    assert "ended" in run.trace.environment
    output = (tmp_path / "runs/1-worker/output.txt").read_text()
    assert [line for line in output.splitlines() if "made" in line] == [
        f"made {step}" for step in range(3)
    ]


def test_a_script_that_ends_with_an_exit_code_of_its_own(tmp_path: Path) -> None:
    """As `sys.exit(main())` does with any result: the run counts, and its end is reported."""
    script = tmp_path / "train.py"
    script.write_text(ALTERNATING.replace("range(100)", "range(3)"))
    told = (*scripts.command(script)[:2], "1", str(script))
    recorded = scripts.record(
        told,
        ("replica_identity",),
        tmp_path / "runs",
        world_sizes=(1,),
        launch=zygote.launch,
        auto=True,
    )
    (run,) = recorded.values()
    assert run.trace.end.status == "completed", run.trace.end.reason
    assert run.trace.environment["ended with"] == "exit code 1: made 2"


def test_a_watched_training(tmp_path: Path) -> None:
    """A training whose ranks drift apart ends with a finding, without a line."""
    script, output = tmp_path / "train.py", tmp_path / "run/output.txt"
    text = (scripts.EXAMPLES / "ddp.py").read_text()
    for before, after in BYPASSED.changes:
        text = text.replace(before, after)
    script.write_text(stripped(text))
    told = [*scripts.command(script)[:2], "2", str(script)]
    ended = zygote.launch(
        told,
        folder=tmp_path / "run",
        variables=Settings(every=2).variables(),
        deadline_s=scripts.DEADLINE_S,
        is_over=lambda: False,
    )
    assert ended.code == 1
    assert "WatchFinding: F-DP-001: step 1, tensor 0.weight: ranks 0, 1 hold" in output.read_text()


def test_a_command_that_says_its_steps_ends_by_itself() -> None:
    """With {steps} in the command the harness ends no run; without, each after as many steps."""
    needs = CHECKS["replica_identity"].needs
    plan = run_plan.Plan(command=("train", "{steps}"), needs=needs, folder=Path(), auto=True)
    assert Settings.of(plan.observing()).steps is None
    plan = run_plan.Plan(command=("train",), needs=needs, folder=Path(), auto=True, num_steps=5)
    assert Settings.of(plan.observing()).steps == 5
    plain = run_plan.Plan(command=("train",), needs=needs, folder=Path())
    assert Settings.of(plain.observing()) == Settings(seed=0, follows=False)
    told = run_plan.Plan(command=("train", "{seed}"), needs=needs, folder=Path())
    assert Settings.of(told.observing()) == Settings(seed=None, follows=False)


def test_a_command_that_says_its_epochs_ends_by_itself() -> None:
    """With {epochs} nothing is cut: the second epoch and the checkpoints at epochs' ends come."""
    told = {"command": ("train", "{epochs}", "{workdir}"), "needs": (), "folder": Path()}
    plan = run_plan.Plan(**told, auto=True)  # type: ignore[arg-type]
    assert Settings.of(plan.observing()).steps is None
    with pytest.raises(UsageError, match=r"--steps 5: the command has no \{steps\}"):
        run_plan.Plan(**told, auto=True, num_steps=5)  # type: ignore[arg-type]


def test_what_comes_at_the_end_of_an_epoch_is_seen(tmp_path: Path) -> None:
    """With {epochs} both epochs are seen, and the checkpoint that each leaves is found."""
    script = tmp_path / "train.py"
    script.write_text(SAVING)
    told = (*scripts.command(script)[:2], "1", str(script), "--epochs", "{epochs}")
    wanted = ("coverage", "randomness", "resume")
    recorded = scripts.record(
        (*told, "--dir", "{workdir}"),
        ("resume",),
        tmp_path / "runs",
        world_sizes=(1,),
        launch=zygote.launch,
        auto=True,
    )
    found = scripts.findings(recorded, wanted)
    assert {name: found[name].verdict for name in wanted} == dict.fromkeys(wanted, Verdict.HELD)
    assert {run.trace.scenario.num_steps for run in recorded.values()} == {24}


def alone(text: str, folder: Path) -> dict[Path, Run]:
    """Return the runs of a script, by path, on one worker in a folder of its own, for F-TI-003."""
    place = folder / "place"
    place.mkdir()
    script = place / "train.py"
    script.write_text(text)
    return scripts.record(
        (*scripts.command(script)[:2], "1", script.name),
        ("resume",),
        folder / "runs",
        source=place,
        world_sizes=(1,),
        launch=partial(zygote.launch, cwd=place),
        auto=True,
    )


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("", ""),
        ('    optimizer.load_state_dict(saved["optimizer"])\n', "it has none, so none was loaded"),
    ],
)
def test_a_first_checkpoint_after_the_tried_steps(line: str, broken: str, tmp_path: Path) -> None:
    """A run goes on until an epoch's end, where the script saves, and is stopped and resumed."""
    recorded = alone(SAVING.replace(line, "").replace("cli.parse_args()", NO_OPTIONS), tmp_path)
    assert [path.stem for path in recorded if "longer" in path.stem] == [
        "1-worker-longer",
        "1-worker-longer-interrupted",
    ]
    found = scripts.findings(recorded, ("resume",))["resume"]
    assert found.verdict is (Verdict.FALSIFIED if broken else Verdict.HELD), found.reason
    assert broken in found.reason


@pytest.mark.parametrize("is_restored", [True, False])
def test_a_schedule_by_epochs_whose_place_a_resume_loses(is_restored: bool, tmp_path: Path) -> None:
    """The optimizer's state brings the rate back, so that the error shows an epoch later."""
    text = SAVING.replace("cli.parse_args()", NO_OPTIONS).replace("epochs=3", "epochs=5")
    for old, new in {
        "batch_size=2": "batch_size=4",
        "saved = torch": "plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)\n"
        "saved = torch",
        "    state = {": '    plan.step()\n    state = {"plan": plan.state_dict(), ',
        "if saved:\n": 'if saved:\n    plan.load_state_dict(saved["plan"])\n' * is_restored
        or "if saved:\n",
    }.items():
        assert old in text
        text = text.replace(old, new)
    recorded = alone(text, tmp_path)
    found = scripts.findings(recorded, ("resume",))["resume"]
    assert found.verdict is (Verdict.HELD if is_restored else Verdict.FALSIFIED), found.reason
    assert is_restored or "a different learning rate, 0.05 and not 0.025" in found.reason
    assert any("longer" in path.stem for path in recorded) is not is_restored


def test_an_environment_variable_that_says_to_resume(tmp_path: Path) -> None:
    """It is set after a stop only, as an option of the script is given."""
    text = SAVING.replace("cli.parse_args()", NO_OPTIONS).replace("batch_size=2", "batch_size=4")
    old = "saved = torch.load(path) if os.path.exists(path) else None"
    assert old in text
    new = 'start = os.environ.get("START", "scratch")\n'
    new += 'saved = torch.load(path) if start == "resume" else None'
    recorded = alone(text.replace(old, new), tmp_path)
    found = scripts.findings(recorded, ("resume",))["resume"]
    assert found.verdict is Verdict.HELD, found.reason
    assert "START=resume" in "".join(found.notes)


def test_what_belongs_to_the_line_is_stripped() -> None:
    """No name of the package is left in an example or a twin, and each is still a script."""
    texts = {path.read_text() for path in scripts.EXAMPLES.glob("*.py")}
    for whole in sorted(texts | {twin.original() for twin in twins.every()}):
        text = stripped(whole)
        nodes = [*ast.walk(ast.parse(text))]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        assert names.isdisjoint({"obs", "entrenar_py", "ObserveCallback"})
        assert "import entrenar_py" not in text


@pytest.mark.parametrize("before", [None, "/own/folder"])
def test_variables(before: str | None) -> None:
    """The start-up folder comes first on the path, before the user's own folders."""
    environment = {} if before is None else {"PYTHONPATH": before}
    variables = Settings(every=3, contract="c.yaml").variables(environment)
    first, *rest = variables["PYTHONPATH"].split(":")
    assert (Path(first) / "sitecustomize.py").is_file()
    assert rest == ([] if before is None else [before])
    assert Settings.of(variables) == Settings(every=3, contract="c.yaml")
