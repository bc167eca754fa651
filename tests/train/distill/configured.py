"""Configurations of `entrenar distill text`, their rows, and what was written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any


def chats(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return rows of conversations that each of `texts` begins, with an answer of a person."""
    return [
        {
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": f"a person on {text}"},
            ]
        }
        for text in texts
    ]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def config(
    folder: Path,
    asked: Sequence[Mapping[str, Any]],
    *,
    task: str = "instruct",
    distill: Mapping[str, Any] = MappingProxyType({}),
    data: Mapping[str, Any] = MappingProxyType({}),
    model: str = "student",
    seed: int = 0,
    **text: Any,
) -> Path:
    """Write a configuration, its prompts, and two original rows; `text` has its settings."""
    write_rows(folder / "prompts.jsonl", asked)
    originals = [{"text": f"old {n}"} for n in range(2)] if task == "text" else chats(["old", "x"])
    write_rows(folder / "train.jsonl", originals)
    record = {
        "model": model,
        "seed": seed,
        "task": task,
        "output": "out",
        "data": {"train": "train.jsonl", **data},
        "distill": {
            **distill,
            "text": {
                "prompts": "prompts.jsonl",
                "rows": "answers.jsonl",
                "served_model": "big",
                **text,
            },
        },
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def written(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that were written."""
    lines = (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def said(folder: Path) -> list[str]:
    """Return the last message of each row that was written."""
    return [row["messages"][-1]["content"] for row in written(folder)]
