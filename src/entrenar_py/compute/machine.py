"""The versions of this machine's libraries, and all its backends, each opened and tested."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from entrenar_py import compute as backends
from entrenar_py.compute import adapters, chain, on_torch
from entrenar_py.shared import process
from entrenar_py.shared.errors import BackendUnavailable


@dataclass(frozen=True, kw_only=True)
class Found:
    """One backend by its `--backend` name; `reason` says why it doesn't work, "" if it does.

    `facts` are reported by its library: limits, features, memory in bytes.
    """

    name: str
    serves: bool
    device: str = ""
    software: bool = False
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


NONE = "not installed"
PACKAGES = (
    *("triton", "wgpu", "transformers", "peft", "accelerate", "lightning"),
    "nvidia-cudnn-frontend",
)
# The limits of an adapter that restrict the size of a step, in bytes, invocations and workgroups.
LIMITS = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-storage-buffers-per-shader-stage",
    "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroups-per-dimension",
)
# The files with a control group's memory limit and use, for version 2 and version 1.
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def versions() -> dict[str, str]:
    """Return the version of each component, as reported by the component itself."""
    by_part = dict(process.environment())
    by_part.pop("wgpu_adapter", None)
    by_part |= {name: _version(name) for name in PACKAGES}
    by_part["wgpu_native"] = _wgpu_native()
    if by_part["wgpu_native"] != NONE and (failure := adapters.triton_failure()):
        by_part["triton"] += f", which can't be imported: {failure}"
    by_part["cuda runtime"] = str(torch.version.cuda or "none: torch is built without CUDA")
    by_part["nccl"] = _nccl()
    by_part["gloo"] = "in torch" if dist.is_available() and dist.is_gloo_available() else NONE
    return by_part


def found() -> list[Found]:
    """Return a record for the CPU, every GPU of torch and every wgpu adapter, working or not."""
    return [*_examined("cpu", _host_memory()), *_cuda(), *_wgpu()]


def free_bytes(name: str) -> int | None:
    """Return the free bytes of the device of backend `name`; None if it doesn't report them."""
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return _host_memory().get("free bytes")
    if kind == "cuda" and torch.cuda.is_available():
        return torch.cuda.mem_get_info(int(index) if index else None)[0]
    return None


def _host_memory() -> dict[str, int]:
    """Return the bytes of memory that processes here may use, and the free bytes.

    A limit of the control group counts. The result is empty if the kernel reports neither.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    kilobytes = {name: int(rest.split()[0]) for name, rest in (item.split(":") for item in lines)}
    total, free = 1024 * kilobytes["MemTotal"], 1024 * kilobytes["MemAvailable"]
    for limit, used in _CGROUPS:
        try:
            limit_bytes, used_bytes = (int(item.read_text("ascii")) for item in (limit, used))
        except (OSError, ValueError):  # this version is absent, or the value is "max"
            continue
        total, free = min(total, limit_bytes), min(free, max(limit_bytes - used_bytes, 0))
    return {"memory bytes": total, "free bytes": free}


def _cuda() -> Iterator[Found]:
    count = torch.cuda.device_count()
    if not count:
        yield from _examined("cuda", {})
    for index in range(count):
        name = f"cuda:{index}"
        try:
            about = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
        # The GPU is visible, but doesn't start: in use by another process, or lost.
        except RuntimeError as error:
            yield Found(name=name, serves=False, reason=str(error))
            continue
        facts = {
            "compute capability": f"{about.major}.{about.minor}",
            "memory bytes": total,
            "free bytes": free,
            "multiprocessors": about.multi_processor_count,
            "compiler problem": on_torch.compiler_problem(),
        }
        yield from _examined(name, facts)


def _wgpu() -> Iterator[Found]:
    try:
        there = adapters.found()
    except BackendUnavailable as error:
        yield Found(name="wgpu", serves=False, reason=str(error))
        return
    if not there:
        yield from _examined("wgpu", {})
    for index, adapter in enumerate(there):
        facts: dict[str, Any] = {
            "driver": adapter.info["description"],
            "kind": adapter.info["adapter_type"],
            "limits": {name: adapter.limits[name] for name in LIMITS},
            "features": sorted(adapter.features),
            # wgpu-native counts objects, and reports no bytes of buffers and no size of memory.
            "memory bytes": None,
        }
        yield from _examined(f"wgpu:{index}", facts)


def _examined(name: str, facts: dict[str, Any]) -> Iterator[Found]:
    """Open a backend and test a product against float64; yield the backend or its failure."""
    backend = None
    try:
        backend = backends.open_backend(name)
        chain.probe(backend)
    except chain.FAILURES as error:
        device = "" if backend is None else backend.device
        yield Found(name=name, serves=False, device=device, reason=str(error), facts=facts)
        return
    yield Found(
        name=name, serves=True, device=backend.device, software=backend.software, facts=facts
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NONE


def _wgpu_native() -> str:
    try:
        return str(adapters.native().__version__)
    except BackendUnavailable:
        return NONE


def _nccl() -> str:
    if not (dist.is_available() and dist.is_nccl_available()):
        return "none: torch is built without NCCL"
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
