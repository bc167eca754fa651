"""The options of `entrenar-check`: how they are written, which belong together, their reference.

Imports nothing heavy, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import entrenar_py
from entrenar_py.errors import UsageError

PROG = "entrenar-check"

EPILOG = """\
exit codes:
  0  every selected invariant held, each with comparisons made
  1  an invariant was falsified
  2  the contract or the command line is invalid; nothing ran
  3  the harness itself failed
  4  inconclusive: something could not be compared (--allow-inconclusive makes it 0); interrupted
  5  nothing was selected

examples:
  entrenar-check --contract distributed-training-v1.yaml
  entrenar-check --contract distributed-training-v1.yaml --only F-DP-005 --examples 500
  entrenar-check --contract my-contract.yaml --validate --strict
  entrenar-check --contract distributed-training-v1.yaml -- \\
      torchrun --nproc_per_node={world_size} my_train.py
"""

_SELECTION = ("only", "exclude", "severity")
FILES = ("json", "junit", "sarif", "html")  # a report may be written as
_REPORT = (*FILES, "github", "allow_inconclusive", "quiet")
_VARIATION = ("system", "world_size", "backend", "seed")

_COMMANDED = ("steps", "deadline")  # of somebody's own command alone

# What runs instead of the search -> the options that mean something then; all others are refused,
# because an option that is accepted and ignored lies. Without a mode every option counts.
MODES: dict[str, tuple[str, ...]] = {
    "list": ("contract", "strict", "no_color", *_SELECTION),
    "validate": ("contract", "strict", "no_color"),
    "judge": ("contract", "strict", "no_color", *_SELECTION, *_VARIATION, *_REPORT),
    "replay": ("contract", "strict", "no_color", "trace_dir", *_REPORT),
    "mutants": ("no_color",),
    "command": (
        *("contract", "strict", "no_color", "world_size", "seed", "steps", "deadline", "trace_dir"),
        *(*_SELECTION, *_REPORT),
    ),
}


class _Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing the usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {PROG} --help")


def parser() -> argparse.ArgumentParser:
    """The command line, every option of it."""
    cli = _Parser(
        prog=PROG,
        usage="%(prog)s --contract FILE [options] [-- COMMAND ...]",
        description="Tries to falsify a distributed trainer against a written contract.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cli.add_argument("--version", action="version", version=f"%(prog)s {entrenar_py.__version__}")
    cli.add_argument(
        "--contract", metavar="FILE", help="a YAML contract: a path, or the name of a shipped one"
    )
    _add_selection(cli.add_argument_group("which invariants"))
    _add_runs(cli.add_argument_group("how they are tried"))
    _add_modes(cli.add_argument_group("instead of running all that"))
    _add_output(cli.add_argument_group("output"))
    return cli


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; `mode` is a name in MODES, or None. UsageError for what makes no sense."""
    cli = parser()
    own, command = _split(arguments)
    options = cli.parse_args(own)
    options.command = command
    options.mode = next((name for name in MODES if getattr(options, name)), None)
    if options.mode is not None:
        for action in cli._actions:
            name = action.dest
            if name in ("help", "version", options.mode, *MODES[options.mode]):
                continue
            if getattr(options, name) != action.default:
                option, mode = action.option_strings[0], _mode(options.mode)
                raise UsageError(f"{option} means nothing with {mode}; leave it out")
    if command and options.mode != "command":
        raise UsageError(f"a command behind -- means nothing with --{options.mode}; leave it out")
    for name in () if command else _COMMANDED:
        if getattr(options, name) != cli.get_default(name):
            raise UsageError(f"{_flag(name)} means something with a command behind -- alone")
    _require_distinct({name: path for name in FILES if (path := getattr(options, name))})
    return options


def _require_distinct(files: Mapping[str, Path]) -> None:
    """Returns if no report would be written over another; else UsageError."""
    by_path: dict[Path, str] = {}
    for name, path in files.items():
        if path in by_path:
            both = f"{_flag(by_path[path])} and {_flag(name)}"
            raise UsageError(f"{both} are both {path}; give two files")
        by_path[path] = name


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """What is this command's own, and the command behind `--`; UsageError if there is none."""
    if "--" not in arguments:
        return arguments, ()
    place = list(arguments).index("--")
    if place == len(arguments) - 1:
        raise UsageError("after -- comes the command that trains: -- torchrun ... my_train.py")
    return arguments[:place], tuple(arguments[place + 1 :])


def _mode(name: str) -> str:
    return "a command behind --" if name == "command" else f"--{name}"


def reference() -> str:
    """The command line reference, as Markdown: what docs/cli.md holds."""
    codes, _, examples = EPILOG.partition("\n\nexamples:\n")
    parts = [
        f"# `{PROG}`",
        f"`{PROG} --contract FILE [options] [-- COMMAND ...]`",
        "Generated from `entrenar_py.options`; a test says whether this page is current.",
    ]
    for group in parser()._action_groups:
        rows = [_row(action) for action in group._group_actions if action.dest != "help"]
        if rows:
            parts += [f"## {(group.title or '').capitalize()}", _table("option", rows)]
    meant = [
        (
            "`-- COMMAND`" if mode == "command" else f"`--{mode}`",
            ", ".join(map(_option, MODES[mode])),
        )
        for mode in MODES
    ]
    parts += [
        "## Options that go together",
        "Any other option means nothing beside these and is refused, with exit code 2.",
        _table("with", meant),
        "## Exit codes",
        "The same whatever the output format.",
        _table("code", [line.strip().split("  ", 1) for line in codes.splitlines()[1:]]),
        "## Examples",
        "\n".join(["```", *(line.strip() for line in examples.splitlines()), "```"]),
    ]
    return "\n\n".join(parts) + "\n"


def _row(action: argparse.Action) -> tuple[str, str]:
    metavar = f" {action.metavar}" if action.metavar else ""
    metavar += f" [{action.metavar} ...]" if action.nargs == "+" else ""
    return ", ".join(f"`{name}{metavar}`" for name in action.option_strings), action.help or ""


def _option(name: str) -> str:
    return f"`{_flag(name)}`"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _table(title: str, rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {title} | meaning |", "|---|---|"]
    return "\n".join([*lines, *(f"| {left} | {right} |" for left, right in rows)])


def _add_selection(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--only", metavar="ID[,ID]", type=_words, default=(), help="these alone")
    group.add_argument(
        "--exclude", metavar="ID[,ID]", type=_words, default=(), help="all but these"
    )
    group.add_argument(
        "--severity", metavar="P0[,P1]", type=_severities, default=(), help="of these severities"
    )


def _add_runs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--system",
        metavar="NAME",
        help="the trainer, instead of the contract's: reference, textbook; one with real "
        "processes over TCP (parameter_server, mesh, ring) or the same in virtual time "
        "(parameter_server_simulated, mesh_simulated, ring_simulated); torch's own (ddp, "
        "ddp_canonical, fsdp, tensor_parallel, sequence_parallel, pipeline_parallel, local_sgd)",
    )
    group.add_argument(
        "--world-size",
        metavar="N[,N]",
        type=_counts,
        default=(),
        help="numbers of workers, instead of the contract's",
    )
    group.add_argument(
        "--backend",
        metavar="NAME[,NAME]",
        type=_words,
        default=(),
        help="the workers' backends in turn: cpu, wgpu, cuda, auto (what serves); wgpu:1 and "
        "cuda:1 are the second adapter and GPU",
    )
    group.add_argument(
        "--seed", metavar="N", type=_natural, default=0, help="added to every seed (default 0)"
    )
    group.add_argument(
        "--examples",
        metavar="N",
        type=_natural,
        default=20,
        help="random scenarios to explore per invariant (default 20)",
    )
    group.add_argument(
        "--timeout", metavar="S", type=_seconds, help="start no new run after S seconds"
    )
    group.add_argument(
        "--deadline",
        metavar="S",
        type=_seconds,
        default=300.0,
        help="end each run of a command after S seconds (default 300)",
    )
    group.add_argument(
        "--steps",
        metavar="N",
        type=lambda text: _natural(text, least=1),
        default=8,
        help="what {steps} stands for in a command: optimizer steps of a run (default 8)",
    )
    group.add_argument(
        "-x", dest="stop_early", action="store_true", help="stop at the first falsified invariant"
    )
    group.add_argument(
        "--allow-inconclusive", action="store_true", help="exit 0 instead of 4 if nothing broke"
    )


def _add_modes(group: argparse._ArgumentGroup) -> None:
    modes = group.add_mutually_exclusive_group()
    modes.add_argument("--list", action="store_true", help="list the contract's invariants")
    modes.add_argument("--validate", action="store_true", help="only validate the contract")
    modes.add_argument(
        "--judge",
        metavar="TRACE",
        nargs="+",
        type=Path,
        help="judge stored traces by --contract, run nothing: files, folders or patterns of them, "
        "or the files of a run's ranks",
    )
    modes.add_argument(
        "--replay", metavar="FILE", type=Path, help="run a saved counterexample of --contract"
    )
    modes.add_argument(
        "--mutants", action="store_true", help="plant every known bug and print what kills it"
    )
    group.add_argument("--strict", action="store_true", help="the contract's warnings are errors")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", metavar="FILE", type=Path, help="write the report as JSON")
    group.add_argument("--junit", metavar="FILE", type=Path, help="write the report as JUnit XML")
    group.add_argument(
        "--sarif", metavar="FILE", type=Path, help="write the report as SARIF, for code scanning"
    )
    group.add_argument(
        "--html", metavar="FILE", type=Path, help="write the report as one page for browsers"
    )
    group.add_argument(
        "--github",
        action="store_true",
        help="in a step of a GitHub workflow: annotations, and a step summary",
    )
    group.add_argument("--trace-dir", metavar="DIR", type=Path, help="keep every run's trace here")
    group.add_argument("--quiet", action="store_true", help="show only what did not hold")
    group.add_argument("--no-color", action="store_true", help="no colours")


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return words


def _severities(text: str) -> tuple[str, ...]:
    words = _words(text)
    if not set(words) <= {"P0", "P1", "P2"}:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are P0, P1, P2")
    return words


def _natural(text: str, *, least: int = 0) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number from {least} to 10^18 - 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_natural(word, least=1) for word in _words(text))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: use a number of seconds > 0")
    return seconds
