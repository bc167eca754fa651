"""Short runs of `entrenar finetune` on the small checkpoint, and what they wrote."""

from __future__ import annotations

import json
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.train.finetune import local
from entrenar_py.train.service.metrics import Metrics
from entrenar_py.train.service.run_events import Happening, StepMade

# Five steps of eight rows, of which six are unsafe.
SETTINGS: dict[str, Any] = {
    "task": "classify",
    "output": "out",
    "data": {"train": "rows.jsonl", "max_tokens": 64, "validation_share": 0.25},
    "classes": {"labels": ["safe", "unsafe"], "weights": "sqrt_inverse"},
    "lora": {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"], "dropout": 0.1},
    "training": {"batch_size": 8, "num_shards": 4, "learning_rate": 1e-3, "epochs": 1},
}


def configured(folder: Path, small: Path, **changes: Any) -> Path:
    """Write 48 rows and a configuration to `folder`; a section in `changes` is laid over its own.

    Returns the configuration's path. Its model is that of the fixture `small`.
    """
    lines = (small / "train.jsonl").read_text(encoding="utf-8").splitlines()
    lines = sorted(lines, key=lambda line: "unsafe" not in line)[:6] + lines[:42]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings: dict[str, Any] = {"model": str(small / "model"), **SETTINGS}
    if "strategy" not in changes:
        settings["workers"] = 1  # by default it would be one a core
    for key, value in changes.items():
        old = settings.get(key)
        settings[key] = {**old, **value} if isinstance(old, dict) else value
    if settings["task"] != "classify":
        del settings["classes"]
    path = folder / "run.yaml"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


NUM_PAIRS = 16
PAIRS: dict[str, Any] = {
    "task": "preference",
    "preference": {"beta": 0.5},
    "data": {"validation_share": 0.25},
    "evaluate_every": 6,
    "training": {"epochs": 12, "batch_size": 6, "learning_rate": 1e-2},
}


def of_pairs(folder: Path, small: Path, **changes: Any) -> Path:
    """Write chats in which a safe command is preferred, and a configuration."""
    config = configured(folder, small, **{**PAIRS, **changes})
    settings = json.loads(config.read_text())
    settings.pop("classes", None)
    config.write_text(json.dumps(settings), encoding="utf-8")
    rows = [json.loads(line)["text"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    pairs = zip(rows[6 : 6 + NUM_PAIRS], 3 * rows[:6], strict=False)  # six of them are unsafe
    lines = [
        json.dumps(
            {
                "prompt": [{"role": "user", "content": f"{number}"}],
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
            }
        )
        for number, (chosen, rejected) in enumerate(pairs)
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return config


def adapters(output: Path) -> bytes:
    """Return the bytes of the adapters that a run wrote."""
    return (output / "adapter_model.safetensors").read_bytes()


def told(output: Path, what: str) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics that are called `what`."""
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["what"] == what]


def die(_pipe: Connection) -> None:
    """End a worker process as soon as it is started."""
    sys.exit(3)


def kill_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next run's worker of rank 1 be killed as soon as the first step is made."""
    begin, write = local._Workers.start, Metrics.__call__
    victims: list[Any] = []

    def start(self: Any, *given: Any) -> None:
        begin(self, *given)
        victims.append(self._hands[1].process)

    def killing(self: Metrics, happening: Happening) -> None:
        write(self, happening)
        if isinstance(happening, StepMade) and victims:
            os.kill(victims.pop().pid, signal.SIGKILL)

    monkeypatch.setattr(local._Workers, "start", start)
    monkeypatch.setattr(Metrics, "__call__", killing)
