"""Float32 products on a GPU through wgpu beside torch's (cuBLAS, no TF32), in the same run.

    python tests/benchmarks/gpu_products.py
    python tests/benchmarks/gpu_products.py --shapes square-4096 --variants chosen,128x128x8/8x8

One JSON line each. `ms` is the GPU's time of one product: of as many in a row as take `ROUND_S`,
each after the one before, the fastest of three rounds. Ours are the dispatches of one compute pass,
by the timestamps at its beginning and end (`clock` says wall where an adapter has no timestamps:
then with the submission). cuBLAS's are the nodes of one CUDA graph, by the events around its
replay, so that on neither side a host is in between. `of_cublas` is cuBLAS's time by ours; null
without CUDA.

Every result is compared with float64 in every element: `of_bound` is the largest part of the bound
that rounding explains (docs/numerics.md) that was used up, and a result past it is an error.

A variant is `chosen` (what a shape gets by itself) or m x n x k / thread_m x thread_n and any of:
s8 (8 groups of threads share k), double (two copies of the tiles).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entrenar_py.compute import adapters, products
from entrenar_py.compute.wgpu.device import LIMITS, limits_of
from entrenar_py.compute.wgpu.product import Kernel, product_kernel
from entrenar_py.compute.wgpu.tiles import Layout, Product, Tiling, choose
from entrenar_py.shared.errors import BackendUnavailable

wgpu = adapters.library()

# name: m, k, n, form (n: as it lies row by row, t: transposed; a, then b), batches
SHAPES = {
    "square-4096-nn": (4096, 4096, 4096, "nn", 1),
    "square-4096-nt": (4096, 4096, 4096, "nt", 1),
    "square-4096-tn": (4096, 4096, 4096, "tn", 1),
    "square-1024-nn": (1024, 1024, 1024, "nn", 1),
    "square-1024-nt": (1024, 1024, 1024, "nt", 1),
    "mlp-up": (2048, 1024, 3072, "nt", 1),
    "mlp-up-dx": (2048, 3072, 1024, "nn", 1),
    "mlp-up-dw": (3072, 2048, 1024, "tn", 1),
    "mlp-down": (2048, 3072, 1024, "nt", 1),
    "mlp-down-dx": (2048, 1024, 3072, "nn", 1),
    "projection": (2048, 1024, 1024, "nt", 1),
    "projection-dx": (2048, 1024, 1024, "nn", 1),
    "projection-dw": (1024, 2048, 1024, "tn", 1),
    "lora-a": (2048, 1024, 16, "nt", 1),
    "lora-b": (2048, 16, 1024, "nt", 1),
    "lora-a-dw": (16, 2048, 1024, "tn", 1),
    "lora-b-dw": (1024, 2048, 16, "tn", 1),
    "lora-b-dx": (2048, 1024, 16, "nn", 1),
    "attention-scores": (512, 64, 512, "nt", 64),
    "attention-mix": (512, 512, 64, "nn", 64),
    "ragged": (1021, 1031, 1019, "nt", 1),
    "small": (256, 1024, 256, "nt", 1),
}
LARGE, MEDIUM = "128x128x16/8x8", "64x64x16/8x4"
VARIANTS = {
    "square-4096-nn": (LARGE, f"{MEDIUM}/double", "128x256x8/8x16"),
    "square-4096-nt": (LARGE, f"{MEDIUM}/double", "128x256x8/8x16"),
    "square-4096-tn": (LARGE, f"{MEDIUM}/double", "128x256x8/8x16"),
    "square-1024-nn": (MEDIUM, "64x64x16/8x8"),
    "square-1024-nt": (MEDIUM, "64x64x16/8x8"),
    "mlp-up": (LARGE, f"{MEDIUM}/double"),
    "mlp-up-dx": (f"{LARGE}/double", MEDIUM),
    "mlp-up-dw": (f"{LARGE}/double", MEDIUM),
    "mlp-down": (f"{LARGE}/double", MEDIUM),
    "mlp-down-dx": (LARGE, f"{MEDIUM}/double"),
    "projection": (f"{LARGE}/double", MEDIUM),
    "projection-dx": (f"{LARGE}/double", MEDIUM),
    "lora-a": ("16x16x32/4x4/s8", "16x16x32/4x4/s8/double"),
    "lora-b": ("64x64x16/4x4", "32x32x8/4x4"),
    "lora-a-dw": ("16x16x32/4x4/s8", "16x16x32/4x4/s8/double"),
    "lora-b-dw": ("16x16x32/4x4/s8", "16x16x32/4x4/s8/double"),
    "attention-scores": (MEDIUM, f"{LARGE}/double"),
    "attention-mix": (MEDIUM,),
    "small": ("32x32x8/4x4", "32x32x16/4x4/s4"),
}
ROUND_S = 0.02
REPEATS_MAX = 2000


def parse(name: str) -> Tiling:
    """The tiling that a variant's name describes."""
    tile, thread, *rest = name.split("/")
    m, n, k = map(int, tile.split("x"))
    thread_m, thread_n = map(int, thread.split("x"))
    more: dict[str, Any] = {}
    for flag in rest:
        more |= {"double": True} if flag == "double" else {"split": int(flag.removeprefix("s"))}
    return Tiling(m=m, n=n, k=k, thread_m=thread_m, thread_n=thread_n, **more)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One product: its operands, in wgpu's buffers too, and how long cuBLAS takes."""

    name: str
    product: Product
    a: Tensor  # [batches, m, k], in its memory layout; on CUDA if there is one
    b: Tensor
    buffers: list[Any]
    peer_ms: float | None

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        one = self.product
        return 2.0 * one.num_batches * one.m * one.k * one.n

    def clear(self, adapter: Adapter) -> None:
        """Fills the result with zeros."""
        encoder = adapter.gpu.create_command_encoder()
        encoder.clear_buffer(self.buffers[2])
        adapter.gpu.queue.submit([encoder.finish()])


class Adapter:
    """The best adapter, opened with all it has."""

    def __init__(self) -> None:
        adapter = adapters.choose(adapters.found(), 0)
        self.stamps = "timestamp-query" in adapter.features
        self.gpu = adapter.request_device_sync(
            required_limits={name: adapter.limits[name] for name in LIMITS},
            required_features=["timestamp-query"] if self.stamps else [],
        )
        self.limits = limits_of(self.gpu)
        print(json.dumps({"adapter": dict(adapter.info), "limits": vars(self.limits)}), flush=True)

    def upload(self, values: Tensor) -> Any:
        """A storage buffer with the elements as they lie in memory."""
        data = values.numpy().reshape(-1)
        return self.gpu.create_buffer_with_data(data=data, usage=wgpu.BufferUsage.STORAGE)

    def compile(self, kernel: Kernel) -> tuple[Any, float]:
        """Pipeline, and seconds it took."""
        start = time.perf_counter()
        module = self.gpu.create_shader_module(code=kernel.source)
        pipeline = self.gpu.create_compute_pipeline(
            layout="auto", compute={"module": module, "entry_point": "main"}
        )
        return pipeline, time.perf_counter() - start

    def run(self, pipeline: Any, kernel: Kernel, group: Any, repeats: int) -> float:
        """Seconds of so many dispatches in one pass: by the GPU's clock, else by the wall."""
        usage = wgpu.BufferUsage
        encoder = self.gpu.create_command_encoder()
        found = self.gpu.create_buffer(size=16, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
        writes = None
        if self.stamps:
            queries = self.gpu.create_query_set(type="timestamp", count=2)
            writes = {
                "query_set": queries,
                "beginning_of_pass_write_index": 0,
                "end_of_pass_write_index": 1,
            }
        compute = encoder.begin_compute_pass(timestamp_writes=writes)
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group)
        for _ in range(repeats):
            compute.dispatch_workgroups(*kernel.workgroups)
        compute.end()
        if self.stamps:
            encoder.resolve_query_set(queries, 0, 2, found, 0)
        commands = encoder.finish()
        start = time.perf_counter()
        self.gpu.queue.submit([commands])
        stamps = np.frombuffer(self.gpu.queue.read_buffer(found), dtype=np.uint64)  # and waits
        wall = time.perf_counter() - start
        # A tick is 1 ns on NVIDIA and on llvmpipe.
        return float(stamps[1] - stamps[0]) * 1e-9 if self.stamps else wall


def prepare(name: str, adapter: Adapter) -> Case:
    """Operands from a fixed seed, uniform in [-1, 1]."""
    m, k, n, form, batches = SHAPES[name]
    draws = torch.Generator().manual_seed(0)
    a = torch.rand(batches, *((k, m) if form[0] == "t" else (m, k)), generator=draws) * 2 - 1
    b = torch.rand(batches, *((n, k) if form[1] == "t" else (k, n)), generator=draws) * 2 - 1
    c_size = batches * m * n * 4
    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
    result = adapter.gpu.create_buffer(size=c_size, usage=usage)
    buffers = [adapter.upload(a), adapter.upload(b), result]
    a, b = (x.mT if way == "t" else x for x, way in zip((a, b), form, strict=True))
    layouts = [Layout(batch=(x.stride(0),), row=x.stride(1), column=x.stride(2)) for x in (a, b)]
    product = Product(
        batch=(batches,),
        m=m,
        k=k,
        n=n,
        a=layouts[0],
        b=layouts[1],
        c=Layout(batch=(m * n,), row=n, column=1),
    )
    if torch.cuda.is_available():
        a, b = a.cuda(), b.cuda()  # keeps the strides
    return Case(name=name, product=product, a=a, b=b, buffers=buffers, peer_ms=peer_ms(a, b))


def peer_ms(a: Tensor, b: Tensor) -> float | None:
    """Milliseconds of torch's product on CUDA; None without."""
    if not a.is_cuda:
        return None
    if a.shape[0] == 1:
        a, b = a[0], b[0]
    out = a @ b

    def timed(repeats: int) -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                torch.matmul(a, b, out=out)
        graph.replay()  # the first one uploads it
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    return least(timed)[0]


def measure(case: Case, variant: str, adapter: Adapter) -> dict[str, object]:
    """One line: times, ratios, and how much of its bound the result uses."""
    tiling = choose(case.product, adapter.limits) if variant == "chosen" else parse(variant)
    kernel = product_kernel(case.product, adapter.limits, tiling=tiling)
    pipeline, compile_s = adapter.compile(kernel)
    group = adapter.gpu.create_bind_group(
        layout=pipeline.get_bind_group_layout(0),
        entries=[{"binding": i, "resource": {"buffer": x}} for i, x in enumerate(case.buffers)],
    )

    def timed(count: int) -> float:
        return adapter.run(pipeline, kernel, group, count)

    case.clear(adapter)  # or a kernel that writes nothing would show its predecessor's result
    timed(1)
    used = of_bound(case, adapter)
    if used > 1:
        raise SystemExit(f"{case.name} by {variant}: {used} of what rounding explains")
    ms, repeats = least(timed)
    return {
        "shape": case.name,
        "variant": variant,
        "tiling": str(tiling) if variant == "chosen" else None,
        "tflops": round(case.flops / ms / 1e9, 2),
        "of_cublas": case.peer_ms and round(case.peer_ms / ms, 3),
        "ms": round(ms, 5),
        "cublas_ms": case.peer_ms and round(case.peer_ms, 5),
        "clock": "gpu" if adapter.stamps else "wall",
        "of_bound": round(used, 6),
        "compile_s": round(compile_s, 3),
        "repeats": repeats,
    }


def least(timed: Callable[[int], float]) -> tuple[float, int]:
    """Milliseconds of one product, in the fastest of three rounds, and how many a round had."""
    one = min(timed(4) for _ in range(2)) / 4
    repeats = max(2, min(REPEATS_MAX, int(ROUND_S / one)))
    return min(timed(repeats) for _ in range(3)) / repeats * 1e3, repeats


def of_bound(case: Case, adapter: Adapter) -> float:
    """The largest part of its bound that an element of the result uses."""
    one = case.product
    data = np.frombuffer(adapter.gpu.queue.read_buffer(case.buffers[2]), dtype=np.float32).copy()
    result = torch.from_numpy(data).reshape(-1, one.m, one.n).to(case.a.device)
    worst = 0.0
    for c, a, b in zip(result, case.a, case.b, strict=True):
        found = products.compare(c, a, b, unit_roundoff=2.0**-23)
        worst = max(worst, found.error / found.bound if found.finite else float("inf"))
    return worst


def main() -> None:
    """Cases in order until the time is up; what was left out is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES), help="beginnings of names")
    parser.add_argument("--variants", default="", help="instead of each shape's own")
    parser.add_argument("--seconds", type=float, default=90, help="no case begins after that")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    adapter = Adapter()
    cases: dict[str, Case] = {}
    left = []
    for name, variant in wanted(given.shapes, given.variants):
        if time.monotonic() > end:
            left.append(f"{name} {variant}")
            continue
        if name not in cases:
            cases[name] = prepare(name, adapter)
        try:
            line = measure(cases[name], variant, adapter)
        except (BackendUnavailable, wgpu.GPUError, RuntimeError) as error:  # too large for it
            line = {"shape": name, "variant": variant, "error": str(error)[:300]}
        print(json.dumps(line), flush=True)
    print(json.dumps({"left_out": left}), flush=True)


def wanted(shapes: str, variants: str) -> list[tuple[str, str]]:
    """Pairs of shape and variant: what each shape gets by itself first, then each shape's own."""
    names = [name for name in SHAPES if name.startswith(tuple(shapes.split(",")))]
    if variants:
        return [(name, one) for name in names for one in variants.split(",")]
    own = [(name, one) for name in names for one in VARIANTS.get(name, ())]
    return [*((name, "chosen") for name in names), *own]


if __name__ == "__main__":
    main()
