"""A LoRA step on wgpu with frozen weights in float32, 16 bits and NF4, beside torch on CUDA.

    python -m tests.benchmarks.wgpu_frozen --shape tiny --tokens 32          # software Vulkan
    python -m tests.benchmarks.wgpu_frozen --shape 0.6b --batch 4 --tokens 512 --targets all
    python -m tests.benchmarks.wgpu_frozen --shape 4b --tokens 512 --targets all --kinds nf4

Loss and gradients of one shard of a Qwen3 with random weights and adapters of rank 16.
`frozen_mb` is the device memory of the weights that aren't trained, `intermediate_mb` that
of all results in between. Where there is a CUDA device, `torch` is the model's own loss and its
gradients in float32 without TF32, and `cuda` our backend's: blocks compiled, operations recorded.
Prints one JSON object a line, as soon as it is known; CI does not run it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from entrenar_py import compute as backends
from entrenar_py.compute.wgpu import open_wgpu
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic.engine import Engine, no_dropout
from entrenar_py.train.model import preparation
from entrenar_py.train.model.settings import Data, Lora, Settings
from entrenar_py.train.model.workload import Finetuning
from tests.benchmarks import gpu_finetune

KINDS = {
    "float32": ("lora", "float32"),
    "bfloat16": ("lora", "bfloat16"),
    "nf4": ("qlora", "bfloat16"),
}
RUNS = 5


def workload_of(folder: Path, kind: str, given: argparse.Namespace) -> Finetuning:
    """Return the model and its rows."""
    method, precision = KINDS[kind]
    settings = Settings(
        model=folder,
        task="text",
        output=folder / "out",
        method=method,
        precision=precision,
        lora=Lora(targets=tuple(gpu_finetune.TARGETS[given.targets])),
        data=Data(train=folder / "rows.jsonl", max_tokens=given.tokens),
    )
    return preparation.prepare(settings).workload()


def timed(workload: Finetuning, backend: Any, batch: int) -> tuple[dict[str, Any], Any]:
    """Return the times of a shard of `batch` rows, and its gradient."""
    engine = Engine(workload, backend, workload.initial(np.random.default_rng(0)), scale=1.0)
    times = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        gradient, _, _ = engine.shard(range(batch), accumulation=1, drop=no_dropout)
        times.append(time.perf_counter() - start)
    steps = [round(1000 * one, 2) for one in times[1:]]
    return {"first_s": round(times[0], 2), "step_ms": median(steps), "all_ms": steps}, gradient


def by_torch(workload: Finetuning, batch: int) -> dict[str, Any]:
    """Return the times of the model's own loss and its gradients on CUDA, as torch runs them."""
    module = workload.module.to("cuda")
    tokens = workload.batch(range(batch))[0].to("cuda")
    leaves = [one for one in module.parameters() if one.requires_grad]
    times = []
    for _ in range(RUNS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = module(input_ids=tokens, labels=tokens, use_cache=False).loss
        for gradient in torch.autograd.grad(loss, leaves):
            gradient.cpu()
        times.append(round(1000 * (time.perf_counter() - start), 2))
    return {"step_ms": median(times[1:]), "all_ms": times[1:]}


def on_wgpu(folder: Path, kind: str, given: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Return the times on wgpu with the memory that the device holds, and the gradient."""
    try:
        workload = workload_of(folder, kind, given)
    except UsageError as error:
        return {"skipped": str(error)}, None
    backend = open_wgpu()
    record, gradient = timed(workload, backend, given.batch)
    compiled = backend.programs.of(workload)
    frozen = sum(one.memory.size for one in compiled.constants or ())
    programs = compiled.programs.values()
    record["frozen_mb"] = round(frozen / 1e6, 3)
    record["intermediate_mb"] = round(sum(one.memory_bytes for one in programs) / 1e6, 1)
    return record, gradient


def measure(given: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield each figure's name and value."""
    yield "adapter", open_wgpu().device
    yield "tokens", given.batch * given.tokens
    with tempfile.TemporaryDirectory() as made:
        folder, expected = Path(made), None
        os.environ["XDG_CACHE_HOME"] = made
        gpu_finetune.checkpoint(folder, given.shape)
        gpu_finetune.rows(folder / "rows.jsonl", given.batch, given.tokens)
        if torch.cuda.is_available():
            yield "torch", by_torch(workload_of(folder, "float32", given), given.batch)
            workload = workload_of(folder, "float32", given)
            found, expected = timed(workload, backends.open_backend("cuda"), given.batch)
            yield "cuda", found
        for kind in given.kinds:
            record, gradient = on_wgpu(folder, kind, given)
            yield kind, record
            if kind == "float32" and expected is not None:
                yield (
                    "difference",
                    float(np.abs(gradient - expected).max() / np.abs(expected).max()),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=gpu_finetune.SHAPES, default="tiny")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--targets", choices=gpu_finetune.TARGETS, default="qv")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    for name, value in measure(parser.parse_args()):
        print(json.dumps({name: value}), flush=True)


if __name__ == "__main__":
    main()
