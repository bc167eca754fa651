"""The command as a user meets it: exit codes, interruption, start-up."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from entrenar_py import systems
from entrenar_py.check import clauses as checks
from entrenar_py.check.harness import counterexamples, runner
from entrenar_py.shared.errors import SystemFailure
from entrenar_py.shared.page import arguments as file_arguments
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace
from tests.command_line import check, contract_file, launch, repeat_a_sample, report, verdicts

pytestmark = pytest.mark.usefixtures("own_folder")


# --- exit codes -------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", [(), ("--json", "r.json"), ("--junit", "r.xml"), ("--quiet",)])
@pytest.mark.parametrize(
    ("code", "arguments"),
    [(0, ()), (1, ("--world-size", "3")), (4, ("--timeout", "1e-9")), (5, ("--severity", "P2"))],
)
def test_exit_codes(
    contract: str,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    arguments: tuple[str, ...],
    formats: tuple[str, ...],
) -> None:
    """Held, falsified, inconclusive and nothing selected have the same code in every format."""
    if code == 1:
        repeat_a_sample(monkeypatch)
    assert check("--contract", contract, "--examples", 0, *arguments, *formats) == code


def test_the_harness_failing_is_not_falsified(
    contract: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception inside the harness exits 3, with the traceback that a bug report needs."""

    def bug(*_: object) -> None:
        raise ZeroDivisionError("a bug in the harness")

    monkeypatch.setattr(runner.Runner, "run", bug)
    assert check("--contract", contract) == 3
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert printed.endswith("which is a bug: report it, with the lines above\n")


def test_a_crashed_check_and_a_crashed_run_are_inconclusive(
    contract: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither is evidence about the trainer; both are reported with the reason."""

    def bug(*_: object) -> NoReturn:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr("entrenar_py.systems.reference.run", bug)
        assert check("--contract", contract, "--examples", 0) == 4
        assert "did not run to an end: ZeroDivisionError: a bug" in capsys.readouterr().out
    broken = replace(checks.CHECKS["coverage"], judge=bug)
    monkeypatch.setattr(checks, "bind", lambda invariant: broken)
    assert check("--contract", contract, "--examples", 0) == 4
    assert "the check coverage crashed: ZeroDivisionError: a bug" in capsys.readouterr().out


def test_output_lost_after_the_run_is_the_harness_failing(
    contract: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It exits 3, not 2, since 2 means that nothing ran; the terminal still has the report."""
    monkeypatch.setattr(file_arguments, "require_writable", lambda path, option: None)
    assert check("--contract", contract, "--examples", 0, "--json", "gone/r.json") == 3
    printed = capsys.readouterr()
    assert "held: F-DP-001" in printed.out
    assert printed.err == (
        "entrenar-check: report file gone/r.json: can't be written (No such file or directory); "
        "give another path\n"
    )


# --- a real process ---------------------------------------------------------------------------


def run(*arguments: object, **options: Any) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of the command in its own process."""
    child = launch(arguments, **options)
    out, err = child.communicate(timeout=120)
    return child.returncode, out, err


@pytest.mark.slow
def test_the_seed_alone_decides(tmp_path: Path) -> None:
    """The same seed explores the same runs from another folder, with another hash seed or order."""
    seen = []
    for name, arguments in (("alone", ("--only", "F-DP-002")), ("all", ())):
        folder = tmp_path / name
        folder.mkdir()
        path = contract_file(folder)
        kept = ("--trace-dir", folder / "t", "--json", folder / "r.json", "--examples", 15)
        code, _, err = run("--contract", path, *kept, *arguments, cwd=folder)
        assert (code, err) == (0, "")
        seen.append({trace.name for trace in (folder / "t").iterdir()})
        assert sorted(item.name for item in folder.iterdir()) == ["r.json", "small-v1.yaml", "t"]
    assert len(seen[0]) > 12
    assert seen[0] <= seen[1]


def test_a_reader_that_leaves(contract: str) -> None:
    """`| head` changes neither the exit code nor the JSON report."""
    for extra, code in ((("--examples", "0"), 0), (("--severity", "P2"), 5), (("--list",), 0)):
        child = launch(["--contract", contract, *extra])
        assert child.stdout is not None
        child.stdout.close()
        assert child.stderr is not None
        printed = child.stderr.read()
        assert child.wait(timeout=120) == code
        assert printed == ""
        child.stderr.close()


TOLD_TO_END_AT_THE_END = """
import os, signal, sys
from entrenar_py.check import cli

code = cli.main()
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(code)
"""


def test_told_to_end_when_all_is_said(contract: str) -> None:
    """After the report is complete, a signal does not change the exit code."""
    command = [sys.executable, "-c", TOLD_TO_END_AT_THE_END, "--contract", contract, "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("id ")


INTERRUPTED_IN_RUN_10 = """
import itertools, os, signal, sys
from entrenar_py import systems
from entrenar_py.check import cli

right, count = systems.run, itertools.count(1)

def run(scenario):
    if next(count) == 10:
        os.kill(os.getpid(), signal.SIGINT)
    return right(scenario)

systems.run = run
sys.exit(cli.main(sys.argv[1:]))
"""


def test_interrupted(contract: str, tmp_path: Path) -> None:
    """Ctrl-C during a run: every format has the results so far; exit 4 without a traceback."""
    arguments = ["--contract", contract, "--json", "r.json", "--junit", "r.xml"]
    command = [sys.executable, "-c", INTERRUPTED_IN_RUN_10, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (4, "")
    assert "interrupted: these are the results so far" in done.stdout
    assert report(tmp_path / "r.json")["interrupted"] is True
    assert set(verdicts(tmp_path / "r.json").items()) == {
        ("F-DP-001", "inconclusive"),
        ("F-DP-002", "inconclusive"),
    }
    assert report(tmp_path / "r.json")["num_compared"] > 0
    assert (tmp_path / "r.xml").exists()


def test_interrupted_while_shrinking(
    contract: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A falsified clause stays falsified; its counterexample is saved as far as it was shrunk."""
    repeat_a_sample(monkeypatch)
    right, runs = systems.run, []

    def interrupted(scenario: Scenario) -> Trace:
        runs.append(scenario)
        if scenario.num_steps < 4:  # which only shrinking asks for
            raise KeyboardInterrupt
        return right(scenario)

    monkeypatch.setattr(systems, "run", interrupted)
    arguments = ("--only", "F-DP-002", "--examples", 0, "--json", "r.json")
    assert check("--contract", contract, *arguments) == 1
    assert report(tmp_path / "r.json")["interrupted"] is True
    assert verdicts(tmp_path / "r.json") == {"F-DP-002": "falsified"}
    (path,) = counterexamples.FOLDER.iterdir()
    assert counterexamples.load(path).scenario in runs


def test_interrupted_before_anything(
    contract: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints one line and exits 4."""

    def interrupted(argv: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("entrenar_py.check.project.command_line.read", interrupted)
    assert check("--contract", contract) == 4
    assert capsys.readouterr().err == "entrenar-check: interrupted before anything was known\n"


def test_a_failure_that_is_known_by_name(
    contract: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exceptions of this package end with their message, not with a traceback."""

    def fail(*_: object) -> None:
        raise SystemFailure("the machine is on fire")

    monkeypatch.setattr(runner.Runner, "run", fail)
    assert check("--contract", contract) == 3
    assert capsys.readouterr().err == "entrenar-check: the machine is on fire\n"


def test_wrong_command_lines_are_answered_at_once(tmp_path: Path) -> None:
    """An unknown name is refused without importing modules that take seconds."""
    lines = (
        ["--only", "F-NOPE-001"],
        ["--system", "nope"],
        ["--backend", "nope"],
        ["--", "no-such-program"],
        ["--", sys.executable, "{world_siz}"],
    )
    script = (
        "import sys; from entrenar_py.check import cli\n"
        "start = ['--contract', 'distributed-training-v1.yaml']\n"
        f"for line in {lines!r}: print(cli.main([*start, *line]), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "2 False\n" * len(lines), done.stderr


@pytest.mark.parametrize(
    ("line", "code", "heavy"),
    [
        ("--only F-NOPE-001", 2, ("torch", "entrenar_py.check.clauses", "numpy", "hypothesis")),
        ("--exclude F-NOPE-001", 2, ("torch", "entrenar_py.check.clauses", "numpy", "hypothesis")),
        ("--system nope", 2, ("torch", "entrenar_py.check.clauses", "numpy", "hypothesis")),
        ("--backend nope", 2, ("torch", "entrenar_py.check.clauses", "numpy", "hypothesis")),
        ("--contract nope.yaml", 2, ("torch", "entrenar_py.check.clauses", "numpy", "hypothesis")),
        ("--judge nope.jsonl", 2, ("torch", "hypothesis")),
        ("--replay nope.json", 2, ("torch", "hypothesis")),
        ("--json nope/report.json", 2, ("torch", "hypothesis")),
        ("--list", 0, ("torch", "hypothesis")),
    ],
)
def test_what_runs_nothing_imports_little(line: str, code: int, heavy: tuple[str, ...]) -> None:
    """A wrong command line is refused before heavy modules are imported."""
    script = (
        "import sys; from entrenar_py.check import cli; code = cli.main(sys.argv[2:])\n"
        "came = [name for name in sys.argv[1].split(',') if name in sys.modules]\n"
        "sys.exit(f'imported {came}, exit code {code}' if came else code)"
    )
    call = [sys.executable, "-c", script, ",".join(heavy)]
    call += ["--contract", "distributed-training-v1.yaml", *line.split()]
    ended = subprocess.run(call, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
