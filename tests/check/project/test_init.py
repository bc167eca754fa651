"""`entrenar-check init`: the configuration it writes, its place, and that it then works."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from entrenar_py.check.project import configuration
from entrenar_py.shared import package_data
from tests.command_line import check, contract_file

EXAMPLES = Path(__file__).parents[3] / "examples/user_trainers"
COMMAND = ("torchrun", "--nproc_per_node=2", "train.py")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder with one of the examples only."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLES / "resume.py", "train.py")


def test_a_new_file(capsys: pytest.CaptureFixture[str]) -> None:
    """The guesses for the example are written and printed."""
    assert check("init", "--", *COMMAND) == 0
    project = configuration.load(Path("entrenar-check.toml"))
    assert " ".join(project.command) == (
        "torchrun --nproc_per_node={world_size} train.py --steps {steps} --dir {workdir}"
    )
    assert project.values["contract"] == package_data.FOR_SCRIPTS
    assert project.values["steps"] == 8
    assert project.exclusions == (), "what doesn't apply is seen in the runs"
    printed = capsys.readouterr().out
    assert printed.startswith("wrote entrenar-check.toml\n  command: torchrun --nproc_per_node={")
    assert "guessed: --dir {workdir} was added: train.py has such an option" in printed
    assert printed.endswith("now run: entrenar-check\n")


def test_without_a_command() -> None:
    """Without a command the reference trainers are configured."""
    assert check("init") == 0
    project = configuration.load(Path("entrenar-check.toml"))
    assert (project.command, project.exclusions) == ((), ())
    assert len(project.values["contract"]) == 2
    assert check("--list") == 0


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "END"])
def test_pyproject(end: str, last: str) -> None:
    """The content of pyproject.toml is kept byte for byte, with comments and line ends."""
    before = f'# mine{end}[project]{end}name = "x"  # é{last.replace("END", end)}'.encode()
    Path("pyproject.toml").write_bytes(before)
    assert check("init", "--contract", "reduction-v1", "--", *COMMAND, "--name", 'a "b" é') == 0
    after = Path("pyproject.toml").read_bytes()
    assert after.startswith(before)
    added = after.removeprefix(before)
    assert added.count(b"\n") == added.count(end.encode())
    table = tomllib.loads(after.decode())["tool"]["entrenar-check"]
    assert table["contract"] == "reduction-v1"
    assert configuration.load(Path("pyproject.toml")).command[3:5] == ("--name", 'a "b" é')


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("entrenar-check.toml", "", "entrenar-check.toml configures entrenar-check already"),
        ("pyproject.toml", "[tool.entrenar-check]", "pyproject.toml configures entrenar-check alr"),
        ("pyproject.toml", "[tool.entrenar-check.x]", "pyproject.toml configures entrenar-check"),
        ("pyproject.toml", "tool = {}", "pyproject.toml: a table can't be added at its end"),
        ("pyproject.toml", "[", "pyproject.toml is not valid TOML"),
    ],
)
def test_nothing_is_overwritten(
    name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An existing file stays, and the message says why."""
    Path(name).write_text(text)
    assert check("init", "--", *COMMAND) == 2
    assert message in capsys.readouterr().err
    assert Path(name).read_text() == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--contract", "no-such"), "contract='no-such': no such file, and no shipped contract"),
        (("--",), "no command after --; write the command that trains"),
        (("torchrun", "a.py"), "after --, as in: entrenar-check init -- torchrun a.py"),
        (("--force",), "unrecognized arguments: --force; see entrenar-check"),
        (("--", "train\udcff"), "the command has bytes that are not UTF-8"),
    ],
)
def test_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On an error nothing is written."""
    assert check("init", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not Path("entrenar-check.toml").exists()


def test_the_command_is_shown_as_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """The command is shown with shell quotes, but placeholders are not quoted."""
    words = ("torchrun", "--nproc_per_node=2", "other.py", "--name", "Ann's two", "")
    assert check("init", "--", *words) == 0
    typed = "torchrun --nproc_per_node={world_size} other.py --name 'Ann'\"'\"'s two' ''"
    assert f"command: {typed}\n" in capsys.readouterr().out
    written = tomllib.loads(Path("entrenar-check.toml").read_text())
    assert shlex.split(written["command"]) == [*typed.split()[:4], "Ann's two", ""]


@pytest.mark.slow
def test_init_then_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`init` and then `entrenar-check`, with torchrun's own processes: a correct script exits 0."""
    shutil.copy(EXAMPLES / "ddp.py", "train.py")
    own = Path(contract_file(tmp_path)).read_text()
    alone = own.replace("  - {id: F-DP-002", "  # {id: F-DP-002")
    Path("small-v1.yaml").write_text(alone.replace("F-DP-001, F-DP-002", "F-DP-001"))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    told = ("--contract", "small-v1.yaml", "--", *launcher, "--nproc_per_node=2", "train.py")
    assert check("init", *told) == 0
    assert check() == 0, capsys.readouterr()
    assert re.search(r"^held: F-DP-001 ", capsys.readouterr().out, re.MULTILINE)
