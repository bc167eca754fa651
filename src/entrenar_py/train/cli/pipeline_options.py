"""The options of `entrenar pipeline`: `plan` and `import`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "pipeline"
DIAGRAMS = ("mermaid", "dot", "svg")
ORDERS = ("given", "best")
DOCTOR = "doctor"
_TASK = "text"
Add = Callable[[Any, str, str], argparse.ArgumentParser]


def add(commands: Any, add_command: Add, bandwidth: str) -> None:
    """Add the command to `commands`; `bandwidth` is that of links, by default."""
    command = add_command(commands, NAME, "plan or convert the stages of a layer pipeline")
    actions = command.add_subparsers(
        title="actions", dest="action", metavar="ACTION", required=True
    )
    _add_plan(actions, add_command, bandwidth)
    _add_import(actions, add_command)


def _add_plan(actions: Any, add_command: Add, bandwidth: str) -> None:
    plan = add_command(
        actions, "plan", "show the stages of a configuration, or cut the model as is fastest"
    )
    plan.add_argument("config", metavar="CONFIG.yaml", type=Path, help="as `coordinator` takes it")
    plan.add_argument(
        "--workers",
        metavar="FILE",
        help="a list of {worker, memory, backend, flops or seconds_per_block, bandwidth}; or "
        f"{DOCTOR}: this machine's devices, measured (default: `devices` of the configuration)",
    )
    plan.add_argument(
        "--order",
        choices=ORDERS,
        default=ORDERS[0],
        help="let workers have stages in the order in which they are given, or in the fastest one, "
        "of six workers at most (default given)",
    )
    plan.add_argument(
        "--bandwidth",
        metavar="B",
        default=bandwidth,
        help="of the coordinator's link, and of workers without their own, e.g. 1Gbit (default "
        f"{bandwidth})",
    )
    plan.add_argument(
        "--diagram", choices=DIAGRAMS, help="print machines and links instead, drawn in this form"
    )
    plan.add_argument("--json", metavar="FILE", type=Path, help="also write it as JSON")


def _add_import(actions: Any, add_command: Add) -> None:
    old = add_command(
        actions,
        "import",
        "print a configuration made from an earlier framework's hetero_config.json",
    )
    old.add_argument("old", metavar="OLD.json", type=Path, help="the hetero_config.json")
    for name, metavar, default, what in (
        ("model", "FOLDER", None, "folder with the checkpoint; its blocks are counted"),
        ("data", "FILE", Path("train.jsonl"), "rows to train on"),
        ("output", "FOLDER", Path("out"), "folder for what is trained"),
        ("secret-file", "FILE", Path("secret"), "the run's shared secret"),
    ):
        told = what if default is None else f"{what} (default {default})"
        old.add_argument(f"--{name}", metavar=metavar, type=Path, default=default, help=told)
    old.add_argument(
        "--task",
        choices=("instruct", "text"),
        default=_TASK,
        help=f"what is learned (default {_TASK})",
    )
