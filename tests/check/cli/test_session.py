"""The effect of each flag: every test here fails if its flag is accepted and ignored."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

import pytest

from entrenar_py import compute as backends
from entrenar_py import systems
from entrenar_py.check.harness import counterexamples
from entrenar_py.compute.wgpu import resident
from entrenar_py.shared import mutants, trace
from entrenar_py.shared.errors import BackendUnavailable, UsageError
from entrenar_py.shared.scenario import Scenario
from tests.command_line import check, contract_file, repeat_a_sample, report, verdicts

COVERED = "  - {id: F-NEW-9, name: new, severity: P2, invariant: nobody checks this}\n"


pytestmark = pytest.mark.usefixtures("own_folder")


def traced(folder: Path) -> list[Scenario]:
    return [trace.load(path).scenario for path in sorted(folder.glob("*.jsonl"))]


def scenarios_run(contract: str, folder: Path, *arguments: object) -> list[Scenario]:
    """Return the scenarios that a run with `arguments` executed."""
    check("--contract", contract, "--trace-dir", folder, "--examples", 0, *arguments)
    return traced(folder)


# --- which invariants -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ((), {"F-DP-001", "F-DP-002"}),
        (("--only", "F-DP-002"), {"F-DP-002"}),
        (("--exclude", "F-DP-002"), {"F-DP-001"}),
        (("--severity", "P1"), {"F-DP-002"}),
    ],
)
def test_selection(
    contract: str, tmp_path: Path, arguments: tuple[str, ...], chosen: set[str]
) -> None:
    """--only, --exclude and --severity leave the other clauses out of the report."""
    json = tmp_path / "r.json"
    assert check("--contract", contract, "--examples", 0, "--json", json, *arguments) == 0
    assert set(verdicts(json)) == chosen


def test_nothing_selected(contract: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A selection without clauses exits 5, not 0."""
    assert check("--contract", contract, "--severity", "P2") == 5
    assert "nothing selected" in capsys.readouterr().out
    assert check("--contract", contract, "--severity", "P2", "--list") == 5


KILLED = (
    "{system: parameter_server_simulated, world_size: 2, num_shards: 3, num_samples: 9, "
    "batch_size: 4, num_steps: 4, faults: [{kind: kill, rank: 1, step: 1, at: Assign}]}"
)


def test_what_a_system_can_not_do_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs that the system can't make are named, in --judge too.

    They are named with their clause if other runs of it remain, else as a clause that does not
    apply. A gate that demands such a clause is undecided.
    """
    calm = KILLED.replace("faults: [{kind: kill, rank: 1, step: 1, at: Assign}]", "seed: 1")
    path = Path(contract_file(tmp_path, scenario=KILLED))
    path.write_text(path.read_text().replace(KILLED, f"{calm}, {KILLED}", 1))
    json, traces = tmp_path / "r.json", tmp_path / "traces"
    arguments = ("--contract", path, "--system", "reference", "--json", json, "-v")
    why = "every scenario is with kill, which reference can't do"
    for more in (("--examples", 0, "--trace-dir", traces), ("--judge", traces)):
        assert check(*arguments, *more) == 0
        printed = capsys.readouterr().out
        record = report(json)
        assert verdicts(json) == {"F-DP-001": "held"}
        assert (record["not_applying"], record["gate"]["passed"]) == (["F-DP-002"], None)
        assert record["why_not_applying"] == {"F-DP-002": why}
        assert f"not applied: F-DP-002 (covered): {why}" in printed
        left_out = "note F-DP-001: left out: 1 scenario with kill, which reference can't do"
        assert (left_out in printed) == ("--examples" in more)
    assert [one.seed for one in traced(traces)] == [1]
    assert check(*arguments, "--only", "F-DP-002") == 5
    assert (report(json)["system"], report(json)["results"]) == ("reference", [])


def test_list(contract: str, capsys: pytest.CaptureFixture[str]) -> None:
    """There is one line per clause, with its check and place. Nothing runs; selections apply."""
    assert check("--contract", contract, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["id", "name", "severity", "check", "place"]
    assert lines[1].split() == ["F-DP-001", "identical", "P0", "replica_identity", f"{contract}:3"]
    assert check("--contract", contract, "--list", "--only", "F-DP-002") == 0
    assert "F-DP-001" not in capsys.readouterr().out


def test_a_contract_through_a_pipe(
    contract: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The contract is read once, so that `<(command)` works."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(Path(contract).read_bytes(),))
    writer.start()
    assert check("--contract", pipe, "--list") == 0
    writer.join()
    assert "F-DP-001" in capsys.readouterr().out


def test_list_prints_names_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text that looks like markup is printed unchanged, and so is a clause without a check."""
    extra = '  - {id: F-NEW-9, name: "[/red] α", severity: P2, invariant: nobody checks this}\n'
    assert check("--contract", contract_file(tmp_path, extra=extra), "--list") == 0
    printed = capsys.readouterr()
    assert "F-NEW-9   [/red] α   P2        none " in printed.out
    assert "clause F-NEW-9 has no check here" in printed.err


def test_validate(contract: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--validate says that the contract is valid and runs nothing."""
    assert check("--contract", contract, "--validate") == 0
    assert capsys.readouterr().out == "small-v1.yaml: valid, 2 invariants, 0 warnings\n"


def test_validate_counts_the_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each warning is printed with its place; the contract is valid all the same."""
    path = contract_file(tmp_path, extra=COVERED)
    assert check("--contract", path, "--validate") == 0
    printed = capsys.readouterr()
    assert printed.out == "small-v1.yaml: valid, 3 invariants, 1 warning\n"
    assert printed.err.startswith(f"{path}:")
    assert ": warning: ENTRENAR-001: clause F-NEW-9 has no check here" in printed.err


FOREIGN = """metadata: {version: 1}
proof_obligations: [%s]
falsification_tests: [{id: T-1, rule: Sums agree, prediction: p, if_fails: f}]
qa_gate: {id: G, name: a bar, checks: [sums_agree], required_tests: [sums]}
"""


def test_a_contract_of_others_is_told_of_in_few_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clauses without a check share one paragraph in the report; --validate lists them all."""
    path = tmp_path / "foreign-v1.yaml"
    path.write_text(FOREIGN % ", ".join(f"{{property: Law {n} holds}}" for n in range(40)))
    assert check("--contract", str(path)) == 4
    printed = capsys.readouterr()
    assert "40 clauses INCONCLUSIVE: no check covers it: nothing was compared" in printed.out
    assert "UNDECIDED: no clause decides: sums_agree, required test sums" in printed.out
    assert len(printed.out.splitlines()) < 40 + 12
    assert len(printed.err.splitlines()) == 2
    assert "on how the contract was read; --validate prints them" in printed.err
    assert check("--contract", str(path), "--allow-inconclusive") == 0
    capsys.readouterr()
    assert check("--contract", str(path), "--validate") == 2  # what loads need not be valid
    printed = capsys.readouterr()
    assert (
        printed.out == "foreign-v1.yaml: not valid, 4 errors, 40 invariants, 0 warnings, 3 notes\n"
    )
    assert "info: ENTRENAR-002: qa_gate is undecided: no clause decides " in printed.err


PUBLISHED = """metadata: {version: 1.0.0, references: [a paper], depends_on: [elsewhere-v1]}
data_parallel:
  sharding:
  - {id: F-DP-002, name: Shards cover all, critical: 'true', postcondition: 'union = samples'}
falsification_tests:
- {id: T-1, rule: F-DP-002 (Shards), prediction: no sample twice, if_fails: one is lost}
steps:
- {id: STEP-1, name: one machine, status: complete, files: [a.rs]}
qa_gate: {id: G, name: bar, checks: [shards_cover], pass_criteria: 'Phase 1: F-DP-002..002 pass'}
"""


def test_a_published_contract_passes_its_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clause is bound by its id and found by the criteria; steps of work are no clauses."""
    path = tmp_path / "published-v1.yaml"
    path.write_text(PUBLISHED)
    assert check("--contract", str(path), "--examples", "0", "--strict") == 0
    printed = capsys.readouterr().out
    assert "gate G over 1 clause: passed" in printed
    assert "STEP-1" not in printed


def test_names_of_mutants_are_judged_where_they_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown mutant is an error; without the falsification folder names aren't checked."""
    extra = "  - {id: F-DP-003, invariant: finite, mutants: [nan-to-nun]}\n"
    path = contract_file(tmp_path, extra=extra)
    assert check("--contract", path, "--validate") == 2
    assert (
        "'nan-to-nun' is not a planted bug; did you mean 'nan-to-num'?" in capsys.readouterr().err
    )

    def missing() -> NoReturn:
        raise UsageError("the falsification folder was not installed")

    monkeypatch.setattr(mutants, "names", missing)
    assert check("--contract", path, "--validate") == 0


def test_validate_runs_nothing_but_knows_what_could(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scenario that no run could make is refused with the clause's place."""
    path = contract_file(tmp_path, scenario="{options: {bogus: 1}}")
    assert check("--contract", path, "--validate") == 2
    printed = capsys.readouterr()
    why = "clause F-DP-001: option='bogus' on system reference"
    assert f"{path}:3:5: error: PV-VAL-001: {why}" in printed.err
    assert printed.out == "small-v1.yaml: not valid, 2 errors, 2 invariants, 0 warnings\n"


def test_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning is an error under --strict, and only then."""
    path = contract_file(tmp_path, extra=COVERED)
    assert check("--contract", path, "--validate") == 0
    assert check("--contract", path, "--validate", "--strict") == 2
    assert "F-NEW-9" in capsys.readouterr().err


# --- how they are tried -----------------------------------------------------------------------


def test_system(contract: str, tmp_path: Path) -> None:
    """Every training run uses the given trainer, and the report names it."""
    json = tmp_path / "r.json"
    runs = scenarios_run(contract, tmp_path / "t", "--system", "textbook", "--json", json)
    assert {one.system for one in runs} == {"textbook"}
    assert report(json)["system"] == "textbook"


def test_world_size(contract: str, tmp_path: Path) -> None:
    """The given numbers of workers replace the contract's; the number of shards grows."""
    runs = scenarios_run(contract, tmp_path / "t", "--world-size", "3,5", "--only", "F-DP-001")
    assert {(one.world_size, one.num_shards) for one in runs} == {(3, 3), (5, 5)}


def test_world_size_stays_when_exploring(contract: str, tmp_path: Path) -> None:
    """A given number of workers above exploration's own maximum is used, too."""
    runs = scenarios_run(
        contract, tmp_path / "t", "--world-size", 9, "--examples", 8, "--only", "F-DP-001"
    )
    assert len(runs) > 5
    assert {one.world_size for one in runs} == {9}


def test_seed_and_examples(contract: str, tmp_path: Path) -> None:
    """The same seed explores the same scenarios; --examples sets their number."""
    arguments = ("--only", "F-DP-001", "--examples", 6)
    first, again, other = (
        set(scenarios_run(contract, tmp_path / name, *arguments, "--seed", seed))
        for name, seed in (("a", 7), ("b", 7), ("c", 8))
    )
    assert first == again
    assert len(first) > 3
    assert not first & other
    assert len(scenarios_run(contract, tmp_path / "none", "--only", "F-DP-001")) == 1


def test_timeout(contract: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exploration ends in time, with a note. A clause with scenarios left out is inconclusive."""
    started = time.monotonic()
    json = tmp_path / "r.json"
    limits = ("--timeout", "1.5", "--examples", 1_000_000, "-v")
    assert check("--contract", contract, *limits, "--json", json) == 4
    assert time.monotonic() - started < 20
    assert verdicts(json) == {"F-DP-001": "held", "F-DP-002": "inconclusive"}
    printed = capsys.readouterr().out
    assert "note F-DP-001: --timeout ended exploring after" in printed
    assert "--timeout 1.5 s ran out after 0 of 1 scenarios" in printed


def test_stop_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With -x nothing is tried after the first falsified clause."""
    extra = "  - {id: F-DP-002b, name: again, check: coverage, invariant: covered}\n"
    path = contract_file(tmp_path, extra=extra)
    repeat_a_sample(monkeypatch)
    json = tmp_path / "r.json"
    usual = ("--contract", path, "--examples", 0, "--json", json)
    assert check(*usual, "-x") == 1
    assert verdicts(json) == {"F-DP-001": "held", "F-DP-002": "falsified"}
    assert check(*usual) == 1
    assert len(verdicts(json)) == 3


def test_allow_inconclusive(tmp_path: Path) -> None:
    """Exit 4 becomes 0, and the JUnit report has no error."""
    path = contract_file(tmp_path, extra=COVERED)
    usual = ("--contract", path, "--examples", 0, "--junit", tmp_path / "j.xml")
    assert check(*usual) == 4
    before = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert check(*usual, "--allow-inconclusive") == 0
    after = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert ElementTree.tostring(before) != ElementTree.tostring(after)


def test_absent_backend(
    contract: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A missing backend makes the clause inconclusive, with the reason; none replaces it.

    If no scenario could run without it, none is tried.
    """

    def absent() -> backends.Backend:
        raise BackendUnavailable("no such device here")

    for name in ("cuda", "wgpu"):
        monkeypatch.setitem(backends.BACKENDS, name, absent)
    json = tmp_path / "r.json"
    assert check("--contract", contract, "--backend", "wgpu", "--json", json) == 4
    assert set(verdicts(json).values()) == {"inconclusive"}
    assert report(json)["environment"]["cuda"] == "none"
    assert report(json)["num_compared"] == 0
    assert "no such device here" in capsys.readouterr().out
    assert check("--contract", contract, "--backend", "cuda") == 2
    assert "no such device here; leave --backend out" in capsys.readouterr().err


def test_auto_backend(contract: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--backend auto uses the first available backend; the traces name it and the reason."""

    def absent() -> backends.Backend:
        raise BackendUnavailable("no such device here")

    for name in ("cuda", "wgpu"):
        monkeypatch.setitem(backends.BACKENDS, name, absent)
    usual = ("--contract", contract, "--examples", 0, "--trace-dir", tmp_path)
    assert check(*usual, "--backend", "auto") == 0
    runs = [trace.load(path) for path in tmp_path.glob("*.jsonl")]
    assert runs
    for run in runs:
        tries = [(event.backend, event.served) for event in run.of(trace.Attempt)]
        assert run.scenario.backends == ("auto",)
        assert tries == [("cuda", False), ("wgpu", False), ("cpu", True)]
        assert "no such device here" in run.of(trace.Attempt)[0].reason


@pytest.mark.wgpu
def test_wgpu_backend(contract: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--backend wgpu computes every worker's steps on wgpu."""
    try:
        device = backends.open_backend("wgpu")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    called = []
    right = resident.ResidentStep.__call__

    def counted(self: resident.ResidentStep, ids: Any, drop: Any) -> object:
        called.append(ids)
        return right(self, ids, drop)

    monkeypatch.setattr(resident.ResidentStep, "__call__", counted)
    monkeypatch.setitem(backends.BACKENDS, "cpu", backends.BACKENDS["cuda"])
    json = tmp_path / "r.json"
    usual = ("--contract", contract, "--examples", 1, "--json", json, "--only", "F-DP-001")
    assert check(*usual, "--backend", "wgpu", "--trace-dir", "t") == 0
    assert called
    assert {one.backends for one in traced(Path("t"))} == {("wgpu",)}
    assert report(json)["environment"]["wgpu_adapter"].startswith(device.device)


# --- output -----------------------------------------------------------------------------------


def test_reports(contract: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json, --junit and the terminal show the same results, versions and devices."""
    json, junit = tmp_path / "r.json", tmp_path / "r.xml"
    usual = ("--contract", contract, "--examples", 2, "--json", json, "--junit", junit)
    assert check(*usual, "--seed", 3) == 0
    record = report(json)
    assert record["seed"] == 3
    assert record["command"].startswith(f"entrenar-check --contract {contract} --examples 2")
    assert set(record["environment"]) >= {"python", "torch", "numpy", "platform", "cpu", "cuda"}
    assert [case.get("name") for case in ElementTree.parse(junit).iter("testcase")]
    printed = capsys.readouterr().out
    assert "held: F-DP-001 identical, F-DP-002 covered" in printed
    assert "seed 3" in printed
    assert check(*usual, "-v") == 0
    assert "held     F-DP-001" in capsys.readouterr().out


def test_reports_for_services_and_browsers(
    contract: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--sarif, --html and --github show the same results; the page draws the judged runs."""
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    repeat_a_sample(monkeypatch)
    usual = ("--contract", contract, "--examples", 0, "--only", "F-DP-002", "--github")
    assert check(*usual, "--sarif", "r.sarif", "--html", "r.html") == 1
    (result,) = report(Path("r.sarif"))["runs"][0]["results"]
    (location,) = result["locations"]
    place = location["physicalLocation"]["artifactLocation"]
    assert place == {"uri": "small-v1.yaml", "uriBaseId": "SRCROOT"}
    assert result["ruleId"] == "F-DP-002"
    printed = capsys.readouterr().out
    assert "::error file=small-v1.yaml,line=4,col=5,title=F-DP-002 falsified::" in printed
    assert "| ❌ falsified | F\\-DP\\-002 |" in (tmp_path / "summary.md").read_text(
        encoding="utf-8"
    )
    page = Path("r.html").read_text(encoding="utf-8")
    assert "reference, 1 worker, counterexample" in page
    assert "<svg" in page


def test_github_needs_a_runner(
    contract: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Outside of a workflow --github is refused before anything runs."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setattr(systems, "run", no_run)
    assert check("--contract", contract, "--github") == 2
    assert "not a step of a GitHub workflow" in capsys.readouterr().err


def test_quiet(contract: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the totals are printed if every clause held."""
    assert check("--contract", contract, "--examples", 0, "--quiet") == 0
    assert "F-DP-001" not in capsys.readouterr().out


def test_no_color(
    contract: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal has colours unless --no-color is given; FORCE_COLOR makes rich treat a pipe as
    one.
    """
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    green, bold = "\x1b[32m", "\x1b[1m"
    assert check("--contract", contract, "--examples", 0) == 0
    shown = capsys.readouterr()
    assert bold in shown.out
    assert green in shown.err, "the line of progress is no result"
    assert check("--contract", contract, "--examples", 0, "--no-color") == 0
    shown = capsys.readouterr()
    assert not any(code in shown.out + shown.err for code in (green, bold))


# --- traces and counterexamples ---------------------------------------------------------------


def no_run(scenario: Scenario) -> trace.Trace:
    """Replacement for `systems.run` that fails the test."""
    raise AssertionError(f"ran {scenario}")


@pytest.mark.parametrize("broken", [False, True])
def test_judging_a_folder_gives_the_verdicts_of_the_run(
    contract: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """--trace-dir keeps every run; --judge gives the same verdicts and runs nothing."""
    if broken:
        repeat_a_sample(monkeypatch)
    ran, judged, folder = tmp_path / "ran.json", tmp_path / "judged.json", tmp_path / "a" / "t"
    usual = ("--contract", contract, "--json")
    code = check(*usual, ran, "--examples", 3, "--trace-dir", folder)
    monkeypatch.setattr(systems, "run", no_run)
    assert check(*usual, judged, "--judge", folder) == code == (1 if broken else 0)
    assert verdicts(ran) == verdicts(judged)
    assert report(judged)["system"] == "reference"
    assert report(judged)["environment"]["torch"] == report(ran)["environment"]["torch"]
    files = sorted(folder.iterdir())
    assert check(*usual, judged, "--judge", *files) == code


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: [lines[0], lines[1].replace('"rank":0', '"rank":1'), *lines[2:]], ":2: "),
        (lambda lines: [lines[0].replace('"version":1', '"version":99'), *lines[1:]], "version=99"),
    ],
)
def test_judging_a_damaged_trace(
    contract: str, edit: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A changed or foreign file is refused with its line, as the reader's tests do in all ways."""
    check("--contract", contract, "--examples", 0, "--trace-dir", "t", "--only", "F-DP-001")
    (path,) = Path("t").iterdir()
    path.write_text("".join(edit(path.read_text().splitlines(keepends=True))))  # type: ignore[operator]
    assert check("--contract", contract, "--judge", path) == 2
    assert message in capsys.readouterr().err


def test_a_break_is_shrunk_saved_and_replayed(
    contract: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command that the report names replays the break: falsified with the bug alone."""
    json = tmp_path / "r.json"
    with monkeypatch.context() as patch:
        repeat_a_sample(patch)
        assert check("--contract", contract, "--examples", 5, "--json", json) == 1
        replays = [one for one in capsys.readouterr().out.splitlines() if "--replay" in one]
        (path,) = counterexamples.FOLDER.iterdir()
        last = f"entrenar-check --contract {contract} --replay {path}"
        assert replays == [f"replay with: {last}"]
        small = counterexamples.load(path).scenario
        assert (small.world_size, small.num_steps) < (2, 4)
        assert check(*last.split()[1:], "--json", json) == 1
        assert f"replay with: {last}" in capsys.readouterr().out.splitlines()
        assert report(json)["results"][0]["replay"] == str(path)
    assert check(*last.split()[1:], "--json", json, "--trace-dir", "t") == 0
    assert verdicts(json) == {"F-DP-002": "held"}
    assert small in traced(Path("t"))


def test_a_known_counterexample_is_tried_first(
    contract: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saved counterexample is found again in one run, unless another trainer is given."""
    repeat_a_sample(monkeypatch)
    usual = ("--contract", contract, "--only", "F-DP-002", "--examples", 0)
    assert check(*usual) == 1
    (path,) = counterexamples.FOLDER.iterdir()
    tried: list[Scenario] = []
    right = systems.run

    def recorded(scenario: Scenario) -> trace.Trace:
        tried.append(scenario)
        return right(scenario)

    monkeypatch.setattr(systems, "run", recorded)
    assert check(*usual) == 1
    assert tried[0] == counterexamples.load(path).scenario
    tried.clear()
    assert check(*usual, "--system", "textbook") == 1
    assert {one.system for one in tried} == {"textbook"}


def test_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    """--mutants prints the kill matrix and exits with its code."""
    for code in (0, 1):
        monkeypatch.setattr("entrenar_py.check.kill_matrix.show", lambda console, code=code: code)
        assert check("--mutants") == code


def test_foreign_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A contract written by others gets a verdict per clause; Rust code in it is not executed."""
    foreign = Path(__file__).parents[1] / "contract" / "data" / "foreign-trainer-v1.yaml"
    json = tmp_path / "r.json"
    arguments = ("--contract", foreign, "--examples", 1, "--json", json)
    assert check(*arguments, "--exclude", "F-DP-005") == 4
    found = {"F-DP-001": "held", "F-DP-002": "held", "F-NET-001": "inconclusive"}
    assert verdicts(json) == found
    lines = foreign.read_text().splitlines()
    line = 1 + next(n for n, text in enumerate(lines) if "F-NET-001" in text)
    assert f"{foreign}:{line}:5: no check covers it" in capsys.readouterr().out
    assert not list(tmp_path.rglob("EXECUTED"))


def test_a_clause_that_was_seen_not_to_apply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is left out and named, and the exit code is that of the others; named by --only, it is 4.

    The trace is that of a script that writes no checkpoint.
    """
    ran = systems.run(Scenario(system="reference", workload="linear", world_size=2, seed=0))
    own = ran.scenario.with_(system="command", workload="own")
    ran = replace(ran, scenario=own, traits=replace(ran.traits, saves="nothing"), promises=())
    trace.save(ran, tmp_path / "script.jsonl")
    extra = "  - {id: F-TI-003, name: resumed, severity: P0, invariant: stopped and resumed}\n"
    contract = contract_file(tmp_path, extra=extra)
    arguments = ("--contract", contract, "--judge", tmp_path / "script.jsonl")
    json = tmp_path / "r.json"
    assert check(*arguments, "--exclude", "F-DP-002", "--json", json) == 0
    assert "not applied: F-TI-003 (resumed): the script writes no ch" in capsys.readouterr().out
    assert verdicts(json) == {"F-DP-001": "held"}
    assert report(json)["not_applying"] == ["F-TI-003"]
    assert check(*arguments, "--only", "F-TI-003") == 4
    assert "F-TI-003 INCONCLUSIVE: not applied: the script writes" in capsys.readouterr().out
    # Without a contract those for scripts are used, and clauses of other systems are left out.
    assert check("--judge", tmp_path / "script.jsonl", "--only", "F-DP-001,F-WGPU-001") == 0
