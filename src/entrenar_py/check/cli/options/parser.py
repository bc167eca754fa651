"""The options of `entrenar-check`: their spelling, help texts and defaults."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import entrenar_py
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.page import values

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
  entrenar-check --contract my-contract.yaml --validate --strict --rule SCHEMA-009=off
  entrenar-check -- torchrun --nproc_per_node=2 my_train.py
  entrenar-check init -- torchrun --nproc_per_node=2 my_train.py
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
        "       %(prog)s init [-- COMMAND ...]",
        description="Tries to falsify a distributed trainer against a written contract. What the "
        "command line leaves out is read from the project's configuration, which `init` writes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cli.add_argument("--version", action="version", version=f"%(prog)s {entrenar_py.__version__}")
    add = partial(_add, cli)
    named = (
        "a YAML contract: a path, or the name of a shipped one; may be given again; a command is "
        "checked by distributed-training-v1.yaml and training-integrity-v1.yaml if none is given"
    )
    add("--contract FILE", named, action="append")
    bindings = (
        "bindings of the contract's statements to checks, besides those in NAME.bindings.yaml next "
        "to it; may be given again"
    )
    add("--bind FILE", bindings, action="append", type=Path, default=())
    _add_configuration(cli.add_mutually_exclusive_group())
    _add_selection(cli.add_argument_group("which invariants"))
    _add_runs(cli.add_argument_group("how they are tried"))
    _add_modes(cli.add_argument_group("instead of a full run"))
    _add_output(cli.add_argument_group("output"))
    return cli


def flag(name: str) -> str:
    """Return the option `name` as it is typed: `--trace-dir` for `trace_dir`."""
    return f"--{name.replace('_', '-')}"


def _add(group: argparse._ActionsContainer, option: str, meaning: str, **settings: Any) -> None:
    """Add an option: `--seed N` takes a value shown as N in the help, `--list` takes none."""
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
    add("--only ID[,ID]", "only the invariants with these ids", type=values.words)
    add("--exclude ID[,ID]", "all invariants but these", type=values.words)
    add("--severity P0[,P1]", "only invariants of these severities", type=values.severities)


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
    add("--world-size N[,N]", workers, type=values.counts, default=())
    backends = (
        "the workers' backends in turn: cpu, wgpu, cuda, auto (a GPU, else cpu); wgpu:1 and cuda:1 "
        "are the second adapter and GPU"
    )
    add("--backend NAME[,NAME]", backends, type=values.words, default=())
    add("--seed N", "added to every seed (default 0)", type=values.natural, default=0)
    examples = "random scenarios to explore per invariant (default 20)"
    add("--examples N", examples, type=values.natural, default=20)
    add("--timeout S", "start no new run after S seconds", type=values.seconds)
    auto = (
        "observe a command whose script doesn't call observe(); without {steps} or {epochs} in the "
        "command, each run ends after --steps optimizer steps"
    )
    add("--auto", auto)
    deadline = "end each run of a command after S seconds (default 300)"
    add("--deadline S", deadline, type=values.seconds, default=300.0)
    steps = "the value of {steps} in a command: optimizer steps of a run (default 8)"
    add("--steps N", steps, type=lambda text: values.natural(text, least=1), default=8)
    epochs = "the value of {epochs} in a command: epochs of a run (default 2)"
    add("--epochs N", epochs, type=lambda text: values.natural(text, least=1), default=2)
    own = "run a command in this folder itself, instead of in a copy of it for each run"
    add("--in-place", own)
    launcher = (
        "forked: the processes of torchrun and accelerate launch are forked from one that has "
        "imported torch, where that makes no difference (default); as-is: each is started anew"
    )
    add("--launcher KIND", launcher, choices=("forked", "as-is"), default="forked")
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
    levels = (
        "the level of a rule in --validate (docs/contract-rules.md): off, info, warning, error; "
        "may be given again"
    )
    _add(group, "--rule ID=LEVEL", levels, action="append", default=())
    aside = (
        "suppress findings of --validate: 'RULE [in ITEM or FILE] until YYYY-MM-DD: REASON'; may "
        "be given again"
    )
    _add(group, "--suppress TEXT", aside, action="append", default=())


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
