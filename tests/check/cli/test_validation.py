"""`entrenar-check --validate` on the command line: suppressed rules and formats."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from entrenar_py.check.contract.rules import RULES
from tests.check.contract.validation.written import KERNEL, written
from tests.command_line import check, report

SCHEMA = Path(__file__).parents[3] / "docs" / "validation-schema-v2.json"
BROKEN = KERNEL.replace("[a paper]", "[]").replace(", if_fails: no division", "")
ASIDE = "SCHEMA-001,ENTRENAR-001,ENTRENAR-002"


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Return a contract with an error (SCHEMA-001) and a warning (SCHEMA-009)."""
    return written(tmp_path, BROKEN)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return a contract without findings."""
    return written(tmp_path, KERNEL, "kept-v1.yaml")


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [
        ((), 2, "c-v1.yaml: not valid, 1 error, 2 invariants, 1 warning, 1 note"),
        (("--strict",), 2, "c-v1.yaml: not valid, 2 errors, 2 invariants, 0 warnings, 1 note"),
        (("--suppress", ASIDE), 0, "valid, 2 invariants, 1 warning, 2 suppressed"),
        (("--suppress", ASIDE, "--strict"), 2, "not valid, 1 error, 2 invariants, 0 warnings"),
    ],
)
def test_the_verdict(
    broken: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    verdict: str,
) -> None:
    """The verdict counts the findings left after --strict and suppressed rules."""
    assert check("--contract", broken, "--validate", *arguments) == code
    assert verdict in capsys.readouterr().out


def test_what_is_told(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each finding is one line, as compilers print it."""
    assert check("--contract", broken, "--validate", "--suppress", ASIDE) == 0
    first, *_, second = sorted(
        capsys.readouterr().err.splitlines(), key=lambda line: "SCHEMA-009" in line
    )
    assert first == (
        f"{broken}:4:15: suppressed: SCHEMA-001: metadata.references is empty; cite the papers it "
        "rests on"
    )
    assert second.startswith(f"{broken}:13:5: warning: SCHEMA-009: falsification_tests.FALSIFY-1.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--suppress", "SCHEMA-1"), "--suppress SCHEMA-1: no such rule"),
        (("--suppress", ""), "'': use one or more words"),
        (("--json", "nowhere/at/all.json"), "--json nowhere/at/all.json: the folder"),
    ],
)
def test_refused(
    kept: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    """Options without an effect are refused before any file is read, with exit code 2."""
    assert check("--contract", kept, "--validate", *arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_several_contracts(
    broken: Path, kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each contract has a verdict, one file reports all, and one invalid contract decides the exit
    code.
    """
    both = ("--contract", broken, "--contract", kept, "--validate")
    assert check(*both, "--json", tmp_path / "v.json") == 2
    verdicts = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert verdicts == ["c-v1.yaml: not valid", "kept-v1.yaml: valid"]
    found = report(tmp_path / "v.json")
    assert [one["valid"] for one in found["contracts"]] == [False, True]


def test_json(broken: Path, tmp_path: Path) -> None:
    """The file is valid against its schema and agrees with the printed lines."""
    unread = written(tmp_path, "metadata: [", "unread.yaml")
    arguments = ("--contract", broken, "--contract", unread, "--validate", "--suppress", ASIDE)
    assert check(*arguments, "--json", tmp_path / "v.json") == 2
    found = report(tmp_path / "v.json")
    jsonschema.Draft202012Validator(report(SCHEMA)).validate(found)
    first, second = found["contracts"]
    assert (first["valid"], first["judged_as"], first["counts"]["suppressed"]) == (
        True,
        "kernel",
        2,
    )
    aside = next(one for one in first["findings"] if one["suppressed"])
    assert (aside["rule"], aside["level"], aside["line"]) == ("SCHEMA-001", "error", 4)
    assert (second["valid"], second["judged_as"], second["digest"]) == (False, None, None)
    assert [one["rule"] for one in second["findings"]] == ["PV-VAL-001"]


def test_sarif(broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has all rules with their levels, and a result at each place, suppressed or not."""
    monkeypatch.chdir(tmp_path)
    arguments = ("--contract", broken, "--validate", "--suppress", ASIDE, "--strict")
    assert check(*arguments, "--sarif", "v.sarif") == 2
    (run,) = report(tmp_path / "v.sarif")["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [rule.id for rule in RULES]
    assert all(rule["help"]["text"] and rule["shortDescription"]["text"] for rule in rules)
    addresses = [rule["helpUri"] for rule in rules if "helpUri" in rule]
    assert len(addresses) == 18
    assert all(address.startswith("https://") for address in addresses)
    results = {result["ruleId"]: result for result in run["results"]}
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    aside, told = results["SCHEMA-001"], results["SCHEMA-009"]
    assert aside["suppressions"] == [{"kind": "external", "status": "accepted"}]
    assert (aside["level"], told["level"], "suppressions" in told) == ("error", "error", False)
    (location,) = told["locations"]
    place = location["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "c-v1.yaml", "uriBaseId": "SRCROOT"}
    assert place["region"] == {"startLine": 13, "startColumn": 5}
    overrides = run["invocations"][0]["ruleConfigurationOverrides"]
    by_rule = {one["descriptor"]["id"]: one["configuration"] for one in overrides}
    assert by_rule["SCHEMA-009"] == {"level": "error"}
    assert "SCHEMA-001" not in by_rule


def test_github(
    broken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There is an annotation for each finding that counts, worst first; the summary shows all."""
    page = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    aside = ("--suppress", "SCHEMA-009,ENTRENAR-001,ENTRENAR-002")
    assert check("--contract", broken, "--validate", *aside, "--github") == 2
    verdict, annotation = capsys.readouterr().out.splitlines()
    assert "2 suppressed" in verdict
    assert annotation.startswith("::error file=c-v1.yaml,line=4,col=15,title=SCHEMA-001::metadata.")
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("### c\\-v1\\.yaml\\: not valid")
    assert any(line.startswith("| suppressed | SCHEMA\\-009 |") for line in lines)


def test_nothing_that_others_wrote_steers_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids and properties are printed on one line, without control characters."""
    text = KERNEL.replace("FALSIFY-2", '"a\\e[2J\\nb"').replace("FALSIFY-1", '"a\\e[2J\\nb"')
    assert check("--contract", written(tmp_path, text), "--validate") == 2
    printed = capsys.readouterr()
    assert "SCHEMA-007" in printed.err
    assert "\x1b" not in printed.err + printed.out
    assert all(": " in line for line in printed.err.splitlines())
