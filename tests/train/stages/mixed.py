"""Stages on unlike backends as processes of their own, and one process that trains the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from entrenar_py import entrenar as cli
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model import model
from entrenar_py.train.service import exit_codes
from tests.train.finetune import runs
from tests.train.service.cluster import Cluster

# Of the distance that the adapters move in training. A gradient is off by some 1e-6 of its norm
# (docs/numerics.md), but AdamW takes steps of the learning rate's size where it is rounding noise,
# too. 1e-5 was seen.
APART = 1e-3
LOSS = 2e-5  # relative, of the first steps: n u (docs/numerics.md, "Training")
NUM_STEPS = 3


def configured(folder: Path, small: Path, trained: Path, **changes: Any) -> Path:
    """Write a configuration of three steps for `trained`; shards have a row, and the last has none.

    Rows have 9 to 15 tokens and an end, so that one shape is compiled.
    """
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(small / "model")

    def num_tokens(line: str) -> int:
        return len(tokenizer(json.loads(line)["text"]).input_ids)

    path = runs.configured(folder, small)
    lines = (folder / "rows.jsonl").read_text("utf-8").splitlines()
    lines = [one for one in lines if 8 < num_tokens(one) < 16]
    (folder / "rows.jsonl").write_text("\n".join(lines[:11]) + "\n", "utf-8")
    assert len(lines) >= 11
    record = json.loads(path.read_text("utf-8"))
    del record["classes"]
    if "strategy" in changes:
        del record["workers"]
    record |= {
        "model": str(trained),
        "task": "text",
        "data": {"train": "rows.jsonl", "max_tokens": 24},
        "lora": {"rank": 2, "alpha": 4, "targets": ["q_proj", "down_proj"], "dropout": 0.1},
        "training": {**record["training"], "batch_size": 4},
        **changes,
    }
    path.write_text(json.dumps(record), "utf-8")
    return path


def by_stages(
    machines: Cluster, small: Path, trained: Path, folder: Path, stages: Sequence[tuple[str, int]]
) -> list[float]:
    """Train with a process for each of `stages`, its backend and its number of blocks.

    Returns the losses of steps; the adapters are in `folder`/out.
    """
    plan, first = [], 0
    for number, (name, num_blocks) in enumerate(stages):
        layers = [first, first := first + num_blocks]
        plan.append({"layers": layers, "worker": f"worker{number}", "backend": name})
    section = {"listen": machines.address, "secret_file": "secret"}
    more = {"strategy": "layer_pipeline", "stages": plan, "coordinator": section}
    configured(folder, small, trained, **more)
    serving = machines.coordinator(cache=folder / "own")
    workers = [
        machines.worker("--backend", name, "--id", f"worker{number}", cache=folder / "theirs")
        for number, (name, _) in enumerate(stages)
    ]
    codes = [one.code() for one in (*workers, serving)]
    told = "\n".join(one.text for one in (serving, *workers))
    assert codes == [exit_codes.DONE] * len(codes), told
    return _losses(folder / "out")


def alone(small: Path, trained: Path, folder: Path, backend: str) -> list[float]:
    """Train in one process; return the losses of steps. The adapters are in `folder`/alone."""
    config = configured(folder, small, trained, output="alone", workers=1)
    assert cli.main(["finetune", str(config), "--backend", backend]) == exit_codes.DONE
    return _losses(folder / "alone")


def _losses(output: Path) -> list[float]:
    losses = [one["loss"] for one in runs.told(output, "step")]
    assert len(losses) == NUM_STEPS
    return losses


def apart(folder: Path) -> float:
    """Return how far the adapters of both runs are apart, as a share of their way in training.

    The configuration in `folder` is that of `alone`.
    """
    start = model.load(settings_file.load(folder / "run.yaml"), 0).state_dict()
    ours, theirs = (
        load_file(folder / name / "adapter_model.safetensors") for name in ("out", "alone")
    )
    assert ours.keys() == theirs.keys()
    moved = found = 0.0
    for name, one in theirs.items():
        before = start[name.replace(".weight", ".default.weight")].numpy()
        moved += float(np.square(one - before).sum())
        found += float(np.square(one - ours[name]).sum())
    assert moved > 0
    return float(np.sqrt(found / moved))
