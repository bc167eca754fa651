"""What tests of distillation share: facts and rows of a few small shards, and small runs."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from entrenar_py import entrenar as cli
from entrenar_py.train.distill import manifest
from entrenar_py.train.distill.manifest import Entry, Facts
from entrenar_py.train.distill.shards import Rows, ShardWriter
from entrenar_py.train.service import exit_codes

FACTS = Facts(
    teacher="1" * 32,
    tokenizer="2" * 32,
    data="3" * 32,
    vocabulary=50,
    top_k=4,
    stored="float16",
    precision="float32",
    seed=0,
    batch_tokens=64,
    samples=(2, 2, 1),
    rows=(7, 5, 3),
)
STARTS = [np.array(one, np.int64) for one in ([0, 4, 7], [0, 2, 5], [0, 3])]


def rows_of(shard: int, facts: Facts = FACTS) -> Rows:
    """Return rows that are drawn from the shard's number."""
    draw = np.random.default_rng(shard)
    number, top_k = facts.rows[shard], facts.top_k
    kind = {"float16": np.float16, "float32": np.float32}[facts.stored]
    tokens = [draw.permutation(facts.vocabulary)[:top_k] for _ in range(number)]
    logits = -np.sort(draw.exponential(2.0, (number, top_k + 1)), 1)  # the last is the rest
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    counts = np.diff(STARTS[shard])
    return Rows(
        np.repeat(np.arange(len(counts), dtype=np.int32) + 2 * shard, counts),
        np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
        draw.integers(0, facts.vocabulary, number).astype(np.int32),
        np.array(tokens, np.int32),
        logs[:, :-1].astype(kind),
        logs[:, -1].astype(np.float32),
    )


def write(folder: Path, shard: int, facts: Facts = FACTS) -> Entry:
    """Write a shard's file; return its line of a list."""
    with closing(ShardWriter(folder, facts, shard, STARTS[shard])) as file:
        file.add(rows_of(shard, facts))
        return file.finish()


def table_of(path: Path) -> Any:
    """Return a Parquet file as a table of Arrow."""
    return manifest.arrow().parquet.read_table(path)


SETTINGS: dict[str, Any] = {
    "task": "text",
    "data": {"train": "rows.jsonl", "max_tokens": 64},
    "lora": {"rank": 2, "targets": ["q_proj", "v_proj"]},
    "training": {"batch_size": 8, "num_shards": 4, "learning_rate": 1e-2},
    "distill": {"logits": "shards", "top_k": 8, "shard_samples": 12, "precision": "float32"},
}


def configured(folder: Path, small: Path, num_rows: int = 40, **changes: Any) -> Path:
    """Write rows and a configuration whose teacher is the small model; return its path.

    A section in `changes` is laid over its own.
    """
    lines = (small / "train.jsonl").read_text("utf-8").splitlines()[:num_rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    record: dict[str, Any] = {"model": str(small / "model"), "output": "out", **SETTINGS}
    record["distill"] = {**SETTINGS["distill"], "teacher": str(small / "model")}
    for key, value in changes.items():
        old = record.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            record[key] = {**old, **value}
        else:
            record[key] = value
    path = folder / "run.yaml"
    path.write_text(json.dumps(record), "utf-8")
    return path


def make_shards(config: Path) -> Path:
    """Run the teacher of a configuration in this process; return the folder of its shards."""
    assert cli.main(["distill", "logits", str(config)]) == exit_codes.DONE
    return config.parent / "shards"


def files(folder: Path) -> dict[str, bytes]:
    """Return the shards of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.parquet"))}


def moved(folder: Path, aside: Path, *numbers: int) -> None:
    """Move shards with these numbers to the folder `aside`."""
    aside.mkdir(exist_ok=True)
    for number in numbers:
        for path in folder.glob(f"shard-{number:05d}-*"):
            shutil.move(path, aside / path.name)
