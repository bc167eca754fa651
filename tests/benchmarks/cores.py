"""A step's shards on the cores of one machine: in turns, by threads within torch, by Python's
threads, and by processes; and one pass over all rows, as a trainer without shards makes it.

    python -m tests.benchmarks.cores --shards 8 --workers 2,4,8

The model is the example's, with adapters on `q_proj` and `v_proj`. Only forward and backward passes
are measured. The best of three rounds is printed, with the first digits of a digest of all
gradients, which tells where bits differ. CI does not run it.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import torch

from entrenar_py import compute as backends
from entrenar_py.train.arithmetic import engine
from entrenar_py.train.arithmetic.engine import Engine
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model import preparation
from entrenar_py.train.model.workload import Finetuning
from examples.finetune import make_small

ROUNDS, ROWS = 3, 4  # rows of a shard
Grads = list[tuple[float, list[Any]]]


def loaded(folder: Path) -> tuple[Finetuning, Engine]:
    """Return the example's model, and a replica of what is trained."""
    settings = {
        "model": str(folder / "model"),
        "task": "classify",
        "output": str(folder / "out"),
        "data": {"train": str(folder / "train.jsonl"), "max_tokens": 64},
        "classes": {"labels": ["safe", "unsafe"]},
    }
    text = settings_file.to_text(settings)
    workload = preparation.prepare(settings_file.of_text(text, "it"), folder).workload()
    tensors = workload.initial(np.random.default_rng(0))
    return workload, Engine(workload, backends.open_backend("cpu"), tensors, scale=1 / 16)


def shards(first: int, last: int) -> list[list[int]]:
    return [list(range(ROWS * shard, ROWS * shard + ROWS)) for shard in range(first, last)]


def best(compute: Callable[[], Grads], steps: int) -> dict[str, Any]:
    """Return the milliseconds of a step, and a digest of its gradients."""
    found, grads = list[float](), compute()
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(steps):
            grads = compute()
        found.append(time.perf_counter() - start)
    hasher = hashlib.sha256(b"".join(grad.tobytes() for _, one in grads for grad in one))
    return {"ms": round(1000 * min(found) / steps, 1), "bits": hasher.hexdigest()[:8]}


def process(folder: Path, ids: Sequence[list[int]], steps: int, gate: Barrier, told: Any) -> None:
    """Compute some shards of each step, in step with the other processes."""
    torch.set_num_threads(1)
    stepper = loaded(folder)[1].stepper
    for _ in range(ROUNDS):
        gate.wait()
        start = time.perf_counter()
        for _ in range(steps):
            for one in ids:
                stepper(one, engine.no_dropout)
            gate.wait()
        told.put(time.perf_counter() - start)


def by_processes(folder: Path, num_shards: int, number: int, steps: int) -> dict[str, Any]:
    """Return the milliseconds of a step of so many processes."""
    context = multiprocessing.get_context("spawn")
    gate, told, size = context.Barrier(number), context.Queue(), num_shards // number
    made = [
        context.Process(
            target=process, args=(folder, shards(rank * size, (rank + 1) * size), steps, gate, told)
        )
        for rank in range(number)
    ]
    for one in made:
        one.start()
    found = [told.get() for _ in range(ROUNDS * number)]
    for one in made:
        one.join()
    return {"ms": round(1000 * min(found) / steps, 1)}


def twin(workload: Finetuning) -> Finetuning:
    """Return a workload with modules of its own, and the same tensors."""
    made, objective = copy.copy(workload), workload.objective
    shared = {id(one): one for one in (*objective.parameters(), *objective.buffers())}
    made.objective = copy.deepcopy(objective, shared)
    return made


def main() -> None:
    """Print a JSON line for each way and number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--workers", default="2,4,8")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    ids = shards(0, given.shards)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_small.make(folder)
        torch.set_num_threads(1)
        workload, replica = loaded(folder)
        cpu = backends.open_backend("cpu")

        def one_by_one() -> Grads:
            return [replica.stepper(one, engine.no_dropout) for one in ids]

        def at_once() -> Grads:
            return [replica.stepper([row for one in ids for row in one], engine.no_dropout)]

        def told(way: str, number: int, found: dict[str, Any]) -> None:
            print(json.dumps({"way": way, "number": number, **found}), flush=True)

        told("shards", 1, best(one_by_one, given.steps))
        told("one pass", 1, best(at_once, given.steps))
        for number in map(int, given.workers.split(",")):
            torch.set_num_threads(number)
            told("shards, threads of torch", number, best(one_by_one, given.steps))
            told("one pass, threads of torch", number, best(at_once, given.steps))
            torch.set_num_threads(1)
            size = given.shards // number
            steppers = [
                cpu.stepper(twin(workload), replica.tensors, scale=1 / 16) for _ in range(number)
            ]
            with ThreadPoolExecutor(number) as pool:

                def part(rank: int, size: int = size, steppers: Any = steppers) -> Grads:
                    mine = ids[rank * size : (rank + 1) * size]
                    return [steppers[rank](one, engine.no_dropout) for one in mine]

                def side_by_side(number: int = number, pool: Any = pool, part: Any = part) -> Grads:
                    return [one for found in pool.map(part, range(number)) for one in found]

                told("shards, threads of Python", number, best(side_by_side, given.steps))
            told(
                "shards, processes", number, by_processes(folder, given.shards, number, given.steps)
            )


if __name__ == "__main__":
    main()
