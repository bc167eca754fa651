"""`entrenar-check` in a folder with a configuration: what runs, what wins, what is reported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.check.harness import counterexamples, falsify
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared.errors import SystemFailure
from tests.command_line import check, contract_file, repeat_a_sample, report, verdicts

BASE = '[tool.entrenar-check]\ncontract = "small-v1.yaml"\n'


@pytest.fixture(autouse=True)
def _contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a contract with two clauses that hold to the current folder."""
    contract_file(tmp_path)
    monkeypatch.chdir(tmp_path)


def configure(text: str, *, base: str = f"{BASE}examples = 0\n") -> None:
    Path("pyproject.toml").write_text(base + text, encoding="utf-8")


def test_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """All of the configuration applies; the report names it and a command to repeat the call."""
    configure('system = "textbook"\nseed = 3\njson = "r-{contract}.json"\n')
    assert check() == 0
    record = report(Path("r-small-v1.json"))
    assert (record["system"], record["seed"]) == ("textbook", 3)
    assert record["command"] == "entrenar-check --config pyproject.toml"
    used = ["contract", "examples", "system", "seed", "json"]
    assert sorted(record["configuration"]["used"]) == sorted(used)
    assert "from pyproject.toml:1:7\n" in capsys.readouterr().out


def test_what_is_repeated_is_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reported command runs the same again, also from a folder below and with an option."""
    configure('seed = 3\nsystem = "textbook"\n')
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert check("--seed", 4, "--json", "first.json") == 0
    first = report(Path("first.json"))
    assert (first["system"], first["seed"]) == ("textbook", 4)
    assert first["configuration"]["overruled"] == ["seed"]
    assert first["command"] == (
        "entrenar-check --config ../pyproject.toml --seed 4 --json first.json"
    )
    words = first["command"].split()[1:]
    assert check(*words) == 0
    again = report(Path("first.json"))
    changing = ("elapsed_s", "results")
    assert [first[k] for k in first if k not in changing] == [
        again[k] for k in again if k not in changing
    ]
    assert check("--no-config", "--json", "third.json") == 2


def test_a_counterexample_is_kept_with_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A counterexample found in one folder of the project is tried first in any other."""
    configure("")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    with monkeypatch.context() as patch:
        repeat_a_sample(patch)
        assert check("--json", "r.json") == 1
    (saved,) = (tmp_path / counterexamples.FOLDER).iterdir()
    (broken,) = [one for one in report(Path("r.json"))["results"] if one["replay"]]
    assert Path(broken["replay"]).resolve() == saved
    assert broken["replay_command"] == (
        f"entrenar-check --contract ../small-v1.yaml --replay {broken['replay']}"
    )
    monkeypatch.chdir(tmp_path)
    assert check("--json", "again.json") == 0
    runs = {one["id"]: one["num_scenarios"] for one in report(Path("again.json"))["results"]}
    assert runs == {"F-DP-001": 1, "F-DP-002": 2}
    assert check("--replay", saved) == 0


def test_exclusions(capsys: pytest.CaptureFixture[str]) -> None:
    """Exclusions are reported with reason and end: gate undecided, exit code that of the others."""
    configure(
        'json = "r.json"\nexclude = [{clause = "F-DP-002", reason = "not yet", '
        "until = 9999-12-31}]\n"
    )
    assert check() == 0
    record = report(Path("r.json"))
    assert verdicts(Path("r.json")) == {"F-DP-001": "held"}
    (excluded,) = record["excluded"]
    assert (excluded["id"], excluded["until"]) == ("F-DP-002", "9999-12-31")
    assert (record["gate"]["passed"], record["gate"]["not_run"]) == (None, ["F-DP-002"])
    printed = capsys.readouterr().out
    assert "excluded: F-DP-002 (covered) until 9999-12-31: not yet (pyproject.toml:5:" in printed
    assert check("--only", "F-DP-002", "-v") == 0
    assert "note F-DP-002: tried because --only names it" in capsys.readouterr().out
    assert check("--list") == 0
    assert "excluded: F-DP-002 until 9999-12-31: not yet" in capsys.readouterr().out


def test_an_exclusion_that_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """A clause whose exclusion has ended is tried again."""
    configure('exclude = [{clause = "F-DP-002", reason = "then", until = 2020-01-31}]\n')
    assert check("-v") == 0
    printed = capsys.readouterr().out
    assert "note F-DP-002: its exclusion ended with 2020-01-31, so it is tried again" in printed
    assert "2 held" in printed


def test_not_applicable() -> None:
    """An exclusion that never ends is reported like a clause that doesn't apply to the system."""
    configure(
        'json = "r.json"\n'
        'exclude = [{clause = "F-DP-002", reason = "streams", kind = "not-applicable"}]\n'
    )
    assert check() == 0
    record = report(Path("r.json"))
    assert record["why_not_applying"]["F-DP-002"].startswith("streams (pyproject.toml:5:")
    assert (record["not_applying"], record["excluded"]) == (["F-DP-002"], [])


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("sytem = 1", (), "pyproject.toml:3:1: error: unknown key 'sytem'; did you mean 'system'?"),
        ('system = "dpp"', (), "pyproject.toml:3:1: error: system='dpp': allowed are reference,"),
        ('json = "no/r.json"', (), "pyproject.toml:3:1: error: --json no/r.json: the folder"),
        ('only = "F-DP-9"', (), "pyproject.toml:3:1: error: id 'F-DP-9' is not in small-v1.yaml"),
        ('command = "no-such"', (), "pyproject.toml:3:1: error: the command 'no-such' can't be"),
        (
            'suppress = "SCHEMA-009"',  # right; what was typed is not
            ("--validate", "--suppress", "NO"),
            "entrenar-check: --suppress NO: no such rule",
        ),
        (
            'exclude = [{clause = "F-DP-020", reason = "x", kind = "not-applicable"}]',
            (),
            "pyproject.toml:3:12: error: clause 'F-DP-020' is in none of the contracts; did you",
        ),
        ("accept = 1", (), "pyproject.toml:3:1: error: accept = 1: give a table of reasons by cl"),
        ('accept = {F-DP-001 = ""}', (), "accept.F-DP-001 = '': give the reason, as text"),
        ('accept = {F-DP-020 = "x"}', (), "error: clause 'F-DP-020' is in none of the contracts"),
        ('command = "true"', ("--examples", 3), "--examples has no effect with the command of py"),
        ("", ("--config", "no.toml"), "--config no.toml: no such file; give a TOML file"),
        ("", ("--config", "x", "--no-config"), "not allowed with argument --config"),
        ("", ("--config", "small-v1.yaml"), "small-v1.yaml:1:"),
        ("", ("--mutants", "--config", "pyproject.toml"), "--config has no effect with --mutants"),
    ],
)
def test_refused(
    text: str, arguments: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error in the file is reported with its place, and nothing runs."""
    configure(text, base=BASE)
    assert check(*arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_a_command_runs_in_the_folder_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs work in copies of the configuration's folder; --system tries a trainer of ours."""
    script = "import os; print(os.getcwd(), {steps}, {seed})"
    command = [sys.executable, "-c", script, "{world_size}"]
    configure(f"command = {command}\nsteps = 5\nseed = 1\ntrace-dir = 'runs'\n", base=BASE)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert check("--only", "F-DP-001", "--seed", 7) == 4
    run = tmp_path / "runs" / "2-workers"
    printed = (run / "output.txt").read_text(encoding="utf-8")
    assert printed == f"{run}/root{tmp_path} 5 7\n"
    assert f"command {sys.executable} -c" not in capsys.readouterr().out
    assert check("--only", "F-DP-001", "--in-place", "-v") == 4
    assert f"command {sys.executable} -c" in capsys.readouterr().out
    assert (run / "output.txt").read_text(encoding="utf-8") == f"{tmp_path} 5 1\n"
    assert check("--system", "textbook", "--examples", 0, "--json", "r.json") == 0
    assert report(Path("r.json"))["configuration"]["overruled"] == ["command"]


def test_knobs_as_the_script_spells_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Each value of a knob is replaced by the script's own words; one spelled "" is left out."""
    words = [sys.executable, "-c", "import sys; print(sys.argv[1:])"]
    words += ["--by={strategy}", "{permute}", "{loss_scale}", "{world_size}"]
    base = f"{BASE}command = {words}\ntrace-dir = 'runs'\nonly = 'F-DP-001'\n"
    base += "[tool.entrenar-check.knobs]"
    configure('\nstrategy = {on = "ddp", off = "none"}\npermute = {0 = "", 1 = "-p"}', base=base)
    assert check() == 4
    printed = Path("runs/2-workers/output.txt").read_text(encoding="utf-8")
    assert printed == "['--by=ddp', '1', '2']\n"
    assert "configured: command, knobs, contract" in capsys.readouterr().out
    for text, told in (
        ("clip = {1e9 = 'no'}", "pyproject.toml:6:22: error: knobs='clip': the command has no {cl"),
        ("strateg = {on = '1'}", "knobs='strateg': no knob; did you mean 'strategy'?"),
        ("permute = {2 = '1'}", "knobs permute='2': no such value; use one of 0, 1"),
        ("permute = 1", "knobs.permute = 1: give a table, such as"),
        ("permute.0 = true", "knobs.permute.0 = True: give text or a number"),
    ):
        configure(f"\n{text}", base=base)
        assert check() == 2
        assert told in capsys.readouterr().err


def test_github_in_a_workflow_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key `github` has no effect outside a workflow, so that one configuration serves both."""
    configure("github = true\n")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    assert check() == 0
    assert "github" not in capsys.readouterr().out
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    assert check() == 0
    assert "✅ held" in Path("summary.md").read_text(encoding="utf-8")


def test_several_contracts(capsys: pytest.CaptureFixture[str]) -> None:
    """Each contract has a report with its own name; ids are looked up in all contracts."""
    other = Path("small-v1.yaml").read_text().replace("F-DP-002, name", "F-DP-005, name")
    Path("other-v1.yaml").write_text(other.replace("checks: [F-DP-001, F-DP-002]", "checks: []"))
    both = ("--contract", "small-v1.yaml", "--contract", "other-v1.yaml", "--examples", 0)
    assert check(*both, "--json", "r.json") == 2
    told = "--json r.json: 2 contracts need a report each; give a path with {contract}"
    assert told in capsys.readouterr().err
    assert check(*both, "--json", "{contract}.json") == 0
    assert set(verdicts(Path("small-v1.json"))) == {"F-DP-001", "F-DP-002"}
    assert set(verdicts(Path("other-v1.json"))) == {"F-DP-001", "F-DP-005"}
    Path("small-v1.json").unlink()
    assert check(*both, "--only", "F-DP-005", "--json", "{contract}.json") == 0
    assert not Path("small-v1.json").exists()
    assert check(*both, "--only", "F-DP-001", "--trace-dir", "runs") == 0
    assert all([*Path("runs", name).iterdir()] for name in ("small-v1", "other-v1"))
    assert check(*both, "--only", "F-DP-007") == 2
    assert "id 'F-DP-007' is not in the contracts: it has F-DP-001" in capsys.readouterr().err


def test_two_contracts_of_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two contracts of one name are refused, as one report would overwrite the other."""
    (tmp_path / "a").mkdir()
    contract_file(tmp_path / "a")
    both = ("--contract", "small-v1.yaml", "--contract", "a/small-v1.yaml")
    assert check(*both, "--html", "{contract}.html") == 2
    assert "two contracts have the same name (small-v1, small-v1)" in capsys.readouterr().err


def test_place_of_an_output(capsys: pytest.CaptureFixture[str]) -> None:
    """An output path that can't be written is refused with its place in the configuration."""
    other = Path("small-v1.yaml").read_text()
    Path("other-v1.yaml").write_text(other)
    table = "[tool.entrenar-check]\n"
    configure('contract = ["small-v1.yaml", "other-v1.yaml"]\njson = "r.json"\n', base=table)
    assert check() == 2
    assert "pyproject.toml:3:1: error: --json r.json: 2 contracts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (KeyboardInterrupt(), 4, "exit 4: interrupted: these are the results so far"),
        (SystemFailure("fire"), 3, "gate G-1 over 2 clauses: passed"),
    ],
)
def test_a_contract_that_was_checked_is_reported_whatever_comes_after_it(
    error: BaseException,
    code: int,
    last: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The contracts share one report, whose last line is the exit code if the run has one."""
    for name in ("other", "third"):
        Path(f"{name}-v1.yaml").write_text(Path("small-v1.yaml").read_text())
    right, calls = falsify.falsify, []

    def second(*tasks: Any, **options: Any) -> Iterator[Entry]:
        calls.append(tasks)
        if len(calls) > 1:
            raise error
        yield from right(*tasks, **options)

    monkeypatch.setattr(falsify, "falsify", second)
    contracts = ("small-v1.yaml", "other-v1.yaml", "third-v1.yaml")
    told = [word for name in contracts for word in ("--contract", name)]
    assert check(*told, "--examples", 0) == code
    printed = capsys.readouterr()
    assert "held: F-DP-001 identical, F-DP-002 covered" in printed.out
    assert printed.out.splitlines()[-1] == last
    assert ("1 other contract was not begun" in printed.err) == (code == 4)
