"""The GitHub Action: its inputs, and its script as a runner runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import contract_file, report

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "action.yml").read_text(encoding="utf-8")
ACTION: dict[str, Any] = yaml.safe_load(TEXT)
STEPS = ACTION["runs"]["steps"]
CHECK = next(step for step in STEPS if step.get("id") == "check")
# One clause, on one short scenario; what the report says is kept.
SHORT = "--only F-DP-002 --examples 0 --json 'my report.json'"


class Runner:
    """A GitHub runner as a step sees it: files and variables."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "output.txt"
        self.summary = folder / "summary.md"

    def run(self, **inputs: str) -> subprocess.CompletedProcess[str]:
        """Run the step `check` with these inputs and the defaults of the others."""
        values = {name: one.get("default", "") for name, one in ACTION["inputs"].items()}
        values |= inputs
        variables = {
            name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: values[found[1]], text)
            for name, text in CHECK["env"].items()
        }
        self.output.unlink(missing_ok=True)
        assert CHECK["shell"] == "python"
        return subprocess.run(
            [sys.executable, "-c", CHECK["run"]],
            cwd=self.folder,
            env={
                **os.environ,
                **variables,
                "PYTHONPATH": str(ROOT / "src"),
                "GITHUB_OUTPUT": str(self.output),
                "GITHUB_STEP_SUMMARY": str(self.summary),
                "GITHUB_WORKSPACE": str(self.folder),
            },
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the artifact, which isn't there yet."""
    monkeypatch.setenv("RUNNER_TEMP", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()
    return tmp_path / "temp/entrenar-check"


def test_every_input_is_used() -> None:
    """Every input is used, described and optional."""
    for name, one in ACTION["inputs"].items():
        assert re.search(rf"inputs\.{name}\b", TEXT), name
        assert one["description"]
        assert "default" in one
    assert set(re.findall(r"inputs\.([\w-]+)", TEXT)) == set(ACTION["inputs"])
    for step in STEPS:
        assert "shell" in step or "uses" in step  # a composite action has no default shell
        assert "${{" not in step.get("run", "")  # an input in a script would be run


def test_held(runner: Runner, tmp_path: Path, pages: Path) -> None:
    """Options with spaces arrive unsplit; exit code, summary and log are written, and no page."""
    told = {"system": "textbook", "args": SHORT, "sarif": "a b.sarif", "artifact": ""}
    done = runner.run(contract=contract_file(tmp_path), **told)
    assert done.returncode == 0, done.stdout + done.stderr
    written = report(tmp_path / "my report.json")
    assert (written["system"], written["verdict"]) == ("textbook", "held")
    assert runner.output.read_text(encoding="utf-8") == "exit-code=0\nsarif=a b.sarif\n"
    assert "✅ held" in runner.summary.read_text(encoding="utf-8")
    assert report(tmp_path / "a b.sarif")["version"] == "2.1.0"
    assert not pages.exists()


def test_a_command(runner: Runner, tmp_path: Path) -> None:
    """The command comes after --, word by word; one that records nothing fails at the clause."""
    words = "--only F-DP-002 --trace-dir t"
    done = runner.run(
        contract=contract_file(tmp_path), command="""echo '{world_size} $HOME `x`'""", args=words
    )
    assert done.returncode == 4, done.stdout + done.stderr
    printed = (tmp_path / "t" / "2-workers" / "output.txt").read_text(encoding="utf-8")
    assert printed == "2 $HOME `x`\n"
    assert "::warning file=small-v1.yaml,line=4,col=5,title=F-DP-002 inconclusive::" in done.stdout
    assert runner.output.read_text(encoding="utf-8") == "exit-code=4\n"


def test_two_contracts_have_a_run_each_in_one_log(
    runner: Runner, tmp_path: Path, pages: Path
) -> None:
    """Without the input `contract` a command is tried on both contracts for scripts.

    Each has a page in the folder of the artifact.
    """
    words = "--only F-DP-001,F-TI-001 --trace-dir t/{contract} --in-place"
    done = runner.run(command="true {world_size}", args=words, sarif="both.sarif")
    assert done.returncode == 4, done.stdout + done.stderr
    assert runner.output.read_text(encoding="utf-8") == "exit-code=4\nsarif=both.sarif\n"
    runs = report(tmp_path / "both.sarif")["runs"]
    assert [run["automationDetails"]["id"] for run in runs] == [
        "entrenar-check/distributed-training-v1.yaml/",
        "entrenar-check/training-integrity-v1.yaml/",
    ]
    assert [one["ruleId"] for run in runs for one in run["results"]] == ["F-DP-001", "F-TI-001"]
    (upload,) = [step for step in STEPS if "upload-artifact" in step.get("uses", "")]
    assert upload["with"]["path"] == "${{ runner.temp }}/entrenar-check/*.html"
    assert {page.stem for page in pages.iterdir()} == {
        "distributed-training-v1",
        "training-integrity-v1",
    }


def test_a_page_has_the_place_that_the_project_says(
    runner: Runner, tmp_path: Path, pages: Path
) -> None:
    contract_file(tmp_path)
    text = 'contract = "small-v1.yaml"\nhtml = "own.html"\n'
    (tmp_path / "entrenar-check.toml").write_text(text, encoding="utf-8")
    done = runner.run(args="--only F-DP-002 --examples 0 --system textbook")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "own.html").is_file()
    assert not [*pages.iterdir()]


def test_the_configuration(runner: Runner, tmp_path: Path) -> None:
    """Without the input `contract` the configuration names the contract."""
    contract_file(tmp_path)
    (tmp_path / "entrenar-check.toml").write_text('contract = "small-v1.yaml"\n', encoding="utf-8")
    done = runner.run(args="--only F-DP-009")
    assert "id 'F-DP-009' is not in small-v1.yaml" in done.stderr
    assert done.returncode == 2


def test_an_invalid_contract(runner: Runner, tmp_path: Path) -> None:
    """For an invalid contract nothing runs, and an earlier step's log is not used."""
    stale = tmp_path / "r.sarif"
    stale.write_text("{}", encoding="utf-8")
    done = runner.run(contract="no-such.yaml", sarif="r.sarif")
    assert done.returncode == 2
    assert not stale.exists()
    assert runner.output.read_text(encoding="utf-8") == "exit-code=2\n"


def test_a_quote_that_is_not_closed(runner: Runner) -> None:
    """An unclosed quote is refused, instead of running with half of the options."""
    done = runner.run(contract="distributed-training-v1.yaml", args="--only 'F-DP-002")
    assert done.returncode == 2
    assert done.stdout == "::error title=entrenar-check::args or command: No closing quotation\n"
