"""The command `entrenar-check`: read the command line, call the harness, report, exit.

Exit codes: 0 held · 1 falsified · 2 contract or command line invalid, nothing ran · 3 the harness
itself failed · 4 inconclusive · 5 no clause selected.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from entrenar_py.check.project import command_line
from entrenar_py.check.project.command_line import PROG, per_contract
from entrenar_py.shared import package_data, process
from entrenar_py.shared.errors import ContractError, EntrenarError, UsageError
from entrenar_py.shared.untrusted import printing

if TYPE_CHECKING:
    from entrenar_py.check.contract import Contract

INIT, DIFF, ANATOMY = "init", "diff", "anatomy"
EXIT_INVALID = 2
EXIT_HARNESS = 3
EXIT_INTERRUPTED = 4
# These signals interrupt this command, so that it can end the processes that it launched.
ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. `--help` and `--version` raise SystemExit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        process.begin()
    try:
        with (
            process.deferred_interrupts(numbers=ENDED_BY, for_good=argv is None),
            ExitStack() as opened,
        ):
            code = _run(arguments, opened)
        return EXIT_HARNESS if printing.lost() and code == 0 else code
    except SystemExit as left:  # --help, --version
        if printing.lost():
            raise SystemExit(EXIT_HARNESS) from left
        raise
    except KeyboardInterrupt:
        _say("interrupted before anything was known")
        return EXIT_INTERRUPTED
    except EntrenarError as error:
        _say(error)
        return EXIT_HARNESS
    except Exception:  # noqa: BLE001  (Python's own exit code would be 1: "falsified")
        printing.warn_lines(traceback.format_exc().rstrip())
        _say("the harness itself failed, which is a bug: report it, with the lines above")
        return EXIT_HARNESS


def _run(arguments: Sequence[str], opened: ExitStack) -> int:
    try:
        if arguments[:1] == [INIT]:
            from entrenar_py.check.project import init

            return init.run(arguments[1:])
        if arguments[:1] == [DIFF]:
            from entrenar_py.check.diff import command_line as diff

            return diff.run(arguments[1:])
        if arguments[:1] == [ANATOMY]:
            from entrenar_py.check.cli import anatomy

            return anatomy.run(arguments[1:])
        repeated = arguments
        if "--last-failed" in arguments:
            from entrenar_py.check.cli import last_failed

            repeated = last_failed.repeated(arguments)
        options = command_line.configured(command_line.read(repeated))
        try:
            if options.mode != "mutants":
                require_possible(options)
            if options.mode == "command":
                begin(options, opened)
            from entrenar_py.check.cli import session  # imports checks, reports and the search

            job = session.prepare(options, arguments)
        except UsageError as error:
            raise command_line.located(error, options) from error
    except ContractError as error:  # its message already has file:line:column
        printing.warn_lines(str(error))
        return EXIT_INVALID
    except UsageError as error:
        _say(error)
        return EXIT_INVALID
    return job()


def begin(options: argparse.Namespace, opened: ExitStack) -> None:
    """Set what follows from a command: its program, whether its script has the line, the last call.

    A process begins to import torch, and ends with `opened`.
    """
    from entrenar_py.check.command import launch, script_line, warm

    folder = options.command_folder or Path.cwd()
    options.command = launch.found(options.command, folder)
    if "auto" not in (*options.typed, *options.used):
        options.auto = not script_line.is_in(options.command, folder)
    if options.last_failed:
        from entrenar_py.check.cli import last_failed

        options.last = last_failed.read(last_failed.folder_of(options))
    options.parents = warm.of(options)
    opened.callback(options.parents.close)


def _say(message: object) -> None:
    printing.warn(f"{PROG}: {message}")


# --- checks of options and ids that need neither checks nor reports -------------------------------


def require_possible(options: argparse.Namespace) -> None:
    """Raise UsageError for an unknown system, backend, contract or clause id in the options.

    An invalid contract is reported later, with all its problems at once. A contract from a pipe is
    not checked here, since it can be read only once.
    """
    from entrenar_py.check import contract
    from entrenar_py.shared.systems import require_trainer

    unknown = contract.Vocabulary(checks=None, mutants=lambda: None)
    require_trainer(options.system, options.backend)
    contracts = []
    for own in each_contract(options):
        path = package_data.contract_path(own.contract)
        if not all(file.is_file() for file in (path, *own.bind)):
            return
        try:
            contracts.append(contract.load(path, vocabulary=unknown, bind=own.bind))
        except ContractError:
            return
    require_ids(options, contracts)


def require_ids(options: argparse.Namespace, contracts: Sequence[Contract]) -> dict[str, None]:
    """Return all clause ids of `contracts`.

    Raises UsageError for an id in the options that isn't one.
    """
    from entrenar_py.check.contract import records

    ids = {name: None for loaded in contracts for name in records.ids_of(loaded)}
    where = contracts[0].name if len(contracts) == 1 else "the contracts"
    records.require_ids(options.only, ids, where, field="only")
    records.require_ids(options.exclude, ids, where)
    return ids


def each_contract(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Return a copy of the options for each named contract, with only its own bindings.

    Raises UsageError if there is no contract, or if several would read bindings from one pipe.
    """
    from entrenar_py.check.contract import bindings

    if not options.contract:
        names = ", ".join(path.name for path in package_data.shipped_contracts())
        raise UsageError(
            f"--contract FILE is missing; shipped are {names}. No configuration was found either: "
            f"{PROG} init writes one"
        )
    calls = per_contract(options)
    for path in options.bind if len(calls) > 1 else ():
        if path.is_fifo():
            raise UsageError(
                f"--bind {path}: is a pipe, which can be read once, and {len(calls)} contracts "
                "need it; give a file",
                field="bind",
            )
    for own in calls:
        own.bind = bindings.for_contract(options.bind, own.contract, options.contract)
    return calls


def names_no_contract(options: argparse.Namespace) -> bool:
    """Return whether the user named no contract, so that the contracts for any script are used."""
    return "contract" not in (*options.typed, *options.used)
