"""The options of `entrenar-check`: how they are written, which belong together, their reference.

Imports nothing heavy, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import entrenar_py
from entrenar_py.errors import UsageError

PROG = "entrenar-check"

CONTRACT = "{contract}"  # in the path of an output: the contract's name

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
  entrenar-check --contract my-contract.yaml --validate --strict --rule SCHEMA-009=off
  entrenar-check --contract distributed-training-v1.yaml -- \\
      torchrun --nproc_per_node={world_size} my_train.py
  entrenar-check init -- torchrun --nproc_per_node=2 my_train.py
  entrenar-check
"""

_CONTRACT = ("contract", "bind", "strict", "no_color")
_SELECTION = ("only", "exclude", "severity")
FILES = ("json", "junit", "sarif", "html")  # a report may be written as
_REPORT = (*FILES, "github", "allow_inconclusive", "quiet")
_VARIATION = ("system", "world_size", "backend", "seed")

COMMANDED = ("steps", "deadline")  # of somebody's own command alone
_CONFIGURED = ("config", "no_config")
_OUTPUTS = (*FILES, "trace_dir")
_RULES = ("rule", "suppress")  # of validation alone

# What runs instead of the search -> the options that mean something then; all others are refused,
# because an option that is accepted and ignored lies. Without a mode every option counts.
MODES: dict[str, tuple[str, ...]] = {
    "list": (*_CONTRACT, *_CONFIGURED, *_SELECTION),
    "validate": (*_CONTRACT, "json", "sarif", "github", *_CONFIGURED, *_RULES),
    "suggest": (*_CONTRACT, *_CONFIGURED),
    "judge": (*_CONTRACT, *_CONFIGURED, *_SELECTION, *_VARIATION, *_REPORT),
    "replay": (*_CONTRACT, "trace_dir", *_CONFIGURED, *_REPORT),
    "mutants": ("no_color",),
    "command": (
        *(*_CONTRACT, "world_size", "seed", "steps", "deadline", "trace_dir"),
        *(*_CONFIGURED, *_SELECTION, *_REPORT),
    ),
}


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing the usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {PROG} --help")


def parser() -> argparse.ArgumentParser:
    """The command line, every option of it."""
    cli = Parser(
        prog=PROG,
        usage="%(prog)s [--contract FILE] [options] [-- COMMAND ...]\n"
        "       %(prog)s init [-- COMMAND ...]",
        description="Tries to falsify a distributed trainer against a written contract. What the "
        "command line leaves out is read from the project's configuration, which `init` writes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cli.add_argument("--version", action="version", version=f"%(prog)s {entrenar_py.__version__}")
    cli.add_argument(
        "--contract",
        metavar="FILE",
        action="append",
        help="a YAML contract: a path, or the name of a shipped one; of several each has a report",
    )
    cli.add_argument(
        "--bind",
        metavar="FILE",
        action="append",
        default=(),
        type=Path,
        help="bindings of the contract's statements to checks, besides those in "
        "NAME.bindings.yaml next to it; may be given again",
    )
    _add_configuration(cli.add_mutually_exclusive_group())
    _add_selection(cli.add_argument_group("which invariants"))
    _add_runs(cli.add_argument_group("how they are tried"))
    _add_modes(cli.add_argument_group("instead of running all that"))
    _add_output(cli.add_argument_group("output"))
    return cli


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, where there is no configuration; UsageError for what makes no sense."""
    options = read(arguments)
    require_sensible(options)
    return options


def read(arguments: Sequence[str]) -> argparse.Namespace:
    """The options as typed, each for itself; UsageError for one that is none.

    `mode` is a name in MODES, or None; `typed` are the names of those that were typed.
    """
    cli = parser()
    own, command = split(arguments)
    defaults = {action.dest: action.default for action in cli._actions}
    options = cli.parse_args(own, argparse.Namespace(**dict.fromkeys(defaults)))
    options.typed = frozenset(name for name, value in vars(options).items() if value is not None)
    for name, default in defaults.items():
        if name not in options.typed:
            setattr(options, name, default)
    options.contract = tuple(dict.fromkeys(options.contract or ()))
    options.command, options.command_folder, options.knobs = command, None, {}
    options.mode = next((name for name in MODES if getattr(options, name)), None)
    return options


def require_sensible(options: argparse.Namespace, *, mode: str = "") -> None:
    """Returns if the options that were typed go together; else UsageError.

    `mode` is what to call that of `options`, where no option of theirs says it.
    """
    for action in parser()._actions if options.mode is not None else ():
        name = action.dest
        if name in options.typed and name not in (options.mode, *MODES[options.mode]):
            told = mode or _mode(options.mode)
            raise UsageError(f"{action.option_strings[0]} means nothing with {told}; leave it out")
    if options.command and options.mode != "command":
        raise UsageError(f"a command behind -- means nothing with --{options.mode}; leave it out")
    for name in () if options.command else COMMANDED:
        if name in options.typed:
            raise UsageError(f"{flag(name)} means something with a command behind -- alone")
    for name in () if options.mode == "validate" else _RULES:
        if name in options.typed:
            raise UsageError(f"{flag(name)} means something with --validate alone")
    _require_distinct(options)
    _require_apart(options)


def of_each(options: argparse.Namespace) -> list[argparse.Namespace]:
    """The options of each contract's own report, `contract` and the paths being of this one."""
    found = []
    for contract in options.contract:
        own = argparse.Namespace(**vars(options))
        own.contract = contract
        for name in _OUTPUTS:
            path = getattr(options, name)
            if path is not None:
                setattr(own, name, Path(str(path).replace(CONTRACT, _stem(contract))))
        found.append(own)
    return found


def _require_apart(options: argparse.Namespace) -> None:
    """Returns if no contract's report would be written over another's; else UsageError."""
    if len(options.contract) < 2 or options.mode == "validate":  # which tells of all in one
        return
    stems = [_stem(contract) for contract in options.contract]
    for name in _OUTPUTS:
        path = getattr(options, name)
        if path is None:
            continue
        if CONTRACT not in str(path):
            raise UsageError(
                f"{flag(name)} {path}: each of {len(stems)} contracts has a report; put "
                f"{CONTRACT}, which stands for its name, into the path"
            )
        if len(set(stems)) < len(stems):
            raise UsageError(
                f"{flag(name)} {path}: two contracts have the same name ({', '.join(stems)}); "
                "rename one, or check them one by one"
            )


def _stem(contract: str) -> str:
    return Path(contract).name.removesuffix(".yaml").removesuffix(".yml")


def _require_distinct(options: argparse.Namespace) -> None:
    """Returns if no output would be written over another, or over what is read; else UsageError."""
    read = [(name, one) for name in ("contract", "bind") for one in getattr(options, name)]
    single = ("config", "replay", *_OUTPUTS)
    given = [(name, one) for name in single if (one := getattr(options, name)) is not None]
    by_path: dict[Path, str] = {}
    for name, path in (*read, *given):
        other = by_path.setdefault(Path(path).absolute(), name)
        if other != name and name in _OUTPUTS:
            raise UsageError(f"{flag(other)} and {flag(name)} are both {path}; give two files")


def split(arguments: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """Split off the command behind `--`; UsageError if none is there."""
    if "--" not in arguments:
        return arguments, ()
    place = list(arguments).index("--")
    if place == len(arguments) - 1:
        raise UsageError("after -- comes the command that trains: -- torchrun ... my_train.py")
    return arguments[:place], tuple(arguments[place + 1 :])


def _mode(name: str) -> str:
    return "a command behind --" if name == "command" else f"--{name}"


def flag(name: str) -> str:
    """Return what is typed for the option `name`."""
    return f"--{name.replace('_', '-')}"


def _add_configuration(group: argparse._MutuallyExclusiveGroup) -> None:
    group.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="the configuration, instead of the nearest [tool.entrenar-check] in pyproject.toml, "
        "or entrenar-check.toml, in this folder or above it",
    )
    group.add_argument("--no-config", action="store_true", help="go without a configuration")


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
        help="the workers' backends in turn: cpu, wgpu, cuda, auto (a GPU, else cpu); wgpu:1 and "
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
        "--suggest", action="store_true", help="draft bindings for what has no check, as guesses"
    )
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
    group.add_argument(
        "--rule",
        metavar="ID=LEVEL",
        action="append",
        default=(),
        help="how loudly --validate tells of a rule (docs/contract-rules.md): off, info, warning, "
        "error; may be given again",
    )
    group.add_argument(
        "--suppress",
        metavar="TEXT",
        action="append",
        default=(),
        help="put findings of --validate aside: 'RULE [in ITEM or FILE] until YYYY-MM-DD: REASON'; "
        "may be given again",
    )


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
