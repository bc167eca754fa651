"""The options of `entrenar distill`: `logits`, `train`, `text` and `status`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "distill"
Add = Callable[[Any, str, str], argparse.ArgumentParser]
_PART = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")


def add(
    commands: Any,
    add_command: Add,
    add_training: Callable[[argparse.ArgumentParser], None],
    backend: Callable[[str], str],
) -> None:
    """Add the command to `commands`; `add_training` adds the options of `finetune`."""
    command = add_command(
        commands, NAME, "learn from a teacher: its logits once, in shards, then a student"
    )
    actions = command.add_subparsers(
        title="actions", dest="action", metavar="ACTION", required=True
    )
    logits = add_command(
        actions, "logits", "run the teacher over all rows, and keep its most likely tokens"
    )
    _add_config(logits)
    logits.add_argument(
        "--backend",
        metavar="NAME",
        type=backend,
        default="cpu",
        help="what the teacher computes on: cpu or cuda (cuda:1: the second device; default cpu)",
    )
    logits.add_argument(
        "--part",
        metavar="K/N",
        type=_part,
        help="make each N-th shard from the K-th on, for machines that share no folder; those that "
        "do share one share the work without it",
    )
    train = add_command(
        actions, "train", "train the student on this machine, while shards may still come"
    )
    add_training(train)
    train.add_argument(
        "--follow",
        action=argparse.BooleanOptionalAction,
        help="wait for shards that are missing, or end with an error at the first one (default: "
        "as distill.wait_s says)",
    )
    text = add_command(
        actions, "text", "let the teacher answer prompts, for a student with another tokenizer"
    )
    _add_config(text)
    text.add_argument(
        "--endpoint",
        metavar="URL",
        help="base URL of an OpenAI-compatible server that answers, such as "
        "http://host:8000/v1 (default: distill.text.endpoint, or without one distill.teacher is "
        "run here)",
    )
    text.add_argument(
        "--backend",
        metavar="NAME",
        type=backend,
        help="what the teacher computes on where there is no endpoint: cpu or cuda (cuda:1: the "
        "second device; default cpu)",
    )
    status = add_command(actions, "status", "say which shards are there, missing or damaged")
    status.add_argument("folder", metavar="DIR", type=Path, help="the folder of the shards")
    status.add_argument("--json", metavar="FILE", type=Path, help="also write it as JSON")


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "config", metavar="CONFIG.yaml", type=Path, help="as `finetune` takes it, with `distill`"
    )


def _part(text: str) -> tuple[int, int]:
    """Return K and N of the text `K/N`."""
    found = _PART.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: use K/N with K from 1 to N, such as 2/3")
    return int(found[1]), int(found[2])
