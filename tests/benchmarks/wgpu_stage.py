"""The passes of a pipeline's stage on wgpu: their times, and what each shard keeps between them.

    python -m tests.benchmarks.wgpu_stage --hidden 256 --rows 2 --tokens 128

The stage has two of the four blocks of a Qwen3 with random weights, neither the first nor the last.
`forward_ms` and `backward_ms` are medians. The backward pass computes the forward pass again:
`more` is the time of that, relative to both passes without it. `kept_mb` is what a shard keeps from
one pass to the other, `autograd_mb` what autograd keeps on the CPU besides weights, and
`intermediate_mb` the device memory of all results in between, which all shards share. Prints one
JSON object a method; CI does not run it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entrenar_py.compute import open_backend
from entrenar_py.compute.wgpu import open_wgpu
from entrenar_py.train.arithmetic.engine import Dropout, Engine
from entrenar_py.train.model import model, preparation
from entrenar_py.train.model.settings import Data, Settings, StagePlan
from entrenar_py.train.stages import cut as cutting
from entrenar_py.train.stages import stage_model
from entrenar_py.train.stages.member import StageBackend
from entrenar_py.train.stages.stage_model import Received, StageWorkload
from tests.benchmarks import gpu_finetune

RUNS = 5
PLAN = ((0, 1), (1, 3), (3, 4))


def workload_of(folder: Path, method: str, tokens: int) -> StageWorkload:
    """Return the middle stage."""
    settings = Settings(
        model=folder,
        task="text",
        output=folder / "out",
        method=method,
        data=Data(train=folder / "rows.jsonl", max_tokens=tokens),
        strategy="layer_pipeline",
        stages=tuple(StagePlan(layers=layers) for layers in PLAN),
    )
    cut = cutting.of(settings, model.shape(settings))
    return stage_model.load_stage(preparation.prepare(settings), cut, 1)


def timed_ms(make: Callable[[], Any]) -> float:
    """Return the median of the times that `make` takes, after a first one."""
    times = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        make()
        times.append(1000 * (time.perf_counter() - start))
    return round(median(times[1:]), 2)


def kept_by_autograd(step: Any, ids: list[int], received: Received, drop: Dropout) -> int:
    """Return the bytes that a forward pass on the CPU keeps for its backward pass."""
    weights = {one.untyped_storage().data_ptr() for one in step._tensors.values()}
    weights |= {one.untyped_storage().data_ptr() for one in step._workload.constants.values()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        step.forward(0, ids, received, drop)
    return sum(kept.values())


def measured(folder: Path, method: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a stage."""
    workload, wgpu = workload_of(folder, method, given.tokens), open_wgpu()
    initial = workload.initial(np.random.default_rng(0))
    step: Any = Engine(workload, StageBackend(wgpu), initial, scale=1.0).stepper
    cpu: Any = Engine(workload, StageBackend(open_backend("cpu")), initial, scale=1.0).stepper
    ids = list(range(given.rows))
    hidden = torch.randn(workload.hidden_shape(ids), generator=torch.Generator().manual_seed(0))
    received, drop = Received(hidden, 0), Dropout(0.0, np.random.default_rng(0))
    forward_ms = timed_ms(lambda: step.forward(0, ids, received, drop))

    def back() -> None:
        step._kept[0] = kept
        step.backward(0, hidden)

    kept = step._kept[0]
    backward_ms = timed_ms(back)
    programs = wgpu.programs.of(workload)
    return {
        "method": method,
        "hidden": list(hidden.shape),
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "more": round(forward_ms / backward_ms, 2),
        "dispatches": [len(one.dispatches) for one in programs.programs.values()],
        "kept_mb": round(sum(one.nbytes for one in kept.inputs()) / 1e6, 3),
        "autograd_mb": round(kept_by_autograd(cpu, ids, received, drop) / 1e6, 3),
        "intermediate_mb": round(programs.scratch.num_bytes / 1e6, 3),
    }


def main() -> None:
    """Measure both methods."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    gpu_finetune.SHAPES["stage"] = {
        "hidden_size": given.hidden,
        "intermediate_size": 3 * given.hidden,
        "num_hidden_layers": PLAN[-1][1],
        "num_attention_heads": given.hidden // 32,
        "num_key_value_heads": given.hidden // 64,
        "head_dim": 32,
        "vocab_size": 4096,
        "tie_word_embeddings": False,
    }
    print(json.dumps({"adapter": open_wgpu().device}), flush=True)
    with tempfile.TemporaryDirectory() as made:
        os.environ["XDG_CACHE_HOME"] = made
        gpu_finetune.checkpoint(Path(made), "stage")
        gpu_finetune.rows(Path(made) / "rows.jsonl", given.rows, given.tokens)
        for method in ("lora", "full"):
            print(json.dumps(measured(Path(made), method, given)), flush=True)


if __name__ == "__main__":
    main()
