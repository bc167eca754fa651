"""Prints digests of gradients on CUDA of batches in a given order, for the test beside this file.

python -m tests.train.model.shapes_in_order FOLDER TASK 0,1,0
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from blake3 import blake3

from entrenar_py import compute as backends
from entrenar_py.train.arithmetic import engine
from entrenar_py.train.model import preparation
from entrenar_py.train.model.settings import Classes, Data, Settings

BATCHES = ((0, 1, 2, 3), (5,), (7, 8), (10, 11, 12, 13, 14, 15))


def main(small: Path, task: str, order: list[int]) -> None:
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
    initial = workload.initial(np.random.default_rng(0))
    replica = engine.Engine(workload, backends.open_backend("cuda"), initial, scale=1.0)
    for number in order:
        streams = engine.Dropout(0.0, np.random.default_rng(number))
        vector, _, _ = replica.shard(list(BATCHES[number]), accumulation=1, drop=streams)
        print(number, blake3(vector.data.cast("B")).hexdigest(16))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(one) for one in sys.argv[3].split(",")])
