"""Prints digests of gradients on CUDA of batches in a given order, for the test beside this file.

python -m tests.train.model.shapes_in_order FOLDER TASK 0,1,0

With `warm,` before the numbers, blocks are compiled before the first batch, as a worker does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from entrenar_py import compute as backends
from entrenar_py.train.arithmetic import engine
from entrenar_py.train.model import preparation
from entrenar_py.train.model.settings import Classes, Data, Settings

BATCHES = ((0, 1, 2, 3), (5,), (7, 8), (10, 11, 12, 13, 14, 15))


def main(small: Path, task: str, order: list[str]) -> None:
    """Print the number of a batch and its gradient's digest, a line each."""
    settings = Settings(
        model=small / "model",
        task=task,
        output=small / "out",
        precision="bfloat16",
        compile=True,
        data=Data(train=small / "test.jsonl"),
        classes=Classes(labels=("safe", "unsafe") if task == "classify" else ()),
    )
    workload = preparation.prepare(settings).workload()
    initial, backend = workload.initial(np.random.default_rng(0)), backends.open_backend("cuda")
    if order[0] == "warm":
        workload.warm_up(torch.device("cuda"), len(BATCHES[0]))
    replica = engine.Engine(workload, backend, initial, scale=1.0)
    for number in map(int, filter(str.isdigit, order)):
        streams = engine.Dropout(0.0, np.random.default_rng(number))
        vector, _, _ = replica.shard(list(BATCHES[number]), accumulation=1, drop=streams)
        print(number, blake3(vector.data.cast("B")).hexdigest(16))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","))
