"""A layer pipeline's step beside torch's 1F1B over gloo, for the same model on CPUs, on this host.

    python -m tests.benchmarks.layer_pipeline --stages 2 --runs 3

Both train one random Llama on rows of a fixed length, in stages of equally many blocks, a process
with one thread each. Torch's stages are `strategy: pipeline_parallel` under torchrun, which is
PipelineStage with Schedule1F1B. Runs alternate; a run's time is the median of its steps after the
first ones, and `idle` the share of it in which stages waited.

Stages of equally many blocks are not alike: the first block needs no gradient of what came in, and
the last stage has head and loss. `expected` is the share for the stages' own median times of a
shard; that of alike stages is printed at the end. Prints a JSON line a run, and the ratio. CI does
not run it.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from entrenar_py.train.wire import pipeline
from tests.benchmarks import commands, gpu_finetune
from tests.benchmarks.commands import ENTRENAR
from tests.train.wire_io.fakes import free_port

UNCOUNTED = 4  # steps before the clock starts


def checkpoint(folder: Path, given: argparse.Namespace) -> None:
    """Write the model and the tokenizer."""
    import transformers

    torch.manual_seed(0)
    gpu_finetune.checkpoint(folder, "tiny")  # for its tokenizer
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=given.hidden,
        intermediate_size=3 * given.hidden,
        num_hidden_layers=given.blocks,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=given.tokens + 8,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def settings(folder: Path, output: str, given: argparse.Namespace, **more: Any) -> Path:
    """Write a configuration, and return its path."""
    record = {
        "model": str(folder / "model"),
        "task": "text",
        "output": output,
        "data": {"train": str(folder / "rows.jsonl"), "max_tokens": given.tokens + 1},
        "lora": {"rank": 8, "targets": ["q_proj", "v_proj"]},
        "training": {"batch_size": given.rows * given.shards, "num_shards": given.shards},
        **more,
    }
    path = folder / f"{output}.yaml"
    path.write_text(json.dumps(record), "utf-8")
    return path


def ours(
    folder: Path, output: str, given: argparse.Namespace, *, of_worker: Sequence[str] = ENTRENAR
) -> dict[str, Any]:
    """Train by a coordinator and workers, which `of_worker` starts; return what was measured."""
    secret, address = folder / "secret", f"127.0.0.1:{free_port()}"
    secret.write_text(secrets.token_hex(16))
    section = {"listen": address, "secret_file": str(secret)}
    path = settings(
        folder, output, given, strategy="layer_pipeline", workers=given.stages, coordinator=section
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "env": env}
    worker = [*of_worker, "worker", "--coordinator", address, "--secret-file", str(secret)]
    started = [subprocess.Popen([*ENTRENAR, "coordinator", str(path)], **quiet)]
    started += [subprocess.Popen(worker, **quiet) for _ in range(given.stages)]
    codes = [one.wait() for one in started]
    if any(codes):
        raise SystemExit("a process failed")
    return measured(folder / output)


def theirs(folder: Path, output: str, given: argparse.Namespace) -> dict[str, Any]:
    """Train by ranks of torchrun; return what was measured."""
    path = settings(folder, output, given, strategy="pipeline_parallel")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={given.stages}"]
    command = [sys.executable, *launcher, "-m", "entrenar_py.finetune", str(path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=env, check=True, capture_output=True)
    return measured(folder / output)


def measured(output: Path) -> dict[str, Any]:
    """Return the time of a step, and the last loss."""
    steps = commands.steps(output)
    times = [one["step_ms"] for one in steps[UNCOUNTED:]]
    idle = [one["idle_share"] for one in steps[UNCOUNTED:] if "idle_share" in one]
    found = {"step_ms": round(median(times), 1), "loss": steps[-1]["loss"]}
    if not idle:
        return found
    return found | {"idle": round(median(idle), 3), "expected": round(expected(steps), 3)}


def expected(steps: list[dict[str, Any]]) -> float:
    """Return the share of idle time for stages that take their median times, and wait for no wire.

    The slowest stage is busy all the time but for one shard's way through the others.
    """
    passes: dict[str, list[list[pipeline.Timed]]] = defaultdict(list)
    for step in steps[UNCOUNTED:]:
        for rank, times_us in step["passes_us"].items():
            passes[rank].append(pipeline.decode(times_us))
    num_shards = len({one.shard for of_rank in passes.values() for one in of_rank[0]})
    shard_us = [
        median(sum(one.ended - one.began for one in of_step) for of_step in of_rank) / num_shards
        for of_rank in passes.values()
    ]
    window = (num_shards - 1) * max(shard_us) + sum(shard_us)
    return 1 - num_shards * sum(shard_us) / (len(shard_us) * window)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=2, help="rows of a shard")
    parser.add_argument("--shards", type=int, default=8, help="shards of a batch")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="entrenar-pipeline-") as name:
        folder = Path(name)
        checkpoint(folder / "model", given)
        number = given.rows * given.shards * given.steps
        gpu_finetune.rows(folder / "rows.jsonl", number, given.tokens)
        found: dict[str, list[float]] = {"ours": [], "torch": []}
        for run in range(given.runs):
            for kind, train in (("ours", ours), ("torch", theirs)):
                record = train(folder, f"{kind}-{run}", given)
                found[kind].append(record["step_ms"])
                print(json.dumps({"kind": kind, "run": run, **record}), flush=True)
        ratio = median(found["ours"]) / median(found["torch"])
        formula = (given.stages - 1) / (given.shards + given.stages - 1)
        print(json.dumps({"ratio": round(ratio, 3), "idle_by_formula": round(formula, 3)}))


if __name__ == "__main__":
    main()
