"""The command line of `entrenar-check` as data: its options, and which of them may be combined.

The module imports nothing heavy, so that `--help` is instant. If an option is missing, the key of
the same name in the project's configuration applies, parsed as the option is.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import entrenar_py
from entrenar_py.check.project import toml_file
from entrenar_py.shared import package_data
from entrenar_py.shared.errors import ContractError, EntrenarError, UsageError
from entrenar_py.shared.page import arguments

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
  entrenar-check --contract my-contract.yaml --validate --strict --suppress SCHEMA-009
  entrenar-check -- torchrun --nproc_per_node=2 my_train.py
  entrenar-check init -- torchrun --nproc_per_node=2 my_train.py
  entrenar-check diff 'python old.py' 'python new.py'
  entrenar-check anatomy -- torchrun --nproc_per_node=2 my_train.py
  entrenar-check
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {PROG} --help")


def build() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    cli = Parser(
        prog=PROG,
        usage="%(prog)s [--contract FILE] [options] [-- COMMAND ...]\n"
        "       %(prog)s init [-- COMMAND ...]\n"
        "       %(prog)s diff [options] A B\n"
        "       %(prog)s anatomy [options] -- COMMAND ...",
        description="Tries to falsify a distributed trainer against a written contract. "
        "Options that the command line omits are read from the project's "
        "configuration, which `init` writes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cli.add_argument("--version", action="version", version=f"%(prog)s {entrenar_py.__version__}")
    add = partial(_add, cli)
    named = (
        "a YAML contract: a path, or the name of a shipped one; may be given "
        "several times; a command is checked by distributed-training-v1.yaml and "
        "training-integrity-v1.yaml if none is given"
    )
    add("--contract FILE", named, action="append")
    bindings = (
        "bindings of the contract's statements to checks, besides those in "
        "NAME.bindings.yaml next to it; may be given several times"
    )
    add("--bind FILE", bindings, action="append", type=Path, default=())
    _add_configuration(cli.add_mutually_exclusive_group())
    _add_selection(cli.add_argument_group("which invariants"))
    _add_runs(cli.add_argument_group("how clauses are tried"))
    _add_modes(cli.add_argument_group("instead of a full run"))
    _add_output(cli.add_argument_group("output"))
    return cli


def flag(name: str) -> str:
    """Return the option `name` as a user types it: `--trace-dir` for `trace_dir`."""
    return f"--{name.replace('_', '-')}"


def _add(group: argparse._ActionsContainer, option: str, meaning: str, **settings: Any) -> None:
    name, _, metavar = option.partition(" ")
    kind: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
    group.add_argument(name, help=meaning, **kind, **settings)


def _add_configuration(group: argparse._ActionsContainer) -> None:
    nearest = (
        "the configuration, instead of the nearest [tool.entrenar-check] in pyproject.toml, or "
        "entrenar-check.toml, in this folder or above it"
    )
    _add(group, "--config FILE", nearest, type=Path)
    _add(group, "--no-config", "use no configuration")


def _add_selection(group: argparse._ActionsContainer) -> None:
    add = partial(_add, group, default=())
    add("--only ID[,ID]", "only the invariants with these ids", type=arguments.words)
    add("--exclude ID[,ID]", "all invariants except these", type=arguments.words)
    add("--severity P0[,P1]", "only invariants of these severities", type=arguments.severities)


def _add_runs(group: argparse._ActionsContainer) -> None:
    add = partial(_add, group)
    trainers = (
        "the trainer, instead of the contract's: reference, textbook; one with real processes over "
        "TCP (parameter_server, mesh, ring) or the same in virtual time "
        "(parameter_server_simulated, mesh_simulated, ring_simulated); torch's own (ddp, "
        "ddp_canonical, fsdp, tensor_parallel, sequence_parallel, pipeline_parallel, local_sgd)"
    )
    add("--system NAME", trainers)
    workers = "numbers of workers, instead of the contract's"
    add("--world-size N[,N]", workers, type=arguments.counts, default=())
    backends = (
        "backends, given to the workers in turn: cpu, wgpu, cuda, auto (a GPU, else cpu); wgpu:1 "
        "and cuda:1 are the second adapter and GPU"
    )
    add("--backend NAME[,NAME]", backends, type=arguments.words, default=())
    add("--seed N", "added to every seed (default 0)", type=arguments.natural, default=0)
    examples = "random scenarios to explore per invariant (default 20)"
    add("--examples N", examples, type=arguments.natural, default=20)
    add("--timeout S", "start no new run after S seconds", type=arguments.seconds)
    auto = (
        "observe a command even if its script doesn't call observe(), which is the default if no "
        "line does; without {steps} or {epochs} each run ends after --steps optimizer steps"
    )
    add("--auto", auto)
    deadline = "end each run of a command after S seconds (default 300)"
    add("--deadline S", deadline, type=arguments.seconds, default=300.0)
    steps = "the value of {steps} in a command: optimizer steps of a run (default 8)"
    add("--steps N", steps, type=lambda text: arguments.natural(text, least=1), default=8)
    epochs = "the value of {epochs} in a command: epochs of a run (default 2)"
    add("--epochs N", epochs, type=lambda text: arguments.natural(text, least=1), default=2)
    own = "run a command in this folder itself, instead of in a copy of it for each run"
    add("--in-place", own)
    launcher = (
        "forked: the processes of torchrun and accelerate launch are forked from a process that "
        "has imported torch, if a script can't tell the difference (default); as-is: each is a "
        "new process"
    )
    add("--launcher KIND", launcher, choices=("forked", "as-is"), default="forked")
    again = "only what the last call falsified; its runs are judged again, unless anything changed"
    add("--last-failed", again)
    add("-x", "stop at the first falsified invariant", dest="stop_early")
    add("--allow-inconclusive", "exit 0 instead of 4 if nothing broke")


def _add_modes(group: argparse._ArgumentGroup) -> None:
    modes = group.add_mutually_exclusive_group()
    _add(modes, "--list", "list the contract's invariants")
    _add(modes, "--validate", "only validate the contract")
    _add(modes, "--suggest", "draft bindings, as guesses, for statements without a check")
    stored = (
        "judge stored traces by --contract, run nothing: files, folders or patterns of them, or "
        "the files of a run's ranks"
    )
    _add(modes, "--judge TRACE", stored, nargs="+", type=Path)
    _add(modes, "--replay FILE", "run a saved counterexample of --contract", type=Path)
    _add(modes, "--mutants", "plant every known bug and print the clauses that kill it")
    _add(group, "--strict", "treat the contract's warnings as errors")
    aside = "rules of --validate to ignore (docs/contract-rules.md)"
    _add(group, "--suppress RULE[,RULE]", aside, type=arguments.words, default=())


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = partial(_add, group)
    add("--json FILE", "write the report as JSON", type=Path)
    add("--junit FILE", "write the report as JUnit XML", type=Path)
    add("--sarif FILE", "write the report as SARIF, for code scanning", type=Path)
    add("--html FILE", "write the report as one page for browsers", type=Path)
    add("--github", "in a step of a GitHub workflow: annotations, and a step summary")
    add("--trace-dir DIR", "keep every run's trace here", type=Path)
    add("--quiet", "show only what did not hold")
    rows = "also show a row for each clause, the notes, the places in the contract, the environment"
    add("-v", rows, dest="verbose")
    add("--no-color", "no colours")


FILES = ("json", "junit", "sarif", "html")  # options that write a report to a file
_OUTPUTS = (*FILES, "trace_dir")
_CONTRACT_NAME = "{contract}"  # is replaced by the contract's name in the path of an output


def per_contract(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Return a copy of the options for each contract, with its path and its own output files."""
    copies = []
    for contract in options.contract:
        own = argparse.Namespace(**vars(options))
        own.contract = contract
        for name in _OUTPUTS:
            path = getattr(options, name)
            if path is not None:
                setattr(own, name, Path(str(path).replace(_CONTRACT_NAME, _stem(contract))))
        copies.append(own)
    return copies


def require_distinct(options: argparse.Namespace) -> None:
    """Raise UsageError if an output would overwrite another output or a file that is read."""
    read = [(name, path) for name in ("contract", "bind") for path in getattr(options, name)]
    single = ("config", "replay", *_OUTPUTS)
    outputs = [(name, path) for name in single if (path := getattr(options, name)) is not None]
    by_path: dict[Path, str] = {}
    for name, path in (*read, *outputs):
        other = by_path.setdefault(Path(path).absolute(), name)
        if other != name and name in _OUTPUTS:
            message = f"{flag(other)} and {flag(name)} are both {path}; give two files"
            raise UsageError(message, field=name)
    _require_apart(options)


def _require_apart(options: argparse.Namespace) -> None:
    """Raise UsageError if one contract's report would overwrite another's."""
    # Validation writes one report for all.
    if len(options.contract) < 2 or options.mode == "validate":
        return
    stems = [_stem(contract) for contract in options.contract]
    for name in _OUTPUTS:
        path = getattr(options, name)
        if path is None:
            continue
        if _CONTRACT_NAME not in str(path):
            raise UsageError(
                f"{flag(name)} {path}: {len(stems)} contracts need a report each; give a path "
                f"with {_CONTRACT_NAME}, which is replaced by the contract's name",
                field=name,
            )
        if len(set(stems)) < len(stems):
            raise UsageError(
                f"{flag(name)} {path}: two contracts have the same name ({', '.join(stems)}); "
                "rename one, or check them one by one",
                field=name,
            )


def _stem(contract: str) -> str:
    return Path(contract).name.removesuffix(".yaml").removesuffix(".yml")


# Options that have an effect only with a user's command after --.
COMMANDED = ("steps", "epochs", "deadline", "auto", "in_place", "launcher", "last_failed")
# Option that has an effect only in one mode -> description of that mode.
ALONE = {
    **dict.fromkeys(COMMANDED, "a command after --"),
    "suppress": "--validate",
}

_CONTRACT = ("contract", "bind", "strict", "no_color")
_CONFIGURED = ("config", "no_config")
_SELECTION = ("only", "exclude", "severity")
_REPORT = (*FILES, "github", "allow_inconclusive", "quiet", "verbose")
_VARIATION = ("system", "world_size", "backend", "seed")

# Mode -> its options; all others are refused. A mode replaces the search for counterexamples.
# Without a mode, every option is allowed except those in ALONE.
MODES: dict[str, tuple[str, ...]] = {
    "list": (*_CONTRACT, *_CONFIGURED, *_SELECTION),
    "validate": (*_CONTRACT, "json", "sarif", "github", *_CONFIGURED, "suppress"),
    "suggest": (*_CONTRACT, *_CONFIGURED),
    "judge": (*_CONTRACT, *_CONFIGURED, *_SELECTION, *_VARIATION, *_REPORT),
    "replay": (*_CONTRACT, "trace_dir", *_CONFIGURED, *_REPORT),
    "mutants": ("no_color",),
    "command": (
        *(*_CONTRACT, "world_size", "seed", *COMMANDED, "trace_dir"),
        *(*_CONFIGURED, *_SELECTION, *_REPORT),
    ),
}


def require_compatible(options: argparse.Namespace, *, mode: str = "") -> None:
    """Raise UsageError if an option that was typed has no effect with the other options.

    Messages call the mode `mode`; "" means the option that set `options.mode`.
    """
    for action in build()._actions:
        name, option = action.dest, action.option_strings[0]
        if name not in options.typed:
            continue
        if options.mode is None:
            if name in ALONE:
                raise UsageError(f"{option} has an effect only with {ALONE[name]}; leave it out")
        elif name not in (options.mode, *MODES[options.mode]):
            other = mode or _described(options.mode)
            raise UsageError(f"{option} has no effect with {other}; leave it out")
    if options.command and options.mode != "command":
        raise UsageError(f"a command after -- has no effect with --{options.mode}; leave it out")


def _described(mode: str) -> str:
    return "a command after --" if mode == "command" else f"--{mode}"


def read(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options as typed, without checking whether they may be combined.

    `mode` is a key of MODES, or None. `typed` has the names of the options that were typed. Raises
    UsageError for an unknown option and for an invalid value.
    """
    cli = build()
    own_arguments, command = split(arguments, cli)
    defaults = {action.dest: action.default for action in cli._actions}
    options = cli.parse_args(own_arguments, argparse.Namespace(**dict.fromkeys(defaults)))
    options.typed = frozenset(name for name, value in vars(options).items() if value is not None)
    for name, default in defaults.items():
        if name not in options.typed:
            setattr(options, name, default)
    options.contract = tuple(dict.fromkeys(options.contract or ()))
    options.command, options.command_folder, options.knobs = command, None, {}
    options.command_changes, options.last = (), None
    options.mode = next((name for name in MODES if getattr(options, name)), None)
    return options


def split(
    arguments: Sequence[str], cli: argparse.ArgumentParser
) -> tuple[Sequence[str], tuple[str, ...]]:
    """Return the arguments before `--`, which `cli` parses, and the command after it.

    Raises UsageError if no command follows `--`, or if a command was given without `--`.
    """
    place = list(arguments).index("--") if "--" in arguments else len(arguments)
    _require_options(arguments[:place], cli)
    if place == len(arguments):
        return arguments, ()
    if place == len(arguments) - 1:
        raise UsageError(
            "no command after --; write the command that trains: -- torchrun ... my_train.py"
        )
    return arguments[:place], tuple(arguments[place + 1 :])


def _require_options(arguments: Sequence[str], cli: argparse.ArgumentParser) -> None:
    """Raise UsageError if a word is neither an option of `cli` nor an option's value.

    Words after an unknown option are not checked, since the first may be its value.
    """
    values = {name: one.nargs for one in cli._actions for name in one.option_strings}
    at = 0
    while at < len(arguments):
        name, equals, _ = arguments[at].partition("=")
        if not name.startswith("-"):
            raise UsageError(_misplaced(arguments, at, cli.prog))
        if name not in values:
            return
        at += 1
        if not equals and values[name] is None:
            at += 1
        while values[name] == "+" and at < len(arguments) and arguments[at][:1] != "-":
            at += 1


def _misplaced(arguments: Sequence[str], at: int, prog: str) -> str:
    before, word, after = arguments[:at], arguments[at], arguments[at:]
    if word.endswith((".yaml", ".yml")):
        return f"{word}: a contract is given as --contract {word}"
    meant = f"{prog} {shlex.join((*before, '--', *after))}"
    return f"{word}: the training command goes after --, as in: {meant}"


# --- a configuration that supplies missing options ------------------------------------------------


SUMMARY = "GITHUB_STEP_SUMMARY"  # set in a GitHub workflow; without it `github` has no effect
# This option chooses a trainer of this package instead of the configuration's command.
_CHOOSES = "system"


def configured(typed: argparse.Namespace, folder: Path | None = None) -> argparse.Namespace:
    """Return `typed` with the configuration's values for options that were not typed.

    The configuration is the one that applies in `folder`, by default the current folder.

    - `project` is set to the configuration, or None.
    - `used` is set to the configuration's keys that have an effect in this call.
    - `overruled` is set to the configuration's keys that the command line replaced.

    If no contract is named for a command or for stored runs, both contracts for scripts are used.
    Raises ContractError for an invalid configuration, and UsageError for options that can't be
    combined.
    """
    typed.project, typed.used, typed.overruled = None, (), ()
    path = _path(typed, folder or Path.cwd())
    mode = ""
    if path is not None:
        from entrenar_py.check.project import configuration

        typed.project = configuration.load(path)
        mode = _take_command(typed)
        _lay_below(typed)
    if typed.mode in ("command", "judge") and not typed.contract:
        typed.contract = package_data.FOR_SCRIPTS
    folder = typed.trace_dir
    if len(typed.contract) > 1 and folder is not None and _CONTRACT_NAME not in str(folder):
        typed.trace_dir = folder / _CONTRACT_NAME
    try:
        require_compatible(typed, mode=mode)
        require_distinct(typed)
    except UsageError as error:
        raise located(error, typed) from error
    return typed


def _take_command(typed: argparse.Namespace) -> str:
    """Use the configuration's command unless a mode was typed.

    Return its name for messages, or "".
    """
    project = typed.project
    if not project.command or typed.mode is not None or _CHOOSES in typed.typed:
        return ""
    typed.mode, typed.command, typed.command_folder = "command", project.command, project.folder
    typed.knobs = project.knobs
    return (
        f"the command of {project.place} (--system NAME tries a trainer of entrenar-py "
        "instead, --no-config goes without the configuration)"
    )


def located(error: UsageError, options: argparse.Namespace) -> EntrenarError:
    """Return `error`. If the wrong value is from the configuration, add the value's place."""
    if error.field.replace("_", "-") not in options.used:
        return error
    return ContractError([f"{options.project.places[error.field]}: error: {error}"])


def _path(typed: argparse.Namespace, folder: Path) -> Path | None:
    if typed.no_config or typed.mode == "mutants":
        return None
    config: Path | None = typed.config
    if config is None:
        return toml_file.find(folder)
    if not config.is_file():
        problem = "it is not a regular file" if config.exists() else "no such file"
        raise UsageError(f"--config {config}: {problem}; give a TOML file")
    return config.absolute()


def _lay_below(typed: argparse.Namespace) -> None:
    """Set the configuration's options that were not typed and have an effect in this mode."""
    project, mode = typed.project, typed.mode
    used: list[str] = []
    overruled: list[str] = []
    if project.command and mode in (None, "command"):
        keys = overruled if typed.command_folder is None else used
        keys += ["command", *(["knobs"] if project.knobs else [])]
    for name, value in project.values.items():
        if not _has_effect(name, mode):
            continue
        if name in typed.typed:
            overruled.append(name)
        else:
            used.append(name)
            setattr(typed, name, value)
    parts = {
        "exclude": project.exclusions if mode not in ("validate", "replay") else (),
        "accept": project.acceptances if mode not in ("validate", "list", "suggest") else (),
    }
    used += [name for name, part in parts.items() if part]
    typed.used = tuple(name.replace("_", "-") for name in used)
    typed.overruled = tuple(name.replace("_", "-") for name in overruled)


def _has_effect(name: str, mode: str | None) -> bool:
    if mode == "validate" and name in FILES:  # the configured files are for the reports of runs
        return False
    if name == "github" and not os.environ.get(SUMMARY):
        return False
    return name in MODES[mode] if mode else name not in ALONE
