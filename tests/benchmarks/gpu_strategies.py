"""Every strategy on the GPUs there are: tokens per second, and each rank's peak memory.

    python -m tests.benchmarks.gpu_strategies --ranks 2 --shape 0.6b --batch 8 --tokens 512
    python -m tests.benchmarks.gpu_strategies --batch 8 --shards 8 --limit-s 450 --strategies \\
        ddp_canonical:2 ddp_canonical:1 ddp tensor_parallel fsdp

Random weights, rows of a fixed length, adapters of rank 16 on q_proj and v_proj. Each strategy
trains by `torchrun -m entrenar_py.finetune`, and the first steps don't count. `NAME:1` is a run on
one rank. `--check` compares each output's logits with those of `ddp_canonical` on one rank, and
with each other's. Beside each peak stands that of `entrenar plan`, which on CPUs is without the
interpreter. Prints a JSON line a strategy, and one with ratios and digests at the end. After
`--limit-s` no further run begins. It runs on CPUs, too, with `--shape tiny`. CI does not run it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from entrenar_py.train.model.settings import COMPILABLE
from tests.benchmarks import gpu_finetune

WRITTEN = {"lora": "adapter_model.safetensors", "full": "model.safetensors"}
STRATEGIES = (
    "ddp",
    "ddp_canonical",
    "fsdp",
    "fsdp_canonical",
    "tensor_parallel",
    "sequence_parallel",
    "pipeline_parallel",
)


def run(folder: Path, strategy: str, ranks: int, given: argparse.Namespace) -> dict[str, Any]:
    """Train by `strategy`; return what was measured, or the error."""
    output = folder / f"{strategy}-{ranks}"
    record = {
        "model": str(folder / "model"),
        "task": "text",
        "output": str(output),
        "method": given.method,
        "precision": given.precision,
        "recompute": given.recompute,
        "strategy": strategy,
        "compile": given.compile == "true" and strategy in COMPILABLE,
        "data": {"train": str(folder / "rows.jsonl"), "max_tokens": given.tokens + 1},
        "training": {
            "batch_size": given.batch * given.shards,
            "num_shards": given.shards,
            "learning_rate": 1e-3,
            "schedule": "constant",
        },
    }
    if given.method == "lora":
        record["lora"] = {"rank": 16, "alpha": 32, "targets": ["q_proj", "v_proj"]}
    config = folder / f"{strategy}-{ranks}.yaml"
    config.write_text(yaml.safe_dump(record), "utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    began = time.monotonic()
    code, told = launched([*launcher, "-m", "entrenar_py.finetune", str(config)], given.run_s)
    if code:
        lines = told.strip().splitlines()
        telling = [one for one in lines if "Error" in one or "entrenar: " in one][:3]
        return {"error": telling or lines[-5:], "code": code}
    found = measured(output, given)
    found["run_s"] = round(time.monotonic() - began)
    found["notes"] = sorted({one for one in told.splitlines() if "recorded" in one})
    found["digest"] = hashlib.sha256((output / WRITTEN[given.method]).read_bytes()).hexdigest()[:16]
    if ranks > 1:  # else there is nothing to plan
        found["planned_gb"] = round(planned_gb(config, strategy, ranks), 3)
        found["measured_to_planned"] = round(max(found["peak_gb"]) / found["planned_gb"], 3)
    return found


def launched(command: list[str], limit_s: float) -> tuple[int, str]:
    """Run Python with `command`; return its exit code, -9 after `limit_s`, and what it warned."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends the ranks
            process.wait(60)
            code = -9
        errors.seek(0)
        return code, errors.read()


def planned_gb(config: Path, strategy: str, ranks: int) -> float:
    """Return the peak that `entrenar plan` foresees for a rank of `strategy`."""
    device = "h100:80GB:25GB/s" if torch.cuda.is_available() else "cpu:24GB"
    told = config.with_suffix(".json")
    options = ["--device", f"{ranks} x {device}", "--json", str(told)]
    command = [sys.executable, "-m", "entrenar_py.entrenar", "plan", str(config), *options]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    plans = json.loads(told.read_text("utf-8"))["options"]
    needs = next(plan for plan in plans if plan["strategy"] == strategy)["workers"][0]
    recomputes = "recompute: blocks" in config.read_text("utf-8")
    return float(needs["needs_recomputed" if recomputes else "needs"]["peak"]) / 1e9


def measured(output: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Return tokens per second and peaks from a run's metrics."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    first, *steps = (one for one in records if one["what"] == "step")
    steps = steps[gpu_finetune.UNCOUNTED - 1 :]
    told = next(one["text"] for one in records if one["what"] == "memory")
    step_s = median(one["step_ms"] for one in steps) / 1e3
    return {
        "step_s": round(step_s, 4),
        "tokens_per_s": round(given.batch * given.shards * given.tokens / step_s),
        "peak_gb": [float(peak) for peak in re.findall(r"([\d.]+) GB", told)],
        "first_step_s": round(first["time"] - records[0]["time"], 1),
        "step_ms": [round(one["step_ms"], 1) for one in steps],
        "loss": steps[-1]["loss"],
    }


def logits(folder: Path, output: Path, method: str) -> torch.Tensor:
    """Return what stock peft and transformers make of an output, on a few tokens."""
    import peft
    from transformers import AutoModelForCausalLM

    source = output if method == "full" else folder / "model"
    module: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if method == "lora":
        module = peft.PeftModel.from_pretrained(module, str(output))
    with torch.no_grad():
        found: torch.Tensor = module.eval()(input_ids=torch.tensor([[5, 9, 7, 31, 8]])).logits
    return found


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=gpu_finetune.SHAPES, default="0.6b")
    parser.add_argument("--batch", type=int, default=2, help="rows of a shard")
    parser.add_argument("--shards", type=int, default=4, help="shards of a batch")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--compile", choices=("true", "false"), default="true")
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--run-s", type=float, default=600.0, help="the most for one run")
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--recompute", choices=("none", "blocks"), default="none")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, help="NAME or NAME:RANKS")
    parser.add_argument("--check", action="store_true")
    given, began = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="entrenar-strategies-") as name:
        folder = Path(name)
        gpu_finetune.checkpoint(folder / "model", given.shape)
        number = given.batch * given.shards * given.steps
        gpu_finetune.rows(folder / "rows.jsonl", number, given.tokens)
        seen: dict[str, torch.Tensor] = {}
        if given.check:
            print(json.dumps({"alone": run(folder, "ddp_canonical", 1, given)}), flush=True)
            seen["alone"] = logits(folder, folder / "ddp_canonical-1", given.method)
        results: dict[str, dict[str, Any]] = {}
        for wanted in given.strategies:
            strategy, _, number_of_ranks = wanted.partition(":")
            ranks = int(number_of_ranks or given.ranks)
            if time.monotonic() - began > given.limit_s:
                print(json.dumps({"strategy": strategy, "ranks": ranks, "skipped": True}))
                continue
            found = results[f"{strategy}:{ranks}"] = run(folder, strategy, ranks, given)
            if given.check and "error" not in found:
                own = logits(folder, folder / f"{strategy}-{ranks}", given.method)
                found["logits_differ_by"] = {
                    name: float((own - one).norm() / one.norm()) for name, one in seen.items()
                }
                seen[strategy] = own
            print(json.dumps({"strategy": strategy, "ranks": ranks, **found}), flush=True)
        print(json.dumps(compared(results, given.ranks)), flush=True)


def compared(results: dict[str, dict[str, Any]], ranks: int) -> dict[str, Any]:
    """Return each speed relative to `ddp`, of `ddp_canonical` to one rank, and its digests."""
    speeds = {name: one["tokens_per_s"] for name, one in results.items() if "error" not in one}
    alone, both = (f"ddp_canonical:{number}" for number in (1, ranks))
    found: dict[str, Any] = {}
    if ddp := speeds.get(f"ddp:{ranks}"):
        found["to_ddp"] = {name: round(speed / ddp, 3) for name, speed in speeds.items()}
    if alone in speeds and both in speeds:
        found["canonical_speedup"] = round(speeds[both] / speeds[alone], 3)
        found["one_digest"] = results[both]["digest"] == results[alone]["digest"]
    return found


if __name__ == "__main__":
    main()
