"""The command `entrenar-check`: reads the command line, calls the harness, renders, exits.

Exit codes: 0 held · 1 falsified · 2 contract or command line invalid, nothing ran · 3 the harness
itself failed · 4 inconclusive · 5 nothing selected.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import entrenar_py
from entrenar_py.errors import ContractError, EntrenarError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from entrenar_py.contract import Contract
    from entrenar_py.falsify import Plan
    from entrenar_py.reports.report import Entry, Report
    from entrenar_py.trace import Trace

EXIT_INVALID = 2
EXIT_HARNESS = 3

EPILOG = """\
exit codes:
  0  every selected invariant held, each with comparisons made
  1  an invariant was falsified
  2  the contract or the command line is invalid; nothing ran
  3  the harness itself failed
  4  inconclusive: something could not be compared (--allow-inconclusive makes it 0)
  5  nothing was selected

examples:
  entrenar-check --contract distributed-training-v1.yaml
  entrenar-check --contract distributed-training-v1.yaml --only F-DP-005 --examples 500
  entrenar-check --contract my-contract.yaml --validate --strict
"""


def parser() -> argparse.ArgumentParser:
    """The command line, every option of it."""
    cli = argparse.ArgumentParser(
        prog="entrenar-check",
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
    _add_modes(cli.add_argument_group("instead of running"))
    _add_output(cli.add_argument_group("output"))
    return cli


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
        "--system", default="reference", help="the trainer: reference (default) or textbook"
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
        help="the workers' backends in turn: cpu, wgpu, cuda",
    )
    group.add_argument("--seed", type=_natural, default=0, help="added to every seed (default 0)")
    group.add_argument(
        "--examples",
        metavar="N",
        type=_natural,
        default=20,
        help="random scenarios to explore per invariant (default 20)",
    )
    group.add_argument(
        "--timeout", metavar="S", type=_seconds, help="stop starting new runs after S seconds"
    )
    group.add_argument("-x", dest="stop_early", action="store_true", help="stop at the first break")
    group.add_argument(
        "--allow-inconclusive", action="store_true", help="exit 0 instead of 4 if nothing broke"
    )


def _add_modes(group: argparse._ArgumentGroup) -> None:
    modes = group.add_mutually_exclusive_group()
    modes.add_argument("--list", action="store_true", help="list the contract's invariants")
    modes.add_argument("--validate", action="store_true", help="only validate the contract")
    modes.add_argument(
        "--judge", metavar="TRACE", nargs="+", type=Path, help="judge stored traces, run nothing"
    )
    modes.add_argument("--replay", metavar="FILE", type=Path, help="run a saved counterexample")
    modes.add_argument(
        "--mutants", action="store_true", help="plant every known bug and print what kills it"
    )
    group.add_argument("--strict", action="store_true", help="the contract's warnings are errors")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", metavar="FILE", type=Path, help="write the report as JSON")
    group.add_argument("--junit", metavar="FILE", type=Path, help="write the report as JUnit XML")
    group.add_argument("--trace-dir", metavar="DIR", type=Path, help="keep every run's trace")
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


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number >= 0")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(_natural(word) for word in _words(text))
    if 0 in counts:
        raise argparse.ArgumentTypeError(f"{text!r}: a run needs at least 1 worker")
    return counts


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: use a number of seconds > 0")
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(arguments)
    try:
        return _run(options, arguments)
    except ContractError as error:
        print(error, file=sys.stderr)
        return EXIT_INVALID
    except UsageError as error:
        print(f"entrenar-check: {error}", file=sys.stderr)
        return EXIT_INVALID
    except BrokenPipeError:  # the reader (head, less) has gone: not ours to report
        sys.stderr.close()
        return EXIT_HARNESS
    except EntrenarError as error:
        print(f"entrenar-check: {error}", file=sys.stderr)
        return EXIT_HARNESS
    except Exception:  # noqa: BLE001  (Python's own exit code would be 1: "falsified")
        traceback.print_exc()
        print("entrenar-check: the harness itself failed; this is a bug in it", file=sys.stderr)
        return EXIT_HARNESS


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from rich.console import Console

    console = Console(no_color=options.no_color or None, highlight=False)
    if options.mutants:
        return _mutants(console)
    if options.contract is None:
        raise UsageError("--contract FILE is missing; shipped are " + _shipped_names())
    contract = _load(options)
    if options.validate:
        console.print(f"{contract.name}: valid, {len(contract.invariants)} invariants")
        return 0
    if options.list:
        return _list(contract, console)
    return _falsify(options, arguments, contract, console)


def _shipped_names() -> str:
    from entrenar_py import shipped

    return ", ".join(path.name for path in shipped.shipped_contracts())


def _load(options: argparse.Namespace) -> Contract:
    from entrenar_py import checks, contract, shipped

    loaded = contract.load(
        shipped.contract_path(options.contract),
        covers=lambda invariant: checks.bind(invariant) is not None,
        strict=options.strict,
    )
    for warning in loaded.warnings:
        print(warning, file=sys.stderr)
    return loaded


def _list(contract: Contract, console: Console) -> int:
    from rich.table import Table

    from entrenar_py import checks

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("id", "name", "severity", "check", "place"):
        table.add_column(title, overflow="fold")
    for invariant in contract.invariants:
        check = checks.bind(invariant)
        place = f"{contract.name}:{invariant.position.line}"
        name = check.name if check else "none"
        table.add_row(invariant.id, invariant.name, invariant.severity, name, place)
    console.print(table)
    return 0


def _mutants(console: Console) -> int:
    from entrenar_py import kill_matrix

    return kill_matrix.show(console)


def _falsify(
    options: argparse.Namespace, arguments: Sequence[str], contract: Contract, console: Console
) -> int:
    from entrenar_py import falsify
    from entrenar_py.reports import json_format, junit, terminal

    plan = _plan(options)
    selected = falsify.select(
        contract, only=options.only, exclude=options.exclude, severities=options.severity
    )
    if options.judge is None and options.replay is None:
        falsify.require_runnable(selected, plan)
    entries: list[Entry] = []
    started = time.monotonic()
    interrupted = False
    with terminal.Progress(console) as progress:
        try:
            if options.replay is not None:
                entries.append(falsify.replay(contract, options.replay))
            elif options.judge is not None:
                entries += falsify.judge_stored(selected, _traces(options.judge))
            else:
                entries.extend(
                    falsify.falsify(
                        contract,
                        selected,
                        plan,
                        on_progress=progress.show,
                        stop_early=options.stop_early,
                    )
                )
        except KeyboardInterrupt:
            interrupted = True
    report = _report(options, arguments, contract, entries, started, interrupted)
    terminal.render(report, console, quiet=options.quiet)
    allowed: bool = options.allow_inconclusive
    if options.json is not None:
        json_format.write(report, options.json)
    if options.junit is not None:
        junit.write(report, options.junit, allow_inconclusive=allowed)
    return report.exit_code(allow_inconclusive=allowed)


def _plan(options: argparse.Namespace) -> Plan:
    from entrenar_py import falsify
    from entrenar_py.backends import BACKENDS
    from entrenar_py.reports import output_file

    for path, option in ((options.json, "--json"), (options.junit, "--junit")):
        if path is not None:
            output_file.require_writable(path, option)
    if options.trace_dir is not None:
        output_file.require_writable(options.trace_dir / "trace.jsonl", "--trace-dir")
    if options.system not in falsify.TRAINERS:
        allowed = ", ".join(falsify.TRAINERS)
        raise UsageError(f"--system {options.system!r}: allowed are {allowed}")
    for backend in options.backend:
        if backend not in BACKENDS:
            raise UsageError(f"--backend {backend!r}: allowed are {', '.join(BACKENDS)}")
    return falsify.Plan(
        system=options.system,
        world_sizes=options.world_size,
        backends=options.backend,
        seed=options.seed,
        num_examples=options.examples,
        timeout_s=options.timeout,
        trace_folder=options.trace_dir,
    )


def _traces(paths: Sequence[Path]) -> list[Trace]:
    from entrenar_py import trace

    return [trace.load(path) for path in paths]


def _report(
    options: argparse.Namespace,
    arguments: Sequence[str],
    contract: Contract,
    entries: Sequence[Entry],
    started: float,
    interrupted: bool,
) -> Report:
    from entrenar_py.reports.report import Report
    from entrenar_py.systems import environment

    return Report(
        contract=contract,
        contract_given=options.contract,
        system=options.system,
        seed=options.seed,
        entries=tuple(entries),
        environment=environment.describe(),
        elapsed_s=time.monotonic() - started,
        interrupted=interrupted,
        command=shlex.join(("entrenar-check", *arguments)),
    )


if __name__ == "__main__":
    sys.exit(main())
