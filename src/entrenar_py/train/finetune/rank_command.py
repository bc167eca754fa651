"""The command line of a rank of a fine-tuning; `entrenar_py.finetune` calls it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrenar_py.shared.errors import (
    CheckpointError,
    ContractError,
    EntrenarError,
    RowsError,
    UsageError,
)
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.service import exit_codes, metrics

PROG = "entrenar_py.finetune"


def main(argv: Sequence[str], environment: Mapping[str, str], init_method: str = "env://") -> int:
    """Train as the rank that `environment` names; return the exit code.

    Rank 0 prints. What goes wrong before ranks have joined is told by the first rank of each host.
    """
    given = _parser().parse_args(argv)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of what is meant so
    is_first = environment.get("RANK", "0") == "0"
    try:
        from entrenar_py.train.finetune.strategies import launch  # brings torch

        here = launch.world(environment)
    except EntrenarError as error:  # of one host alone: the others wait for it
        if environment.get("LOCAL_RANK", "0") == "0":
            _tell(error)
        return _code(error)
    try:
        with launch.joined(here, init_method):
            return launch.train(
                given.config,
                here,
                resume=given.resume,
                halt_on_spike=given.halt_on_spike,
                tensorboard=given.tensorboard,
            )
    except EntrenarError as error:
        if is_first:
            _tell(error)
        return _code(error)


def _code(error: EntrenarError) -> int:
    is_invalid = isinstance(error, ContractError | UsageError | CheckpointError)
    return exit_codes.INVALID if is_invalid else exit_codes.FAILED


def _tell(error: EntrenarError) -> None:
    if isinstance(error, ContractError):  # its lines start with file:line:column
        printing.warn_lines(str(error))
    elif isinstance(error, RowsError):
        printing.warn_lines(f"entrenar: {error}")
    else:
        printing.warn(f"entrenar: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"torchrun ... -m {PROG}",
        description="Fine-tune by ranks that torchrun starts; the configuration has a strategy.",
    )
    parser.add_argument("config", type=Path, metavar="RUN.yaml", help="the configuration")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in the output folder"
    )
    for name, option in metrics.OPTIONS.items():
        parser.add_argument(name, **option)
    return parser
