"""Checks of the settings that select kernels, and with them the bits of a result."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from entrenar_py.shared.errors import UsageError

# The values with which cuBLAS gives the same bits in every run, by NVIDIA's documentation.
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")


def require_deterministic() -> None:
    """Raise UsageError, listing all problems, unless kernels give the same bits in every run."""
    problems = []
    if not torch.are_deterministic_algorithms_enabled():
        problems.append(
            "torch.are_deterministic_algorithms_enabled() = False: "
            "call torch.use_deterministic_algorithms(True)"
        )
    elif torch.is_deterministic_algorithms_warn_only_enabled():
        problems.append(
            "use_deterministic_algorithms(..., warn_only=True) only warns of other kernels: "
            "call torch.use_deterministic_algorithms(True)"
        )
    if torch.backends.cudnn.benchmark:
        problems.append(
            "torch.backends.cudnn.benchmark = True selects the kernels that are fastest in this "
            "run: set it to False"
        )
    workspace = os.environ.get(_WORKSPACE)
    if torch.cuda.is_available() and workspace not in _WORKSPACES:
        problems.append(
            f"{_WORKSPACE}={workspace or ''}: allowed are {' and '.join(_WORKSPACES)}; "
            "set it before the process starts"
        )
    if problems:
        raise UsageError("kernels may give other bits in another run:\n" + "\n".join(problems))


def switches() -> dict[str, object]:
    """Return the settings of this process that select kernels. Cheap enough for every step."""
    backends: Any = torch.backends  # half of it has no types
    cuda, cudnn, matmul = backends.cuda, backends.cudnn, backends.cuda.matmul
    return {
        "torch.are_deterministic_algorithms_enabled()": (
            torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled()
        ),
        "torch.backends.cudnn.benchmark": cudnn.benchmark,
        "torch.backends.cudnn.enabled": cudnn.enabled,
        "torch.backends.cuda.matmul.fp32_precision": matmul.fp32_precision,
        "torch.backends.cudnn.conv.fp32_precision": cudnn.conv.fp32_precision,
        "torch.backends.cudnn.rnn.fp32_precision": cudnn.rnn.fp32_precision,
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
            matmul.allow_bf16_reduced_precision_reduction
        ),
        "torch.backends.cuda.flash_sdp_enabled()": cuda.flash_sdp_enabled(),
        "torch.backends.cuda.mem_efficient_sdp_enabled()": cuda.mem_efficient_sdp_enabled(),
        "torch.backends.cuda.math_sdp_enabled()": cuda.math_sdp_enabled(),
        "torch.backends.cuda.cudnn_sdp_enabled()": cuda.cudnn_sdp_enabled(),
        "torch.get_num_threads()": torch.get_num_threads(),
        _WORKSPACE: os.environ.get(_WORKSPACE),
    }


def surroundings(device: torch.device) -> dict[str, object]:
    """Return the versions and the hardware that select kernels, to check once, at the start."""
    facts: dict[str, object] = {
        "torch.__version__": str(torch.__version__),
        "torch.version.cuda": torch.version.cuda,
        "device.type": device.type,
    }
    if device.type == "cuda":
        facts["torch.cuda.get_device_name()"] = torch.cuda.get_device_name(device)
        facts["torch.backends.cudnn.version()"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        facts["torch.backends.cuda.preferred_blas_library()"] = str(
            torch.backends.cuda.preferred_blas_library()
        )
    else:
        facts["torch.backends.cpu.get_cpu_capability()"] = torch.backends.cpu.get_cpu_capability()
    return facts


def require_same(facts: dict[str, object], group: dist.ProcessGroup) -> None:
    """Raise UsageError, on all ranks of `group`, unless `facts` are the same on all of them."""
    everyone: list[dict[str, object]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, facts, group=group)
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs.get(name) != value:
                raise UsageError(
                    f"{name} = {theirs.get(name)!r} on rank {rank} and {value!r} on rank 0: "
                    "ranks with other settings may get other bits; use the same on all ranks"
                )


def share_memory(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Return whether all ranks of `group` have GPUs of one host that can access each other.

    The result is the same on all ranks.
    """
    if device.type != "cuda" or dist.get_world_size(group) == 1:
        return False
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    reached = [i for i in others if torch.cuda.can_device_access_peer(device, i)]
    own = (socket.gethostname(), device.index, {device.index, *reached})
    everyone: list[tuple[str, int, set[int]]] = [own for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, own, group=group)
    indices = {index for _, index, _ in everyone}
    # If each rank sees only its own GPU, all have index 0, and access can't be determined.
    distinct = len(indices) == len(everyone)
    one_host = len({host for host, _, _ in everyone}) == 1
    return one_host and distinct and all(indices <= peers for _, _, peers in everyone)


def require_unchanged(facts: dict[str, object]) -> None:
    """Raise UsageError unless `switches` returns the values in `facts`, taken earlier."""
    now = switches()
    for name, value in facts.items():
        if now[name] != value:
            raise UsageError(
                f"{name} = {now[name]!r}, and was {value!r} when canonical_all_reduce was called: "
                "kernels may give other bits now; don't change it during training"
            )
