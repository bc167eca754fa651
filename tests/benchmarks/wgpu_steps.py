"""A whole training step of a decoder on wgpu: one submission, and beside it one per operation.

    python -m tests.benchmarks.wgpu_steps                     # small: for software Vulkan
    python -m tests.benchmarks.wgpu_steps 1024 12 4 512       # hidden, blocks, sequences, positions

Low-rank adapters train, everything else is frozen. Where torch has CUDA the same step is timed
there in float32 (no TF32). Prints one JSON object; every number in it was measured in this run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.compute.wgpu.device import Device, open_device
from entrenar_py.compute.wgpu.emitter import Buffer
from entrenar_py.compute.wgpu.program import Program, compile_step
from entrenar_py.train.arithmetic import decoder

VOCABULARY, HEAD, RANK = 8192, 64, 16
RUNS = 5


class Decoder:
    """`decoder`'s blocks at a size of one's own, heads of 64, adapters at queries and values."""

    def __init__(self, hidden: int, blocks: int, positions: int) -> None:
        torch.manual_seed(0)
        self.blocks, self.positions, self.heads = blocks, positions, hidden // HEAD
        kv = max(1, self.heads // 2) * HEAD
        self.frozen = {"embedding": torch.randn(VOCABULARY, hidden) * hidden**-0.5}
        self.trained: dict[str, Tensor] = {}
        for index in range(blocks):
            shapes = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden)}
            shapes |= {"o": (hidden, hidden), "gate": (3 * hidden, hidden)}
            shapes |= {"up": (3 * hidden, hidden), "down": (hidden, 3 * hidden)}
            for name, (rows, columns) in shapes.items():
                self.frozen[f"{index}.{name}"] = torch.randn(rows, columns) * columns**-0.5
                if name in "qv":
                    self.trained[f"{index}.{name}.a"] = torch.randn(RANK, columns) * columns**-0.5
                    self.trained[f"{index}.{name}.b"] = torch.randn(rows, RANK) * 0.02
        half = HEAD // 2
        angles = torch.arange(positions)[:, None] * 10_000.0 ** -(torch.arange(half) / half)
        self.frozen |= {"cosine": angles.cos(), "sine": angles.sin()}

    def step(self, ids: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Loss and the gradients of the adapters; `tensors` are `trained`, then `frozen`."""
        leaves = [one.detach().requires_grad_() for one in tensors[: len(self.trained)]]
        w = dict(
            zip([*self.trained, *self.frozen], [*leaves, *tensors[len(leaves) :]], strict=True)
        )
        gain = torch.ones(1, device=ids.device)
        x = F.embedding(ids[:, :-1].reshape(-1), w["embedding"])
        for index in range(self.blocks):
            x = x + self._attention(w, index, decoder.rms_norm(x, gain), ids.shape[0])
            normed = decoder.rms_norm(x, gain)
            inner = F.silu(normed @ w[f"{index}.gate"].t()) * (normed @ w[f"{index}.up"].t())
            x = x + inner @ w[f"{index}.down"].t()
        logits = decoder.rms_norm(x, gain) @ w["embedding"].t()
        loss = F.cross_entropy(logits, ids[:, 1:].reshape(-1))
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    def _attention(self, w: dict[str, Tensor], index: int, x: Tensor, sequences: int) -> Tensor:
        def heads(name: str) -> Tensor:
            y = x @ w[f"{index}.{name}"].t()
            if f"{index}.{name}.a" in w:
                y = y + 2.0 * (x @ w[f"{index}.{name}.a"].t() @ w[f"{index}.{name}.b"].t())
            return y.reshape(sequences, self.positions, -1, HEAD).transpose(1, 2)

        q, k = (decoder.rotate(heads(name), w["cosine"], w["sine"]) for name in "qk")
        mixed = decoder.grouped_query_attention(q, k, heads("v"))
        return mixed.transpose(1, 2).reshape(x.shape[0], -1) @ w[f"{index}.o"].t()


def timed(run: Callable[[], Any]) -> list[float]:
    """Milliseconds of each of RUNS runs, sorted."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        times.append(round((time.perf_counter() - start) * 1000, 3))
    return sorted(times)


def run_apart(program: Program) -> None:
    """Every dispatch submitted alone, and what it wrote read back before the next one."""
    import wgpu

    gpu, usage = program.device.handle, wgpu.BufferUsage
    largest = max(step.writes.num_bytes for step in program.steps)
    staging = gpu.create_buffer(size=largest, usage=usage.MAP_READ | usage.COPY_DST)
    for dispatch, step in zip(program.dispatches, program.steps, strict=True):
        encoder = gpu.create_command_encoder()
        program.encode(encoder, [dispatch])
        _copy(encoder, program, step.writes, staging)
        program.submit(encoder)
        staging.map_sync(wgpu.MapMode.READ)
        staging.read_mapped(0, step.writes.num_bytes)
        staging.unmap()


def _copy(encoder: Any, program: Program, buffer: Buffer, staging: Any) -> None:
    memory, offset = program.places[buffer]
    encoder.copy_buffer_to_buffer(memory, offset, staging, 0, buffer.num_bytes)


def on_cuda(model: Decoder, inputs: list[Tensor], resident: list[Tensor]) -> list[float]:
    """torch's own time for the step, everything resident, loss and gradients back on the host."""
    torch.backends.cuda.matmul.allow_tf32 = False
    frozen = [one.cuda() for one in resident]

    def run() -> None:
        for one in model.step(*(one.cuda() for one in inputs), *frozen):
            one.cpu()

    run()
    return timed(run)


def measure(device: Device, hidden: int, blocks: int, sequences: int, positions: int) -> Any:
    """All of it, as one record."""
    model = Decoder(hidden, blocks, positions)
    ids = torch.randint(VOCABULARY, (sequences, positions + 1))
    inputs, resident = [ids, *model.trained.values()], list(model.frozen.values())
    arrays = [one.numpy() for one in inputs]
    record: dict[str, Any] = {
        "adapter": device.name,
        "hidden": hidden,
        "blocks": blocks,
        "tokens": sequences * positions,
    }
    programs = {}
    for name, fused in (("fused", True), ("apart", False)):
        start = time.perf_counter()
        program = programs[name] = compile_step(device, model.step, inputs, resident, fused=fused)
        compile_s, start = time.perf_counter() - start, time.perf_counter()
        found = program.run(arrays)
        record[name] = {
            "compile_s": round(compile_s, 3),
            "pipelines": program.counts.pipelines,
            "first_run_s": round(time.perf_counter() - start, 3),
            "dispatches": len(program.steps),
            "memory_mb": round(program.memory_bytes / 2**20, 1),
        }
        if fused:
            results = found
            record[name]["run_ms"] = timed(partial(program.run, arrays))
            counts = program.counts
            record[name]["encode_ms"] = round(1000 * counts.encode_s / counts.runs, 3)
            record[name]["submissions_a_run"] = counts.submissions / counts.runs
        else:
            record[name]["run_ms"] = timed(partial(run_apart, program))
    if torch.cuda.is_available():
        record["cuda_ms"] = on_cuda(model, inputs, resident)
        right = [o.cpu() for o in model.step(*(t.cuda() for t in [*inputs, *resident]))]
    else:
        right = list(model.step(*inputs, *resident))
    record["worst_difference"] = max(
        float(np.abs(one - r.numpy()).max() / r.abs().max())
        for one, r in zip(results, right, strict=True)
    )
    return record


if __name__ == "__main__":
    sizes = [int(one) for one in sys.argv[1:]] or [128, 2, 2, 32]
    print(json.dumps(measure(open_device(0), *sizes), indent=1))
