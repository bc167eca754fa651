"""The pytest plugin, in small runs of pytest inside this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py import systems
from entrenar_py.check import cli
from entrenar_py.check import pytest_clauses as judging
from entrenar_py.check.cli import session
from entrenar_py.check.command import runs
from entrenar_py.check.reports.report import Report
from entrenar_py.shared.scenario import Scenario
from tests.check.command import forked, zygote
from tests.check.reports.conftest import full_report
from tests.command_line import contract_file, repeat_a_sample

pytest_plugins = ["pytester"]

UNCHECKED = "  - {id: F-NEW-9, name: new, severity: P2, invariant: nobody checks this}\n"
MARK = '@pytest.mark.contract("{}", contract="small-v1.yaml", examples=0{})'


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import all late imports before the first small run.

    pytest forgets modules that a small run imported, but numpy and torch can't be imported twice.
    """
    for system in ("reference", "textbook"):
        systems.run(Scenario(system=system, workload="linear", world_size=2, seed=0))


@pytest.fixture
def run(pytester: pytest.Pytester) -> type[Run]:
    contract_file(pytester.path, extra=UNCHECKED)
    Run.pytester = pytester
    return Run


class Run:
    """One small run of pytest with the plugin."""

    pytester: pytest.Pytester

    def __init__(self, test: str = "", *arguments: str) -> None:
        if test:
            self.pytester.makepyfile(f"import pytest\n{test}")
        options = ("-p", "entrenar_py.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:xdist")
        self.result = self.pytester.runpytest_inprocess(*options, "--strict-markers", *arguments)
        self.text = self.result.stdout.str()


def marked(clause: str, more: str = "", *, test: str = "def test_it(): assert True") -> str:
    return f"{MARK.format(clause, more)}\n{test}"


def test_held(run: type[Run]) -> None:
    """If the clause holds, the test's body runs, with the finding if it has the fixture."""
    body = "def test_it(finding): assert (finding.verdict, finding.compared > 9) == ('held', True)"
    run(marked("F-DP-001", ", system='textbook'", test=body)).result.assert_outcomes(passed=1)


def test_falsified(run: type[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """The test fails with the finding and a command to repeat it, and its body doesn't run."""
    repeat_a_sample(monkeypatch)
    found = run(marked("F-DP-002", test="def test_it(): print('the body ran')"))
    found.result.assert_outcomes(failed=1)
    assert "F-DP-002 FALSIFIED: samples drawn again in epoch 0 by rank 0" in found.text
    assert "replay: entrenar-check --contract small-v1.yaml --replay" in found.text
    assert "entrenar-check --contract small-v1.yaml --only F-DP-002 --examples 0" in found.text
    assert "the body ran" not in found.text


def test_inconclusive_never_passes(run: type[Run]) -> None:
    """An inconclusive test fails, or is skipped with its reason if that is allowed."""
    found = run(marked("F-NEW-9"))
    found.result.assert_outcomes(failed=1)
    assert "F-NEW-9 INCONCLUSIVE: " in found.text
    found = run("", "-rs", "-o", "contract_allow_inconclusive=true")
    found.result.assert_outcomes(skipped=1)
    assert "no check covers it" in found.text


def test_what_does_not_apply_is_skipped_with_its_reason(run: type[Run]) -> None:
    """A clause that doesn't apply is skipped; scenarios that were left out are reported."""
    killed = "{system: mesh_simulated, faults: [{kind: kill, rank: 1, step: 1, at: Assign}]}"
    contract_file(run.pytester.path, scenario=killed)
    found = run(marked("F-DP-001", ", system='textbook'"), "-rs")
    found.result.assert_outcomes(skipped=1)
    assert "F-DP-001 does not apply to textbook: every scenario is with kill, which" in found.text
    contract_file(run.pytester.path, scenario=f"{{}}, {killed}")
    found = run("", "-rP")
    found.result.assert_outcomes(passed=1)
    assert "note F-DP-001: left out: 1 scenario with kill, which textbook can't do" in found.text


def test_a_class_is_judged_once(run: type[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests of a marked class share one search."""
    calls: list[judging.Request] = []
    judge = judging.judge

    def counted(wish: judging.Request) -> judging.Judged:
        calls.append(wish)
        return judge(wish)

    monkeypatch.setattr(judging, "judge", counted)
    body = "class TestIt:\n    def test_a(self): pass\n    def test_b(self, finding): pass"
    run(marked("F-DP-001", test=body)).result.assert_outcomes(passed=2)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ('("F-DP-9", contract="small-v1.yaml")', "id 'F-DP-9' is not in small-v1.yaml"),
        ('("F-DP-001", contract="absent.yaml")', "contract='absent.yaml': no such file"),
        (
            '("F-DP-001", contract="distributed-trainning-v1.yaml")',
            "did you mean 'distributed-training-v1.yaml'?",
        ),
        ('("F-DP-001")', "no contract is named; give contract=FILE, or pytest --contract"),
        ('("F-DP-001", contract="small-v1.yaml", system="x")', "system='x': allowed are"),
        ('("F-DP-001", contract="small-v1.yaml", sytem="ring")', "give the id of one clause, and"),
        ('("F-DP-001", contract="small-v1.yaml", world_size="2")', "are integers"),
        ('("F-DP-001", contract="small-v1.yaml", examples=-1)', "examples 0 or more"),
    ],
)
def test_a_wrong_mark_fails(run: type[Run], mark: str, message: str) -> None:
    """An invalid mark fails the test with what is wrong."""
    found = run(f"@pytest.mark.contract{mark}\ndef test_it(): pass")
    found.result.assert_outcomes(failed=1)
    assert message in found.text
    assert "During handling of the above exception" not in found.text


def test_a_contract_is_a_test_per_clause(run: type[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each clause is a test in addition to those collected; -k and -m select among all."""
    repeat_a_sample(monkeypatch)
    given = ("--contract", "small-v1.yaml", "--contract-examples", "0")
    found = run("def test_it(): pass", "-v", *given)
    found.result.assert_outcomes(passed=2, failed=2)
    for line in (
        "small-v1.yaml::F-DP-001 PASSED*",
        "small-v1.yaml::F-DP-002 FAILED*",
        "small-v1.yaml::F-NEW-9 FAILED*",
    ):
        found.result.stdout.fnmatch_lines([line])
    chosen = run("", "-m", "contract", "-k", "001", *given).result
    chosen.assert_outcomes(passed=1, deselected=3)
    chosen.stdout.fnmatch_lines(["collected 4 items / 3 deselected / 1 selected"])


def test_a_mark_may_leave_the_contract_to_the_option(run: type[Run]) -> None:
    """A mark without a contract uses `--contract`."""
    test = '@pytest.mark.contract("F-DP-001", examples=0)\ndef test_it(): pass'
    given = ("--contract", "small-v1.yaml", "--contract-examples", "0", "-k", "test_it")
    run(test, *given).result.assert_outcomes(passed=1, deselected=3)


def test_a_mark_may_leave_all_to_the_configuration(run: type[Run]) -> None:
    """A mark may take contract, system and seed from the configuration, and its exclusions."""
    run.pytester.makepyprojecttoml(
        """
        [tool.entrenar-check]
        contract = ["reduction-v1", "small-v1.yaml"]
        system = "textbook"
        seed = 3
        examples = 0
        exclude = [
          {clause = "F-DP-002", reason = "not yet", until = 9999-12-31},
          {clause = "F-RED-001", reason = "no star", kind = "not-applicable"},
        ]
        """
    )
    body = "def test_it(finding): assert finding.verdict == 'held'"
    test = '@pytest.mark.contract("{}")\n'
    run(test.format("F-DP-001") + body).result.assert_outcomes(passed=1)
    found = run(test.format("F-DP-002") + body, "-rs")
    found.result.assert_outcomes(skipped=1)
    assert "F-DP-002 is excluded until 9999-12-31: not yet (pyproject.toml:7:" in found.text
    found = run(test.format("F-RED-001") + body, "-rs")
    assert "F-RED-001 does not apply: no star (pyproject.toml:8:" in found.text
    assert (
        "'F-DP-009' is not in the contracts of pyproj" in run(test.format("F-DP-009") + body).text
    )
    run.pytester.path.joinpath("b.yaml").write_text(
        "entrenar_bindings: 1\ncontract: small-v1\nbindings:\n"
        "- {clause: F-DP-002, not_tried: nobody looks}\n"
    )
    run.pytester.makepyprojecttoml(
        '[tool.entrenar-check]\ncontract = "small-v1.yaml"\nbind = "b.yaml"\n'
        'exclude = [{clause = "F-DP-002", reason = "late", until = 2020-01-01}]'
    )
    found = run(test.format("F-DP-002") + body)
    assert "INCONCLUSIVE: nothing was compared: nobody looks" in found.text
    assert "--only F-DP-002 --bind b.yaml" in found.text
    assert "its exclusion ended with 2020-01-01, so it is tried again: late" in found.text
    run.pytester.makepyprojecttoml(
        '[tool.entrenar-check]\ncontract = "small-v1.yaml"\ncommand = "true"'
    )
    found = run(test.format("F-DP-001") + body)
    assert "names a command, which entrenar-check runs and pytest does not" in found.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--contract", "absent.yaml"), "contract='absent.yaml': no such file"),
        (("--contract", "small-v1.yaml", "--contract-system", "x"), "system='x': allowed are"),
        (("--contract-system", "ring"), "--contract-system has no effect without --contract"),
        (("--contract-examples", "3"), "--contract-examples has no effect without --contract"),
    ],
)
def test_wrong_options_are_refused(
    run: type[Run], arguments: tuple[str, ...], message: str
) -> None:
    """Invalid options are refused before any test runs."""
    found = run("def test_it(): pass", *arguments)
    assert found.result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in found.result.stderr.str()


def test_runs_that_do_not_use_it_pay_nothing(pytester: pytest.Pytester) -> None:
    """Another plugin's mark of this name is ignored, and nothing of the harness is imported."""
    pytester.makepyfile(
        """
        import sys, pytest
        @pytest.mark.contract
        def test_it():
            heavy = {"torch", "numpy", "hypothesis", "rich", "entrenar_py.check.harness.falsify"}
            assert not heavy & set(sys.modules)
        """
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "entrenar_py.pytest_plugin"]
    done = subprocess.run(
        [*command, "-p", "no:hypothesispytest", "-p", "no:benchmark", "-p", "no:cov"],
        cwd=Path(pytester.path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


SCRIPT = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).mean().backward()
    optimizer.step()
"""
TRAINS = f'@pytest.mark.trains("{sys.executable} train.py"{{}})\ndef test_it(): pass'


def test_a_command_that_trains(run: type[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """The script is run as by `entrenar-check`, without a line, once in a session.

    Its processes are forked; `test_a_command_that_can_not_be_checked` starts them as usual.
    """
    record = runs.record
    monkeypatch.setattr(
        runs, "record", lambda plan, show: record(replace(plan, launch=_launch), show)
    )
    Path("train.py").write_text(SCRIPT)
    part = TRAINS.format(", only='F-TI-008', steps=2")
    with_finding = part.replace("test_it(): pass", "test_too(finding): assert finding.compared")
    run(f"{part}\n{with_finding}").result.assert_outcomes(passed=2)


def _launch(command: Sequence[str], **told: Any) -> Any:
    """Run the script of `command` in a fork, in place of an interpreter that imports torch."""
    launch: Callable[..., Any] = zygote.launch
    script = str(Path(command[1]).resolve())
    return launch([sys.executable, forked.__file__, "1", script, *command[2:]], **told)


def test_a_command_that_breaks_clauses(run: type[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is falsified is shown, with the call that repeats it; what is accepted passes."""
    report = full_report()
    monkeypatch.setattr(session, "reports_of_command", lambda options, typed: [report])
    monkeypatch.setattr(cli, "begin", lambda options, opened: None)
    found = run(TRAINS.format(""))
    found.result.assert_outcomes(failed=1)
    assert "F-DP-005 FALSIFIED: rank 1 holds other weights than rank 0" in found.text
    assert "repeat with: entrenar-check" in found.text
    held = tuple(
        replace(entry, accepted="known") for entry in report.entries if entry.finding.compared
    )
    report = replace(report, entries=held)
    run(TRAINS.format("")).result.assert_outcomes(passed=1)
    report = replace(report, entries=())
    found = run(TRAINS.format(", only=('F-DP-001', 'F-TI-001')"))
    assert f"--only F-DP-001,F-TI-001 -- {sys.executable} train.py: no clause was" in found.text


def test_a_command_that_can_not_be_checked(run: type[Run]) -> None:
    """A wrong keyword, and a script that fails, fail the test; the latter may be skipped."""
    found = run(TRAINS.format(", steps_max=3"))
    assert "no keywords but contract, deadline, epochs, only, seed, steps" in found.text
    Path("train.py").write_text("raise SystemExit('no data')")
    found = run(TRAINS.format(", only='F-TI-008'"))
    found.result.assert_outcomes(failed=1)
    assert "nothing was recorded: exit code 1: no data" in found.text
    found = run("", "-o", "contract_allow_inconclusive=true")
    found.result.assert_outcomes(skipped=1)


def test_an_interrupt_ends_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that was interrupted isn't a test that passed."""
    report = replace(full_report(), interrupted=True)
    monkeypatch.setattr(session, "reports_of_command", lambda options, typed: [report])
    monkeypatch.setattr(cli, "begin", lambda options, opened: None)
    with pytest.raises(KeyboardInterrupt):
        judging.train(("--", "true"), tmp_path)


def test_the_configuration_of_the_root_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder above, pytest takes the root from its arguments, and so is the configuration."""
    (tmp_path / "pyproject.toml").write_text(
        '[tool.entrenar-check]\ncontract = "training-integrity-v1.yaml"\nseed = 3\n'
    )
    seen = []

    def reports(options: Any, typed: object) -> list[Report]:
        seen.append(options.used)
        return [full_report()]

    monkeypatch.setattr(session, "reports_of_command", reports)
    monkeypatch.setattr(cli, "begin", lambda options, opened: None)
    judging.train(("--", "true"), tmp_path)
    assert seen == [("contract", "seed")]


def test_a_path_is_one_value() -> None:
    """A contract may be given as a path."""
    mark = pytest.mark.trains("true", contract=Path("a.yaml"), only=["F-DP-001", "F-DP-002"]).mark
    called = ("--contract", "a.yaml", "--only", "F-DP-001,F-DP-002", "--", "true")
    assert judging.call_of(mark) == called
