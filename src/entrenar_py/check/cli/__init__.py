"""The command `entrenar-check`: read the command line, call the harness, render, exit.

Exit codes: 0 held · 1 falsified · 2 contract or command line invalid, nothing ran · 3 the harness
itself failed · 4 inconclusive · 5 nothing selected.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack

from entrenar_py.check.project import command_line, merging
from entrenar_py.check.project.command_line import PROG
from entrenar_py.shared import process
from entrenar_py.shared.errors import ContractError, EntrenarError, UsageError
from entrenar_py.shared.untrusted import printing

INIT = "init"
EXIT_INVALID = 2
EXIT_HARNESS = 3
EXIT_INTERRUPTED = 4
# These signals interrupt a job, so that it can end the processes that it launched.
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
        options = merging.configured(command_line.read(arguments))
        try:
            if options.mode != "mutants":
                from entrenar_py.check.cli import early  # brings the reader of contracts

                early.require_possible(options)
            if options.mode == "command":
                from entrenar_py.check.command import warm

                options.parents = warm.of(options)
                opened.callback(options.parents.close)
            from entrenar_py.check.cli import session  # brings checks, reports and the search

            job = session.prepare(options, arguments)
        except UsageError as error:
            raise merging.located(error, options) from error
    except ContractError as error:  # its lines start with file:line:column
        printing.warn_lines(str(error))
        return EXIT_INVALID
    except UsageError as error:
        _say(error)
        return EXIT_INVALID
    return job()


def _say(message: object) -> None:
    printing.warn(f"{PROG}: {message}")
