"""User errors and bad files: exit 2, one clear message, no traceback, nothing run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from entrenar_py import systems
from entrenar_py.check.harness import counterexamples
from tests.command_line import check, contract_file, repeat_a_sample

CONTRACT_SECONDS_MAX, CONTRACT_KIB_MAX = 5.0, 500 * 1024


pytestmark = pytest.mark.usefixtures("own_folder")


def written(name: str, text: str) -> Callable[[Path], str]:
    """Make a file `name` with the content `text`; return its path."""

    def write(folder: Path) -> str:
        path = folder / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


BAD_CONTRACTS: dict[str, tuple[Callable[[Path], str], str]] = {
    "missing": (lambda folder: "no-such.yaml", "no such file"),
    "duplicate": (written("twice.yaml", "a: 1\na: 2\n"), "twice.yaml:2:1: "),
}


@pytest.mark.parametrize("name", BAD_CONTRACTS)
def test_bad_contracts(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, a message that says what is wrong and where, no traceback, nothing on stdout."""
    make, message = BAD_CONTRACTS[name]
    assert check("--contract", make(tmp_path)) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


BAD_ARGUMENTS: dict[str, tuple[tuple[str, ...], str]] = {
    "no contract": ((), "--contract FILE is missing; shipped are distillation-v1.yaml"),
    "unknown id": (("--only", "F-DP-9"), "id 'F-DP-9' is not in small-v1.yaml: it has F-DP-001"),
    "too many workers": (("--world-size", "10"), "world_size=10 with num_samples=9"),
    "system": (("--system", "magic"), "system='magic': allowed are reference, textbook"),
    "json folder": (("--json", "no/where.json"), "--json no/where.json: the folder"),
    "junit folder": (("--junit", "no/where.xml"), "--junit no/where.xml: the folder"),
    "trace-dir": (("--trace-dir", __file__), f"--trace-dir {__file__}: File exists"),
    "no trace": (("--judge", "none.jsonl"), "trace file none.jsonl: can't be read (No such file"),
    "no replay": (("--replay", "none.json"), "replay file none.json: can't be read"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments(
    name: str, contract: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 and one line that says what to do, before anything runs."""
    monkeypatch.delattr(systems, "run")
    arguments, message = BAD_ARGUMENTS[name]
    given = ("--contract", contract) if arguments else ()
    assert check(*given, *arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("entrenar-check: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("{system: magic}", "clause F-DP-001: system='magic': allowed are"),
        ("{backends: [tpu]}", "clause F-DP-001: backend='tpu' on system reference: allowed"),
    ],
)
def test_a_contract_asks_for_what_is_not_there(
    scenario: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A contract with unavailable parts is refused before anything runs, at the clause's place."""
    path = contract_file(tmp_path, scenario=scenario)
    assert check("--contract", path) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert f"{path}:3:" in printed


def test_an_edited_replay_file(
    contract: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An edited counterexample is refused, both with --replay and when it is tried first."""
    with monkeypatch.context() as patch:
        repeat_a_sample(patch)
        assert check("--contract", contract, "--examples", 0) == 1
    (path,) = counterexamples.FOLDER.iterdir()
    path.write_text(path.read_text().replace('"num_steps": ', '"num_steps": 1'))
    capsys.readouterr()
    for arguments in (("--replay", path), ()):
        assert check("--contract", contract, *arguments) == 2
        assert "it was edited by hand" in capsys.readouterr().err


# Runs a command, prints its processor time and peak memory, exits as it did. A process of its own:
# a child's peak begins at that of who started it, and these tests themselves may hold gigabytes.
METER = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
sys.exit(done.returncode)
"""


def bomb(folder: Path) -> Path:
    """Return nine levels of ten aliases: a billion values, and more by each key."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    path = folder / "bomb.yaml"
    path.write_text("\n".join(lines))
    return path


def huge(folder: Path) -> Path:
    """Return 100 MB of YAML."""
    path = folder / "huge.yaml"
    with path.open("w") as file:
        for _ in range(100):
            file.write("- 0123456\n" * 100_000)
    return path


@pytest.mark.parametrize("make", [bomb, huge])
def test_contracts_that_would_eat_the_machine(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """Such contracts are refused with exit 2 within 5 s of processor time and 500 MB."""
    command = [sys.executable, "-m", "entrenar_py.check.cli", "--contract", str(make(tmp_path))]
    done = subprocess.run(
        [sys.executable, "-c", METER, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr
    seconds, kib = map(float, done.stdout.split())
    assert seconds < CONTRACT_SECONDS_MAX
    assert kib < CONTRACT_KIB_MAX
