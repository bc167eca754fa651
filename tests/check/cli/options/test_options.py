"""The command line: its flags, their combinations, and the help."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from entrenar_py.check.project import command_line
from entrenar_py.compute import BACKENDS
from entrenar_py.shared import systems
from entrenar_py.shared.errors import UsageError

GOLDEN = Path(__file__).parents[3] / "golden" / "help.txt"

FLAGS = [
    *(
        "-h",
        "--help",
        "--version",
        "--contract",
        "--bind",
        "--config",
        "--no-config",
        "--only",
        "--exclude",
        "--severity",
    ),
    *("--system", "--world-size", "--backend", "--seed", "--examples", "--timeout"),
    *("--auto", "--deadline", "--steps", "--epochs", "--in-place", "--launcher", "--last-failed"),
    "-x",
    *(
        "--allow-inconclusive",
        "--list",
        "--validate",
        "--suggest",
        "--judge",
        "--replay",
        "--mutants",
    ),
    *("--strict", "--suppress", "--json", "--junit", "--sarif", "--html", "--github"),
    *("--trace-dir", "--quiet", "-v", "--no-color"),
]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed options, after checking that they go together."""
    options = command_line.read(arguments)
    command_line.require_compatible(options)
    command_line.require_distinct(options)
    return options


def test_flags() -> None:
    """A flag is added, renamed or dropped on purpose: each has a test of its effect."""
    assert [name for action in actions() for name in action.option_strings] == FLAGS


def actions() -> list[argparse.Action]:
    """Return every option of the parser."""
    return command_line.build()._actions


def test_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of `--help` equals the golden file."""
    monkeypatch.setenv("COLUMNS", "100")
    assert command_line.build().format_help() == GOLDEN.read_text(encoding="utf-8")


def test_help_names_every_choice() -> None:
    """The help names all trainers and backends, although it must not import their tables."""
    text = command_line.build().format_help()
    assert all(name in text for name in (*systems.TRAINERS, *BACKENDS))


def test_modes_name_options_that_exist() -> None:
    """Every option that a mode allows exists."""
    known = {action.dest for action in actions()}
    assert set(command_line.MODES) - {"command"} <= known
    assert {name for names in command_line.MODES.values() for name in names} <= known


def test_no_mode() -> None:
    """Without a mode every option is allowed."""
    given = parse(["--contract", "c", "--seed", "3", "--json", "a", "--junit", "b"])
    assert given.mode is None
    assert given.seed == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--contract c --list --json r.json", "--json has no effect with --list; leave it out"),
        ("--contract c --validate --only A", "--only has no effect with --validate"),
        ("--mutants --contract c", "--contract has no effect with --mutants"),
        ("--contract c --replay f --seed 4", "--seed has no effect with --replay"),
        ("--contract c --judge t -x", "-x has no effect with --judge"),
        ("--contract c --judge t --trace-dir d", "--trace-dir has no effect with --judge"),
        ("--contract c --steps 4", "--steps has an effect only with a command after --"),
        ("--contract c --deadline 4", "--deadline has an effect only with a command after"),
        ("--contract c --list -- train", "a command after -- has no effect with --list"),
        ("--contract c --backend cpu -- train", "--backend has no effect with a command after"),
        ("--contract c --", "no command after --; write the command that trains"),
        (
            "--contract c torchrun --nproc_per_node=2 train.py --steps 4",
            "after --, as in: entrenar-check --contract c -- torchrun --nproc_per_node=2 train.py",
        ),
        ("--judge a b --only F-DP-001 x", "after --, as in: entrenar-check --judge a b --only"),
        ("my-contract.yaml", "a contract is given as --contract my-contract.yaml"),
        ("--list --validate", "not allowed with argument --list"),
        ("--json same --junit same", "--json and --junit are both same; give two files"),
        ("--html same --sarif same", "--sarif and --html are both same; give two files"),
        ("--json ./same --trace-dir same", "--json and --trace-dir are both same; give two files"),
        ("--contract c --json c", "--contract and --json are both c; give two files"),
        ("--contract c --bind b --html b", "--bind and --html are both b; give two files"),
        ("--contract c --replay r --json r", "--replay and --json are both r; give two files"),
        ("--contract c --list --github", "--github has no effect with --list; leave it out"),
        ("--world-size 0", "'0': use a whole number from 1 to"),
        ("--world-size 2,x", "'x': use a whole number"),
        ("--seed -1", "'-1': use a whole number"),
        ("--seed " + "9" * 5000, "use a whole number from 0 to"),
        ("--examples 1.5", "'1.5': use a whole number"),
        ("--timeout 0", "'0': use a number of seconds > 0"),
        ("--timeout inf", "'inf': use a number of seconds > 0"),
        ("--timeout soon", "'soon': use a number of seconds > 0"),
        ("--severity P0,P9", "'P0,P9': use P0, P1 or P2, with commas between"),
        ("--only ,", "',': use one or more words, with commas between"),
        ("--judge", "expected at least one argument"),
        ("--nonsense", "unrecognized arguments: --nonsense; see entrenar-check --help"),
        ("--exam 3", "unrecognized arguments"),
    ],
)
def test_refused(line: str, message: str) -> None:
    """Options without an effect are refused by name; none is silently ignored."""
    with pytest.raises(UsageError) as refusal:
        parse(line.split())
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_lists() -> None:
    """Lists are split at commas."""
    given = parse(["--only", "A, B", "--world-size", "1,3", "--severity", "P0,P2"])
    assert (given.only, given.world_size, given.severity) == (("A", "B"), (1, 3), ("P0", "P2"))
