"""The command `entrenar`: each of its commands, by the module that runs it."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

from entrenar_py.shared import process
from entrenar_py.shared.errors import (
    CheckpointError,
    ContractError,
    EntrenarError,
    RowsError,
    UsageError,
)
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.cli import options
from entrenar_py.train.service import exit_codes, signals

Others = Mapping[str, Callable[[argparse.Namespace], int]]


def main(argv: Sequence[str] | None, others: Others) -> int:
    """Run the command and return its exit code. `--help` and `--version` raise SystemExit.

    `others` run the commands that are not the trainer's, by their names.
    """
    if argv is None:
        process.begin()
    signals.interrupt()
    try:
        code = _run(options.parse(sys.argv[1:] if argv is None else argv), others)
        return exit_codes.FAILED if printing.lost() and code == exit_codes.DONE else code
    except SystemExit as left:  # --help, --version
        if printing.lost():
            raise SystemExit(exit_codes.FAILED) from left
        raise
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:  # noqa: BLE001  (Python would exit with 1, which means a failed run)
        # A library may have made its own exception of an interrupt.
        return _interrupted() if signals.noted() else _failed(error)
    finally:
        signals.settle()


def _interrupted() -> int:
    signals.settle()
    printing.warn(signals.say_interrupted())
    return exit_codes.STOPPED


def _failed(error: Exception) -> int:
    """Tell what went wrong; return the exit code."""
    match error:
        case ContractError():  # its lines start with file:line:column
            printing.warn_lines(str(error))
            return exit_codes.INVALID
        case RowsError():
            printing.warn_lines(f"{options.PROG}: {error}")
            return exit_codes.INVALID
        case UsageError() | CheckpointError():
            _say(error)
            return exit_codes.INVALID
        case EntrenarError():
            _say(error)
            return exit_codes.FAILED
    printing.warn_lines("".join(traceback.format_exception(error)).rstrip())
    _say(f"this is a bug in {options.PROG}: report it, with the lines above")
    return exit_codes.FAILED


def _run(parsed: argparse.Namespace, others: Others) -> int:
    """Run the chosen command. Heavy modules are imported only here, so that `--help` is fast."""
    if parsed.command in others:
        return others[parsed.command](parsed)
    if parsed.command == "coordinator" and parsed.wire == options.WIRE_2:
        from entrenar_py.train.service import averaging

        return averaging.run(parsed.config, insecure=parsed.insecure)
    if parsed.command == "coordinator":
        from entrenar_py.train.finetune import serving
        from entrenar_py.train.service import coordinator

        serve = serving.run if serving.is_finetuning(parsed.config) else coordinator.run
        return serve(
            parsed.config,
            resume=parsed.resume,
            halt_on_spike=parsed.halt_on_spike,
            tensorboard=parsed.tensorboard,
        )
    if parsed.command == "worker":
        from entrenar_py.train.finetune import joining
        from entrenar_py.train.service import worker

        return worker.run(parsed, joining.obtain)
    if parsed.command != "ledger":
        from entrenar_py.train.finetune import cli

        return {"pipeline": cli.pipeline, "distill": cli.distill}.get(parsed.command, cli.run)(
            parsed
        )
    from entrenar_py.train.service import ledger_account

    return ledger_account.verify(parsed.path, replay=parsed.replay)


def _say(message: object) -> None:
    printing.warn(f"{options.PROG}: {message}")
