"""The options by which a run follows its own figures: the same for all commands that train."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(command: argparse.ArgumentParser) -> None:
    """Add them to a command."""
    command.add_argument(
        "--halt-on-spike",
        action="store_true",
        help="halt before a step whose gradient norm is more than ten times its running median; "
        "without it such a step is only reported, on the screen and in the ledger",
    )
    command.add_argument(
        "--tensorboard",
        metavar="DIR",
        type=Path,
        help="also write the figures of the run to a folder that TensorBoard draws",
    )
