"""Checks of models, numbers and settings: before training, and some in every step."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

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
            "torch.backends.cudnn.benchmark = True selects kernels by their speed in "
            "this run: set it to False"
        )
    workspace = os.environ.get(_WORKSPACE)
    if torch.cuda.is_available() and workspace not in _WORKSPACES:
        problems.append(
            f"{_WORKSPACE}={workspace or ''}: allowed are {' and '.join(_WORKSPACES)}; "
            "set it before the process starts"
        )
    if problems:
        raise UsageError("kernels may give different bits in another run:\n" + "\n".join(problems))


def switches() -> dict[str, object]:
    """Return the settings of this process that select kernels. Cheap enough to call every step.

    torch's compiler isn't imported, which would take seconds. It begins as the environment says.
    """
    compiler = sys.modules.get("torch._inductor.config")
    from_environment = os.environ.get("TORCHINDUCTOR_DETERMINISTIC") == "1"
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
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
            matmul.allow_fp16_reduced_precision_reduction
        ),
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
            matmul.allow_bf16_reduced_precision_reduction
        ),
        "torch.backends.cuda.matmul.allow_fp16_accumulation": matmul.allow_fp16_accumulation,
        "torch.backends.cuda.flash_sdp_enabled()": cuda.flash_sdp_enabled(),
        "torch.backends.cuda.mem_efficient_sdp_enabled()": cuda.mem_efficient_sdp_enabled(),
        "torch.backends.cuda.math_sdp_enabled()": cuda.math_sdp_enabled(),
        "torch.backends.cuda.cudnn_sdp_enabled()": cuda.cudnn_sdp_enabled(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch._inductor.config.deterministic": getattr(
            compiler, "deterministic", from_environment
        ),
        _WORKSPACE: os.environ.get(_WORKSPACE),
    }


def surroundings(device: torch.device) -> dict[str, object]:
    """Return the versions and the hardware that select kernels. They are checked once."""
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
    """Raise UsageError on all ranks of `group` unless `facts` are the same on all of them."""
    everyone: list[dict[str, object]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, facts, group=group)
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs.get(name) != value:
                raise UsageError(
                    f"{name} = {theirs.get(name)!r} on rank {rank} and {value!r} on rank 0: "
                    "ranks with different settings may get different bits; use the same on all "
                    "ranks"
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
    # If each rank sees only its own GPU, every index is 0, and access can't be determined.
    distinct = len(indices) == len(everyone)
    one_host = len({host for host, _, _ in everyone}) == 1
    return one_host and distinct and all(indices <= peers for _, _, peers in everyone)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long a collective of `group` on `device` waits for another rank."""
    return group._get_backend(device).options._timeout


def require_unchanged(facts: dict[str, object]) -> None:
    """Raise UsageError unless `switches` still returns `facts`, which it returned earlier."""
    now = switches()
    for name, value in facts.items():
        if now[name] != value:
            raise UsageError(
                f"{name} = {now[name]!r}, and was {value!r} when the reducer was created: "
                "kernels may give different bits now; don't change it during training"
            )


DTYPES = (torch.float32, torch.bfloat16)  # in which sums over all micro-batches don't overflow


def require_wrapped(model: object) -> None:
    """Raise UsageError unless `model` is a DistributedDataParallel."""
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"model is a {type(model).__name__}: wrap it first, "
            "canonical_all_reduce(DistributedDataParallel(model), micro_batches=...)"
        )


def require_micro_batches(micro_batches: int) -> None:
    """Raise UsageError unless the tree over the micro-batches has all its leaves."""
    if not is_power_of_two(micro_batches):
        raise UsageError(
            f"micro_batches={micro_batches!r}: only a power of two has a tree that ranks can share "
            "evenly; use 1, 2, 4, 8 ..., the same for every world size"
        )


def require_even(world_size: int, *, otherwise: str) -> None:
    """Raise UsageError, with what else could be done, unless each rank can have one tree node."""
    if not is_power_of_two(world_size):
        raise UsageError(
            f"world_size={world_size}: a canonical reduction needs a power of two here; "
            f"start 1, 2, 4, 8 ... ranks, or {otherwise}"
        )


def require_numbers(*, micro_batches: int, world_size: int) -> None:
    """Raise UsageError unless there is a tree, and each rank has a micro-batch."""
    require_micro_batches(micro_batches)
    if world_size > micro_batches:
        raise UsageError(
            f"micro_batches={micro_batches} with world_size={world_size}: every rank needs a "
            f"micro-batch; cut the global batch into {world_size} or more micro-batches, or "
            "start fewer ranks"
        )


def require_model(model: DistributedDataParallel) -> Parameters:
    """Return the trainable parameters with their names.

    Raises UsageError if `model` isn't supported.
    """
    if model.parameters_to_ignore:
        raise UsageError(
            f"parameters_to_ignore={sorted(model.parameters_to_ignore)}: their gradients would not "
            "be reduced; freeze them, or let DistributedDataParallel reduce them"
        )
    _require_options(model)
    return require_parameters(model.module)


class Parameters(dict[Tensor, str]):
    """A model's trainable parameters with their names. Which ones they are must not change."""

    def __init__(self, model: torch.nn.Module) -> None:
        named = list(model.named_parameters())
        super().__init__((one, name) for name, one in named if one.requires_grad)
        self._frozen = [(one, name) for name, one in named if not one.requires_grad]
        self._norms = [
            (name, module) for name, module in model.named_modules() if _is_batch_norm(module)
        ]

    def require_unchanged(self) -> None:
        """Raise UsageError if a parameter was frozen or unfrozen, or a batch norm trains now."""
        frozen = [name for parameter, name in self.items() if not parameter.requires_grad]
        unfrozen = [name for parameter, name in self._frozen if parameter.requires_grad]
        for names, is_now in ((unfrozen, "requires a gradient"), (frozen, "is frozen")):
            if names:
                raise UsageError(
                    f"parameter {names[0]} {is_now} now, unlike when the reducer was created "
                    f"({len(names)} of {len(self) + len(self._frozen)} parameters): gradients are "
                    "added for those that were trainable then; set requires_grad before, and start "
                    "from a checkpoint to change it"
                )
        for name, module in self._norms:
            if module.training:
                raise UsageError(
                    f"module {name} is a {type(module).__name__} in training mode, and was not "
                    "when the reducer was created: its statistics depend on how micro-batches are "
                    "spread over ranks; call its eval() after each train() of the model"
                )


class Untrained:
    """A model's persistent buffers and frozen parameters, which no micro-batch may change.

    Buffers with persistent=False are taken for caches, which no checkpoint has. One that is None
    before a micro-batch may be filled in it. Most changes are seen by a tensor's version. Not all
    have one (through `.data`, by torch's kernel for batch norms), so the first micro-batch's bits
    are compared, too.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        buffers = [
            (f"buffer {place}.{name}".replace(" .", " "), module._buffers, name)
            for place, module in model.named_modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        frozen = [
            (f"frozen parameter {place}.{name}".replace(" .", " "), module._parameters, name)
            for place, module in model.named_modules()
            for name, one in module._parameters.items()
            if one is not None and not one.requires_grad
        ]
        self._places: list[tuple[str, dict[str, Any], str]] = [*buffers, *frozen]
        self._is_compared = False  # whether the first micro-batch has ended

    def note(self) -> None:
        """Note what they are now."""
        self._noted = [_tensor(held, name) for _, held, name in self._places]
        if not self._is_compared:
            self._sums = [_sum_of_bits(tensor) for tensor, _ in self._noted]

    def require_unchanged(self, shard: int) -> None:
        """Raise UsageError if micro-batch `shard` has changed one since `note`."""
        for (path, held, name), (tensor, version) in zip(self._places, self._noted, strict=True):
            now, version_now = _tensor(held, name)
            if tensor is not None and (now is not tensor or version_now != version):
                raise _changed(path, shard)
        if self._is_compared:
            return
        for (path, *_), (tensor, _), before in zip(
            self._places, self._noted, self._sums, strict=True
        ):
            after = _sum_of_bits(tensor)
            if before is not None and after is not None and bool(before != after):
                raise _changed(path, shard)
        self._is_compared = True
        self._sums.clear()


def _changed(path: str, shard: int) -> UsageError:
    return UsageError(
        f"micro-batch {shard} changed {path}: other ranks compute other micro-batches, so what "
        "they have, and what depends on it, would get different bits; change it after a commit, or "
        "freeze its module with eval(); a buffer that is only a cache can have persistent=False"
    )


def _tensor(held: dict[str, Any], name: str) -> tuple[Tensor | None, int]:
    """Return a tensor, and a number that grows if it is changed in place."""
    tensor = held.get(name)
    return tensor, 0 if tensor is None or tensor.is_inference() else tensor._version


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(tensor: Tensor | None) -> Tensor | None:
    """Return the sum of all elements' bits, int64 []. None if it is no plain tensor."""
    if tensor is None or type(tensor) not in (Tensor, torch.nn.Parameter):
        return None
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return None
    integer = _INTEGERS.get(tensor.element_size())
    if integer is None:
        return None
    return tensor.detach().contiguous().view(integer).sum(dtype=torch.int64)


def require_parameters(model: torch.nn.Module) -> Parameters:
    """Return the trainable parameters with their names.

    Raises UsageError if `model`, which is not wrapped, isn't supported.
    """
    parameters = Parameters(model)
    for parameter, name in parameters.items():
        if parameter.dtype not in DTYPES:
            raise UsageError(
                f"parameter {name} has dtype {parameter.dtype}: allowed are "
                f"{' and '.join(map(str, DTYPES))}: only in these do sums over all "
                "micro-batches not overflow"
            )
        if not _is_dense(parameter):
            raise UsageError(
                f"parameter {name} has strides {tuple(parameter.stride())}, with gaps or overlaps: "
                "make it contiguous"
            )
    if not parameters:
        raise UsageError("no parameter of the model requires a gradient: nothing would be trained")
    for name, module in model.named_modules():
        _require_module(name, module)
    return parameters


def _require_options(model: DistributedDataParallel) -> None:
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(model, option):
            raise UsageError(
                f"DistributedDataParallel({option}=True): torch would reduce only the parameters "
                "that a rank's last micro-batch used, which depend on the world size; leave the "
                "option out, and use every parameter in every micro-batch"
            )
    if model.mixed_precision is not None:
        raise UsageError("DistributedDataParallel(mixed_precision=...): use torch.autocast instead")


def _require_module(name: str, module: torch.nn.Module) -> None:
    if _is_batch_norm(module) and module.training:
        raise UsageError(
            f"module {name} is a {type(module).__name__}: its statistics depend on how "
            "micro-batches are spread over ranks; use LayerNorm or GroupNorm, or freeze it with "
            "eval()"
        )
    if getattr(module, "sparse", False) is True:
        raise UsageError(f"module {name} makes sparse gradients: set sparse=False")


def _is_batch_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def is_power_of_two(number: object) -> bool:
    return isinstance(number, int) and number > 0 and number & (number - 1) == 0


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements lie in memory without gaps or overlaps, in any dim order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
