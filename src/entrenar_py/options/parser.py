"""The options of `entrenar-check`: how each is written, what it means, what it defaults to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

import entrenar_py
from entrenar_py.errors import UsageError
from entrenar_py.options import values

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
  entrenar-check --contract distributed-training-v1.yaml -- \\
      torchrun --nproc_per_node={world_size} my_train.py
  entrenar-check init -- torchrun --nproc_per_node=2 my_train.py
  entrenar-check
"""


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError, where argparse's own prints the usage and leaves."""

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
    group.add_argument(
        "--only", metavar="ID[,ID]", type=values.words, default=(), help="these alone"
    )
    group.add_argument(
        "--exclude", metavar="ID[,ID]", type=values.words, default=(), help="all but these"
    )
    group.add_argument(
        "--severity",
        metavar="P0[,P1]",
        type=values.severities,
        default=(),
        help="of these severities",
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
        type=values.counts,
        default=(),
        help="numbers of workers, instead of the contract's",
    )
    group.add_argument(
        "--backend",
        metavar="NAME[,NAME]",
        type=values.words,
        default=(),
        help="the workers' backends in turn: cpu, wgpu, cuda, auto (a GPU, else cpu); wgpu:1 and "
        "cuda:1 are the second adapter and GPU",
    )
    group.add_argument(
        "--seed",
        metavar="N",
        type=values.natural,
        default=0,
        help="added to every seed (default 0)",
    )
    group.add_argument(
        "--examples",
        metavar="N",
        type=values.natural,
        default=20,
        help="random scenarios to explore per invariant (default 20)",
    )
    group.add_argument(
        "--timeout", metavar="S", type=values.seconds, help="start no new run after S seconds"
    )
    group.add_argument(
        "--deadline",
        metavar="S",
        type=values.seconds,
        default=300.0,
        help="end each run of a command after S seconds (default 300)",
    )
    group.add_argument(
        "--steps",
        metavar="N",
        type=lambda text: values.natural(text, least=1),
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
