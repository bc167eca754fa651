"""`entrenar-check diff`: what it refuses, what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from entrenar_py.check import cli
from entrenar_py.check.command.launch import Ended
from entrenar_py.check.diff import judge, runs
from entrenar_py.check.rank_files import border_file
from entrenar_py.check.rank_files.border_file import BorderFile
from tests.check.command import forked, zygote
from tests.check.diff import models

PYTHON = sys.executable
TRAINS = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.norm(self.up(x))
        return self.head(nn.functional.gelu(x, approximate=sys.argv[1]))

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
torch.manual_seed(torch.distributed.get_rank())
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
for x, y in DataLoader(data, batch_size=8):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""


def stored(
    folder: Path, change: str, *, noise: Sequence[int] = (1, 2), command: str | None = None
) -> str:
    """Store a run of the small ViT as `--save` does, and return its folder."""
    kinds: Mapping[str, dict[str, object]] = {
        runs.PLAIN: {},
        **{f"disturbed-{seed}": {"noise": seed} for seed in noise},
        runs.OPERATIONS: {"operations": (0, 1)},
        runs.OPERATIONS_DISTURBED: {"operations": (0, 1), "noise": 1},
    }
    for kind, settings in kinds.items():
        (folder / kind).mkdir(parents=True)
        (rank,) = models.train("vit", change, **settings)  # type: ignore[arg-type]
        file = BorderFile(folder / kind, 0, {"torch": "2", "threads": change or "1"})
        for border in rank.borders:
            file.append(border)
        file.close()
    about = {"version": 1, "environment": {"command": command or change}, "steps": 2, "seed": 0}
    (folder / runs.FILE).write_text(json.dumps({**about, "problem": "", "runs": [*kinds]}))
    return str(folder)


def test_a_stored_bug_is_located(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines, the JSON and the page name the first real difference; the exit code is 1."""
    first, second = stored(tmp_path / "a", ""), stored(tmp_path / "b", "gelu tanh")
    paths = tmp_path / "out.json", tmp_path / "out.html"
    told = ["diff", first, second, "--json", str(paths[0]), "--html", str(paths[1])]
    assert cli.main(told) == 1
    shown = capsys.readouterr().out
    assert "A and B: a real difference" in shown
    assert "step 0, rank 0, forward: output of block.act" in shown
    assert "operation of B: gelu(_, approximate='tanh') in block.act at" in shown
    assert "differs inside: threads (1 | gelu tanh)" in shown
    assert len(shown.splitlines()) <= 12
    record = json.loads(paths[0].read_text())
    assert (record["verdict"], record["first_real"]["module"]) == ("real", "block.act")
    assert record["operation"]["first"] == "gelu(_)"
    page = paths[1].read_text()
    assert page.index("block.act") < page.index("Losses") < page.index("Distance over what")


@pytest.mark.parametrize(("change", "verdict"), [("", "equal"), ("channels last", "rounding")])
def test_no_bug_is_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, verdict: str
) -> None:
    """Equal runs, and those that differ by rounding, have exit code 0."""
    first, second = stored(tmp_path / "a", ""), stored(tmp_path / "b", change)
    assert cli.main(["diff", first, second]) == 0
    assert f"A and B: {verdict}" in capsys.readouterr().out


def test_without_disturbed_runs_nothing_can_be_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bits that differ need a spread, even below the floor."""
    first = stored(tmp_path / "a", "", noise=())
    assert cli.main(["diff", first, stored(tmp_path / "b", "loss by hand")]) == 4
    assert "no run with disturbed last bits" in capsys.readouterr().out


def test_another_factor_is_real_however_large_rounding_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation got inputs with the same bits: no rounding explains another eps."""
    for limit in ("MULTIPLE", "FLOOR"):
        monkeypatch.setattr(judge, limit, 1e9)
    first = stored(tmp_path / "a", "", command="same")
    second, file = stored(tmp_path / "b", "layer norm eps", command="same"), tmp_path / "diff.json"
    assert cli.main(["diff", "--json", str(file), first, second]) == 1
    assert json.loads(file.read_text("utf-8"))["first_real"]["module"] == "block.norm1"
    shown = capsys.readouterr().out
    assert "reason: the same operation with another argument, which rounding hides" in shown
    assert "first real difference: step 0, rank 0, forward: output of block.norm1" in shown
    assert "operation of B: native_layer_norm(_, [32], _, _, 1e-12) in block.norm1" in shown
    assert cli.main(["diff", first, stored(tmp_path / "c", "gelu tanh", command="same")]) == 1
    # Other operations in its place are rounding, if they differ by no more than that.
    assert cli.main(["diff", first, stored(tmp_path / "d", "gelu by hand", command="same")]) == 0


def test_the_operation_of_a_command_that_is_not_deterministic_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If both sides are the same command, bits that differ have their operation."""
    first = stored(tmp_path / "a", "", command="same")
    assert cli.main(["diff", first, stored(tmp_path / "b", "loss by hand", command="same")]) == 0
    shown = capsys.readouterr().out
    assert "first bits that differ: step 0, rank 0, backward in the script: gradient" in shown
    assert "operation of B: " in shown


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "two sides are needed, and 0 were given"),
        ([f"{PYTHON} a.py"], "two sides are needed, and 1"),
        (["--save", "new"], "--save DIR needs one command"),
        (["--again", "a", "b"], "--again needs one command, and 2"),
        (
            ["--again", "--save", "new", f"{PYTHON} a.py"],
            "--again and --save DIR: give one of them",
        ),
        (["--again", "stored"], "a stored side can't be run again"),
        (["--"], "no command after --"),
        (["no-such-program a.py", f"{PYTHON} b.py"], "there is no such program"),
        ([f"{PYTHON} 'a.py", f"{PYTHON} b.py"], "close its quotes"),
        (["here", f"{PYTHON} b.py"], "no folder of a stored run"),
        (["--steps", "0", "a", "b"], "use a whole number from 1"),
        (["--save", "here", "--", PYTHON, "a.py"], "it exists and is not empty"),
        (["broken", f"{PYTHON} b.py"], "no stored run"),
        (["--json", "missing/x", f"{PYTHON} a.py", f"{PYTHON} b.py"], "does not exist"),
    ],
)
def test_wrong_command_lines_run_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: Sequence[str],
    problem: str,
) -> None:
    """They have exit code 2, and the message says what to give."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here/file").touch()
    for name in ("broken", "stored"):
        (tmp_path / name).mkdir()
        (tmp_path / name / runs.FILE).write_text('{"version": 1}')
    monkeypatch.chdir(tmp_path)
    assert cli.main(["diff", *words]) == 2
    assert problem in capsys.readouterr().err


def test_a_command_that_fails_can_not_be_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 4, with the end of its output."""
    monkeypatch.chdir(tmp_path)
    command = f"{PYTHON} -c 'raise SystemExit(\"no data\")'"
    assert cli.main(["diff", command, command]) == 4
    assert "exit code 1; no data" in capsys.readouterr().out


def alone(text: str) -> str:
    """Return the script without ranks."""
    for before, after in (
        ('torch.distributed.init_process_group("gloo")\n', ""),
        ("torch.distributed.destroy_process_group()\n", ""),
        ("torch.distributed.get_rank()", "1"),
        ("nn.parallel.DistributedDataParallel(Net())", "Net()"),
    ):
        text = text.replace(before, after)
    return text


def forked_process(
    command: Sequence[str],
    *,
    folder: Path,
    variables: Mapping[str, str],
    usual: Mapping[str, str],
    deadline_s: float,
    cwd: Path,
    parents: object,
) -> Ended:
    """Run the script of `command` in a fork, in place of an interpreter that imports torch."""
    return zygote.launch(
        [PYTHON, forked.__file__, "1", *command[1:]],
        folder=folder,
        variables={**usual, **variables},
        deadline_s=deadline_s,
        is_over=lambda: False,
        cwd=cwd,
    )


def test_a_script_without_a_line_is_equal_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands are run in copies of the folder, and steps, losses and modules are seen."""
    monkeypatch.setattr("entrenar_py.check.command.launch.launch", forked_process)
    (tmp_path / "train.py").write_text(alone(TRAINS))
    monkeypatch.chdir(tmp_path)
    command = f"{PYTHON} train.py none"
    told = ["--disturbed", "1", "--steps", "2", "--json", "out.json"]
    assert cli.main(["diff", *told, command, command]) == 0
    assert "A and B: equal" in capsys.readouterr().out
    record = json.loads(Path("out.json").read_text())
    assert [*record["losses"][0]] == ["0", "1"]
    assert {place["module"] for place in record["ratios"]} >= {"up", "norm", "head", "loss"}


@pytest.mark.by_hand
def test_ranks_of_torchrun_are_saved_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks are recorded without a line in the script, and the changed line is named."""
    (tmp_path / "train.py").write_text(TRAINS)
    monkeypatch.chdir(tmp_path)
    launcher = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    usual = ["--steps", "2", "--disturbed", "1"]
    command = [*launcher, "train.py"]
    assert cli.main(["diff", "--save", "good", *usual, "--", *command, "none"]) == 0
    assert len([*Path("good").glob(f"*/*{border_file.SUFFIX}")]) == 2 * 4
    assert cli.main(["diff", "good", *usual, "--", *command, "tanh"]) == 1
    shown = capsys.readouterr().out
    assert "forward in the model: input of head" in shown
    assert f"{tmp_path}/train.py:14" in shown
    buckets = TRAINS.replace("(Net())", "(Net(), bucket_cap_mb=0.0001)")
    (tmp_path / "train.py").write_text(buckets)
    assert cli.main(["diff", "good", *usual, "--", *command, "none"]) == 0


@pytest.mark.by_hand
def test_a_compiled_model_differs_by_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What remains comparable without borders inside compiled code shows no bug."""
    text = alone(TRAINS)
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.py").write_text(text.replace("= Net()", "= torch.compile(Net())"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["diff", f"{PYTHON} a.py none", f"{PYTHON} b.py none"]) == 0
