"""Peaks of memory of each process of a layer pipeline, on this host's devices.

    python -m tests.benchmarks.stage_memory --hidden 1536 --backends cpu,cpu,cpu,cpu
    python -m tests.benchmarks.stage_memory --qwen3 0.6b --backends cuda,wgpu,cpu --cut 16,24 \\
        --alone

Trains a random model by a coordinator and a worker for each of `--backends`, in processes of their
own with files of their own. Peaks are polled: `resident` and `anonymous` from /proc/PID/status,
`gpu` from nvidia-smi, where there is one. `--alone` trains the same in one process on the first
backend, and prints how far losses are apart, and the adapters' second factors, which begin at 0.
Prints a JSON line for each process. CI does not run it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from entrenar_py.train.wire import pipeline
from tests.benchmarks import gpu_finetune, layer_pipeline
from tests.benchmarks.commands import ENTRENAR, steps
from tests.benchmarks.layer_pipeline import UNCOUNTED
from tests.train.wire_io.fakes import free_port

EVERY_S = 0.05  # between two looks at a process
SMI = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


class Peaks:
    """The most memory that processes had while they ran, in bytes, by name and kind."""

    def __init__(self, started: Mapping[str, subprocess.Popen[str]]) -> None:
        self._started = started
        self._found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._ended = threading.Event()
        watches = [self._resident, *([self._on_gpu] if shutil.which(SMI[0]) else [])]
        self._threads = [threading.Thread(target=self._poll, args=(one,)) for one in watches]
        for thread in self._threads:
            thread.start()

    def found(self) -> dict[str, dict[str, int]]:
        """Stop, and return the peaks."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        return {name: dict(kinds) for name, kinds in self._found.items()}

    def _poll(self, look: Any) -> None:
        while not self._ended.wait(EVERY_S):
            look()

    def _add(self, name: str, kind: str, num_bytes: int) -> None:
        self._found[name][kind] = max(self._found[name][kind], num_bytes)

    def _resident(self) -> None:
        for name, process in self._started.items():
            try:
                text = Path(f"/proc/{process.pid}/status").read_text("utf-8")
            except OSError:  # it has ended
                continue
            for kind, key in (("resident", "VmRSS"), ("anonymous", "RssAnon")):
                if told := re.search(rf"{key}:\s+(\d+) kB", text):
                    self._add(name, kind, 1024 * int(told[1]))

    def _on_gpu(self) -> None:
        names = {process.pid: name for name, process in self._started.items()}
        told = subprocess.run(SMI, capture_output=True, text=True, check=False).stdout
        for pid, mebibytes in re.findall(r"(\d+), (\d+)", told):
            if int(pid) in names:
                self._add(names[int(pid)], "gpu", 2**20 * int(mebibytes))


def checkpoint(folder: Path, given: argparse.Namespace) -> int:
    """Write the model in files of at most 100 MB; return the bytes of its weights."""
    import transformers

    if given.qwen3:
        gpu_finetune.checkpoint(folder, given.qwen3)
    else:
        layer_pipeline.checkpoint(folder, given)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    model.save_pretrained(folder, max_shard_size="100MB")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def by_stages(folder: Path, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Train by stages; return the peaks of each process, and the bytes that it fetched."""
    secret, address = folder / "secret", f"127.0.0.1:{free_port()}"
    secret.write_text(secrets.token_hex(16))
    backends = given.backends.split(",")
    plan = {"stages": stages(given)}
    section = {"listen": address, "secret_file": str(secret)}
    more = {"strategy": "layer_pipeline", "coordinator": section, **plan, **training(given)}
    path = layer_pipeline.settings(folder, "out", given, **more)
    command = [*ENTRENAR, "worker", "--coordinator", address, "--secret-file", str(secret)]
    commands = {"coordinator": [*ENTRENAR, "coordinator", str(path)]}
    for number, backend in enumerate(backends):
        name = f"worker{number}"
        commands[f"{name} {backend}"] = [*command, "--backend", backend, "--id", name]
    started = {}
    for name, one in commands.items():
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        env["XDG_CACHE_HOME"] = str(folder / f"cache of {name}")
        out = (folder / f"{name}.log").open("w")
        started[name] = subprocess.Popen(one, text=True, stdout=out, stderr=out, env=env)
    peaks = Peaks(started)
    codes = [one.wait() for one in started.values()]
    found: dict[str, dict[str, Any]] = dict(peaks.found())
    for name, record in found.items():
        told = (folder / f"{name}.log").read_text("utf-8")
        if any(codes):
            print(told, flush=True)
        record["fetched"] = sum(map(int, re.findall(r"fetches \d+ files, (\d+) bytes", told)))
    if any(codes):
        raise SystemExit(f"processes ended with {codes}")
    return found


def stages(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the section `stages` of the configuration: equal ones without `--cut`."""
    num_blocks = gpu_finetune.SHAPES[given.qwen3]["num_hidden_layers"] if given.qwen3 else None
    backends, last = given.backends.split(","), num_blocks or given.blocks
    if given.cut:
        ends = [0, *map(int, given.cut.split(",")), last]
    else:
        ends = [number * last // len(backends) for number in range(len(backends) + 1)]
    return [
        {"layers": [ends[number], ends[number + 1]], "worker": f"worker{number}", "backend": kind}
        for number, kind in enumerate(backends)
    ]


def training(given: argparse.Namespace) -> dict[str, Any]:
    """Return what both configurations say beside `layer_pipeline.settings`."""
    return {"precision": given.precision} if given.precision else {}


def alone(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Train in one process; return how far the two runs are apart."""
    path = layer_pipeline.settings(folder, "alone", given, **training(given))
    command = [*ENTRENAR, "finetune", str(path), "--backend", given.backends.split(",")[0]]
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
    runs = [folder / name for name in ("out", "alone")]
    ours, theirs = ([one["loss"] for one in steps(run)] for run in runs)
    pairs = [load_file(run / "adapter_model.safetensors") for run in runs]
    second = [name for name in pairs[1] if "lora_B" in name]
    off = sum(float(np.square(pairs[0][name] - pairs[1][name]).sum()) for name in second)
    norm = sum(float(np.square(pairs[1][name]).sum()) for name in second)
    return {
        "losses_apart": max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)),
        "adapters_apart": (off / norm) ** 0.5,
        "step_ms_alone": round(median(one["step_ms"] for one in steps(runs[1])[UNCOUNTED:]), 1),
    }


def busy_ms(folder: Path) -> list[float]:
    """Return how long each stage computes in a step."""
    found: dict[str, list[float]] = defaultdict(list)
    for step in steps(folder / "out")[UNCOUNTED:]:
        for rank, times_us in step["passes_us"].items():
            passes = pipeline.decode(times_us)
            found[rank].append(sum(one.ended - one.began for one in passes) / 1000)
    return [round(median(found[rank]), 1) for rank in sorted(found, key=int)]


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--qwen3", choices=tuple(gpu_finetune.SHAPES), help="instead of a Llama")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--backends", default="cpu,cpu,cpu,cpu")
    parser.add_argument("--cut", help="where stages begin but the first, as 4,8; or equal ones")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1, help="rows of a shard")
    parser.add_argument("--shards", type=int, default=4, help="shards of a batch")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--precision", help="of products, as bf16; float32 without")
    parser.add_argument("--alone", action="store_true", help="train in one process, too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="entrenar-memory-") as name:
        folder = Path(name)
        weights = checkpoint(folder / "model", given)
        gpu_finetune.rows(
            folder / "rows.jsonl", given.rows * given.shards * given.steps, given.tokens
        )
        for process, record in by_stages(folder, given).items():
            print(json.dumps({"process": process, **record}), flush=True)
        step_ms = median(one["step_ms"] for one in steps(folder / "out")[UNCOUNTED:])
        record = {"weights": weights, "step_ms": round(step_ms, 1), "busy_ms": busy_ms(folder)}
        print(json.dumps(record), flush=True)
        if given.alone:
            print(json.dumps(alone(folder, given)), flush=True)


if __name__ == "__main__":
    main()
