"""A configuration's keys and values, and what it leaves out of a run."""

from __future__ import annotations

import datetime
from collections.abc import Collection
from pathlib import Path

import pytest

from entrenar_py.check.project import command_line, configuration
from entrenar_py.check.project.configuration import KEYS, Acceptance, Exclusion
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.errors import ContractError, UsageError
from tests.check.contract.validation.written import KERNEL, written
from tests.command_line import check
from tests.traces import clause

# Options that say what is done in one call, or how it is shown: no project has a usual value.
NOT_CONFIGURED = {
    *("help", "version", "config", "no_config", "stop_early", "no_color", "verbose"),
    "last_failed",
    *(name for name in command_line.MODES if name != "command"),
}
FULL = """\
[project]
name = "mine"

[tool.entrenar-check]
contract = ["distributed-training-v1.yaml", "contracts/own.yaml"]
command = "torchrun --nproc_per_node={world_size} 'my train.py'"
steps = 6
deadline = 12.5
world-size = [2, 4]
seed = 3
only = "F-DP-001"
severity = ["P0", "P1"]
allow-inconclusive = true
strict = false
json = "out/{contract}.json"
bind = "mine.yaml"
trace-dir = "traces/{contract}"
github = true
quiet = true
exclude = [
  {clause = "F-DP-003", reason = "it skips NaNs", until = 2027-01-31},
  {clause = ["F-DP-006", "F-TI-003"], reason = "no checkpoints", kind = "not-applicable"},
]
"""


def write(folder: Path, text: str, name: str = "pyproject.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def problems(folder: Path, text: str) -> list[str]:
    """Return the errors in a table of these lines, without the file's name."""
    path = write(folder, f"[tool.entrenar-check]\n{text}")
    with pytest.raises(ContractError) as refusal:
        configuration.load(path)
    return [line.partition("pyproject.toml:")[2] for line in refusal.value.problems]


pytestmark = pytest.mark.usefixtures("own_folder")


def test_every_option_has_a_key_or_none_on_purpose() -> None:
    """Every option has a key or is exempt, and every key but the known ones has an option."""
    names = {action.dest for action in command_line.build()._actions} - NOT_CONFIGURED
    keys = {name.replace("-", "_") for name in KEYS}
    assert names - keys == set()
    assert keys - names == {"accept", "command", "knobs"}


def test_all_keys(tmp_path: Path) -> None:
    """Values are those of the command line's options; paths are relative to the current folder."""
    project = configuration.load(write(tmp_path, FULL))
    assert (str(project.place), project.folder) == ("pyproject.toml:4:7", tmp_path)
    assert project.command == ("torchrun", "--nproc_per_node={world_size}", "my train.py")
    line = "--steps 6 --deadline 12.5 --world-size 2,4 --seed 3 --only F-DP-001 --severity P0,P1"
    options = command_line.read(line.split())
    for name in options.typed:
        assert project.values[name] == getattr(options, name)
    assert project.values["contract"] == ("distributed-training-v1.yaml", "contracts/own.yaml")
    assert project.values["json"] == Path("out/{contract}.json")
    assert project.values["bind"] == [Path("mine.yaml")]
    assert [project.values[name] for name in ("github", "quiet", "strict")] == [True, True, False]
    first, second, third = project.exclusions
    assert (first.clause, first.reason) == ("F-DP-003", "it skips NaNs")
    assert (first.until, str(first.place)) == (datetime.date(2027, 1, 31), "pyproject.toml:21:3")
    assert (second.clause, third.clause, second.until) == ("F-DP-006", "F-TI-003", None)


def test_seen_from_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is relative to the file; the name of a shipped contract stays a name."""
    path = write(tmp_path, FULL)
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path / "src")
    project = configuration.load(path)
    assert project.place.file == "../pyproject.toml"
    assert project.values["contract"] == ("distributed-training-v1.yaml", "../contracts/own.yaml")
    assert project.values["trace_dir"] == Path("../traces/{contract}")


def test_a_file_of_its_own(tmp_path: Path) -> None:
    """In entrenar-check.toml the same keys are at the top."""
    path = write(tmp_path, 'contract = "c.yaml"\nsystem = "ddp"\n', "entrenar-check.toml")
    project = configuration.load(path)
    assert project.values == {"contract": ("c.yaml",), "system": "ddp"}
    assert str(project.places["system"]) == "entrenar-check.toml:2:1"
    with pytest.raises(UsageError, match=r"has no table \[tool.entrenar-check\]"):
        configuration.load(write(tmp_path, ""))


def test_all_problems_at_once(tmp_path: Path) -> None:
    """Unknown keys, wrong types, wrong values and wrong exclusions are all reported together."""
    found = problems(
        tmp_path,
        """\
contract = []
comand = "train"
world_size = 2
seed = -1
"examples" = "many"
exclude = [
  {clause = "A", until = 2027-01-31},
  {clause = "B", reason = "why", until = "2027-01-31"},
  {clause = "C", reason = "why"},
  {reason = "why", till = 1, until = 2027-01-31}, "D",
  {clause = "E", reason = "why", kind = "not-aplicable"},
  {clause = "F", reason = "why", kind = "not-applicable", until = 2027-01-31},
]
timeout = 0
quiet = 1
steps = 4
""",
    )
    assert found == [
        "2:1: error: contract = []: give text, or list of texts",
        "3:1: error: unknown key 'comand'; did you mean 'command'?",
        "4:1: error: unknown key 'world_size'; did you mean 'world-size'?",
        "5:1: error: seed = -1: '-1': use a whole number from 0 to 10^18 - 1",
        "6:1: error: examples = 'many': give whole number",
        '8:3: error: an exclusion has no reason; give reason = "why"',
        "9:34: error: an exclusion has until = '2027-01-31', no date; give its last day, until = "
        'YYYY-MM-DD without quotes, or kind = "not-applicable" if the clause can never apply',
        "10:3: error: an exclusion has no end date; give its last day, until = YYYY-MM-DD without "
        'quotes, or kind = "not-applicable" if the clause can never apply',
        '11:3: error: an exclusion names no clause; give clause = "ID"',
        "11:20: error: unknown key 'till' of an exclusion; did you mean 'until'?",
        '11:51: error: exclude = [\'D\']: give {clause = "ID", reason = "why", until = DATE}',
        "12:34: error: kind = 'not-aplicable' of an exclusion; did you mean 'not-applicable'?",
        '13:59: error: kind = "not-applicable" has no end date; leave until out',
        "15:1: error: timeout = 0: '0': use a number of seconds > 0",
        "16:1: error: quiet = 1: give true or false",
        "17:1: error: steps has an effect only with the key command; leave steps out",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "1:7: error: contract is missing; name the contracts to check"),
        (
            'contract = "c"\ncommand = "a \'b"',
            '3:1: error: command = "a \'b": No closing quotation',
        ),
        ('contract = "c"\ncommand = []', "3:1: error: command = []: give text, or list of words"),
        (
            'contract = "c"\ncommand = "train"\nexamples = 3',
            "4:1: error: examples has no effect with the key command; leave one of them out",
        ),
        ("contract = ", "2:1: error: no TOML: Invalid value (at end of document)"),
        ('contract = "c"\n[', "3:1: error: no TOML: Invalid initial character for a key part"),
        (
            'contract = "c"\ncommand = "train"\nlauncher = "cold"',
            "4:1: error: launcher = 'cold': give one of forked, as-is",
        ),
        ("exclude = 3\ncontract = 'c'", "2:1: error: exclude = 3: give a list of tables"),
    ],
)
def test_problems(tmp_path: Path, text: str, problem: str) -> None:
    """Each problem has its own message."""
    (found,) = problems(tmp_path, text)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    "line",
    [
        r'json = "a\u0000b"',
        r'command = ["true", "a\u0000b"]',
        r'exclude = [{clause = "F", reason = "\u0000", until = 2027-01-31}]',
    ],
)
def test_a_nul_is_in_no_path_and_no_word(tmp_path: Path, line: str) -> None:
    """A NUL is refused at its place in the file, before a path or process would fail on it."""
    (found,) = problems(tmp_path, f'contract = "c"\n{line}')
    assert found.startswith(f"3:1: error: {line.split()[0]} contains a NUL character")


def test_a_table_that_is_none(tmp_path: Path) -> None:
    """A value that isn't a table, under the table's name, is refused."""
    path = write(tmp_path, "[tool]\nentrenar-check = 1\n")
    with pytest.raises(ContractError, match="give a table with keys among contract, command"):
        configuration.load(path)


LAST = datetime.date(2027, 1, 31)
CLAUSE, OTHER = clause("finiteness"), clause("replica_identity")
EXCLUDED = Exclusion(
    clause=CLAUSE.id, reason="not yet", until=LAST, place=Position("pyproject.toml", 9, 3)
)
NEVER = Exclusion(clause=CLAUSE.id, reason="no NaNs here", until=None, place=EXCLUDED.place)


def standing(
    found: Exclusion, today: datetime.date, asked: Collection[str] = ()
) -> configuration.Standing:
    return configuration.apply([OTHER, CLAUSE], [found], named=asked, today=today)


def test_until_its_last_day() -> None:
    """On its last day a clause is still left out, and reported with reason and place."""
    found = standing(EXCLUDED, LAST)
    assert (found.selected, found.notes, found.not_applying) == ((OTHER,), {}, ())
    (one,) = found.excluded
    assert one.named == f"F-DP-003 ({CLAUSE.name})"
    assert one.why == "until 2027-01-31: not yet (pyproject.toml:9:3)"


def test_void_on_the_next_day() -> None:
    """On the day after, the clause is tried again with a note."""
    found = standing(EXCLUDED, LAST + datetime.timedelta(days=1))
    assert (found.selected, found.excluded) == ((OTHER, CLAUSE), ())
    assert found.notes == {
        CLAUSE.id: "its exclusion ended with 2027-01-31, so it is tried again: not yet "
        "(pyproject.toml:9:3)"
    }


def test_asked_for_by_its_id() -> None:
    """A clause that the command line names is tried although it is excluded."""
    found = standing(EXCLUDED, LAST, asked=(CLAUSE.id,))
    assert found.selected == (OTHER, CLAUSE)
    assert found.notes == {
        CLAUSE.id: "tried because --only names it, although pyproject.toml:9:3 excludes it"
    }


def test_not_applicable() -> None:
    """Such an exclusion has no end, and counts as a clause that doesn't apply to the system."""
    found = standing(NEVER, datetime.date.max)
    assert (found.selected, found.excluded) == ((OTHER,), ())
    (one,) = found.not_applying
    assert one.reason == "no NaNs here (pyproject.toml:9:3)"


def test_each_names_a_clause_once() -> None:
    """A misspelt or repeated clause is refused, as it would exclude nothing unnoticed."""
    configuration.require_known([EXCLUDED], [CLAUSE.id])
    with pytest.raises(ContractError) as refusal:
        configuration.require_known([EXCLUDED, NEVER], ["F-DP-033"])
    assert refusal.value.problems[0] == (
        "pyproject.toml:9:3: error: clause 'F-DP-003' is in none of the contracts; did you mean "
        "'F-DP-033'?"
    )
    with pytest.raises(ContractError, match="is excluded at pyproject"):
        configuration.require_known([EXCLUDED, NEVER], [CLAUSE.id])


def test_an_accepted_clause_is_tried() -> None:
    """Its falsification is accepted for the reason given, if nothing else leaves it out."""
    accepted = Acceptance(clause=CLAUSE.id, reason="clamped", place=EXCLUDED.place)
    found = configuration.apply([OTHER, CLAUSE], [], [accepted])
    assert found.selected == (OTHER, CLAUSE)
    assert found.accepted == {CLAUSE.id: "clamped (pyproject.toml:9:3)"}
    configuration.require_known([], [CLAUSE.id], [accepted])
    with pytest.raises(ContractError, match="is in none of the contracts"):
        configuration.require_known([], [OTHER.id], [accepted])
    with pytest.raises(ContractError, match=r"is excluded at pyproject\.toml:9:3, too"):
        configuration.require_known([EXCLUDED], [CLAUSE.id], [accepted])


TABLE = """\
[tool.entrenar-check]
contract = "c-v1.yaml"
json = "run.json"
suppress = ["SCHEMA-001", "ENTRENAR-001"]
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SCHEMA-00X", "--suppress SCHEMA-00X: no such rule: did you mean"),
        ("PV-VAL-001", "--suppress PV-VAL-001: can't be suppressed"),
    ],
)
def test_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    """A wrong rule is an error at its place."""
    written(tmp_path, KERNEL)
    written(tmp_path, TABLE.replace("SCHEMA-001", name), "pyproject.toml")
    assert check("--validate") == 2
    assert f"pyproject.toml:4:1: error: {message}" in capsys.readouterr().err


def test_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--validate suppresses what is configured, or typed; a run's reports are not overwritten."""
    written(tmp_path, KERNEL.replace("[a paper]", "[]").replace(", if_fails: no division", ""))
    written(tmp_path, TABLE, "pyproject.toml")
    assert check("--validate") == 0
    assert "valid, 2 invariants, 1 warning, 1 note, 1 suppressed" in capsys.readouterr().out
    assert check("--validate", "--suppress", "SCHEMA-009") == 2
    assert check("--validate", "--no-config", "--contract", "c-v1.yaml") == 2
    assert not (tmp_path / "run.json").exists()
