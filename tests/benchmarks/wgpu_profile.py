"""The parts of a LoRA step on wgpu, by the GPU's clock: which dispatches take the time.

    python -m tests.benchmarks.wgpu_profile --shape 0.6b --batch 4 --tokens 512

The step of `wgpu_frozen`, every dispatch in a compute pass of its own between two timestamps; the
passes cost time, too, so `gpu_ms` is more than a step takes. Prints as JSON the step's time, the
host's share of it, and then a line for each place of the model and kind of kernel: dispatches,
milliseconds, and the largest one's workgroups. CI does not run it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from entrenar_py.compute.wgpu import WgpuBackend
from entrenar_py.compute.wgpu.device import open_device
from entrenar_py.compute.wgpu.program import Program
from entrenar_py.train.arithmetic.engine import Engine, no_dropout
from tests.benchmarks import gpu_finetune, wgpu_frozen

RUNS = 5
QUERIES = 4096  # of one query set, at most


def times(program: Program) -> list[float]:
    """Return the GPU's milliseconds of each dispatch, in a run on the inputs of the last one."""
    import wgpu

    gpu, found = program.device.handle, []
    for start in range(0, len(program.dispatches), QUERIES // 2):
        part = program.dispatches[start : start + QUERIES // 2]
        queries = gpu.create_query_set(type="timestamp", count=2 * len(part))
        usage = wgpu.BufferUsage
        stamps = gpu.create_buffer(size=16 * len(part), usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
        encoder = gpu.create_command_encoder()
        for number, dispatch in enumerate(part):
            writes = {
                "query_set": queries,
                "beginning_of_pass_write_index": 2 * number,
                "end_of_pass_write_index": 2 * number + 1,
            }
            compute = encoder.begin_compute_pass(timestamp_writes=writes)
            compute.set_pipeline(dispatch.pipeline)
            compute.set_bind_group(0, dispatch.group)
            compute.dispatch_workgroups(*dispatch.workgroups)
            compute.end()
        encoder.resolve_query_set(queries, 0, 2 * len(part), stamps, 0)
        gpu.queue.submit([encoder.finish()])
        pairs = np.frombuffer(gpu.queue.read_buffer(stamps), np.uint64).reshape(-1, 2)
        found += [float(end - begin) / 1e6 for begin, end in pairs.astype(np.int64)]
    return found


def kind_of(source: str) -> str:
    """Return what a kernel is, as far as its text shows."""
    if "var<workgroup>" not in source:
        return "elements"
    return "product" if "fma(" in source else "rows"


def measure(given: argparse.Namespace) -> None:
    """Print all figures."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.environ["XDG_CACHE_HOME"] = made
        gpu_finetune.checkpoint(folder, given.shape)
        gpu_finetune.rows(folder / "rows.jsonl", given.batch, given.tokens)
        workload = wgpu_frozen.workload_of(folder, given.kind, given.tokens)
        backend = WgpuBackend(open_device(0, ["timestamp-query"]), name="wgpu")
        engine = Engine(workload, backend, workload.initial(np.random.default_rng(0)), scale=1.0)
        steps, encoded = [], []
        for number in range(RUNS + 1):
            started = time.perf_counter()
            engine.shard(range(given.batch), accumulation=1, drop=no_dropout)
            steps.append(1e3 * (time.perf_counter() - started))
            (program,) = backend.programs.of(workload).programs.values()
            encoded.append(1e3 * program.counts.encode_s)
            if number == 0:
                print(json.dumps({"device": backend.device, "first_s": steps[0] / 1e3}), flush=True)
    spent = times(program)
    shown: dict[str, Any] = {
        "step_ms": round(median(steps[1:]), 2),
        "encode_ms": round((encoded[-1] - encoded[0]) / RUNS, 2),
        "dispatches": len(spent),
        "gpu_ms": round(sum(spent), 2),
    }
    print(json.dumps(shown), flush=True)
    parts: dict[tuple[str, str], list[tuple[float, Any]]] = defaultdict(list)
    for step, one in zip(program.steps, spent, strict=True):
        parts[step.line, kind_of(step.source)].append((one, step.workgroups))
    ordered = sorted(parts.items(), key=lambda part: -sum(one for one, _ in part[1]))
    for (line, kind), found in ordered[: given.rows]:
        total, (largest, groups) = sum(one for one, _ in found), max(found)
        told = {"ms": round(total, 2), "dispatches": len(found), "largest_ms": round(largest, 3)}
        print(json.dumps({**told, "workgroups": groups, "kind": kind, "line": line}), flush=True)


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=gpu_finetune.SHAPES, default="tiny")
    parser.add_argument("--kind", choices=wgpu_frozen.KINDS, default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rows", type=int, default=40)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
