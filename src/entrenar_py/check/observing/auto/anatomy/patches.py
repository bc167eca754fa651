"""The functions that are replaced to record a script's calls, where torch has no hook.

Each is wrapped in the same way: a generator method of the recorder runs up to its `yield` before
the call, and on after it, also if the call raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from entrenar_py.check.observing.torch_calls import Patch

if TYPE_CHECKING:
    from entrenar_py.check.observing.auto.anatomy.recorder import Recorder

Function = Callable[..., Any]
# Collective -> the arguments that hold this rank's own tensors.
COLLECTIVES = {
    "all_reduce": ("tensor",),
    "broadcast": ("tensor",),
    "reduce": ("tensor",),
    "all_gather": ("tensor_list", "tensor"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "gather": ("tensor",),
    "scatter": ("tensor",),
    "reduce_scatter": ("output", "input_list"),
    "reduce_scatter_tensor": ("output", "input"),
    "all_to_all": ("output_tensor_list", "input_tensor_list"),
    "all_to_all_single": ("output", "input"),
    "send": ("tensor",),
    "recv": ("tensor",),
    "isend": ("tensor",),
    "irecv": ("tensor",),
    **dict.fromkeys(("barrier", "monitored_barrier", "all_gather_object", "gather_object"), ()),
    **dict.fromkeys(("broadcast_object_list", "scatter_object_list"), ()),
}
# Functional collective -> what it does. The result is a new tensor: nothing changes in place.
FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all_single",
}


def _watched(method: str, original: Function, recorder: Recorder) -> Function:
    @wraps(original)
    def call(*words: Any, **named: Any) -> Any:
        # It can be consumed only once. An open file is an iterator, too.
        if method == "clip" and words and isinstance(words[0], Iterator):
            words = ([*words[0]], *words[1:])
        watching = recorder.begins(method, *words, **named)
        try:
            return original(*words, **named)
        finally:
            recorder.ends(watching)

    return call


def _exchange(name: str, original: Function, recorder: Recorder) -> Function:
    @wraps(original)
    def call(*given: Any, **named: Any) -> Any:
        code = getattr(original, "__wrapped__", original).__code__
        arguments = dict(zip(code.co_varnames[: code.co_argcount], given, strict=False))
        watching = recorder.begins("exchange", name, {**arguments, **named})
        try:
            return original(*given, **named)
        finally:
            recorder.ends(watching)

    return call


# Module, class in it or "", function, and the method of the recorder.
_WATCHED = (
    ("torch.autograd", "", "backward", "backward"),
    ("torch.optim.optimizer", "Optimizer", "__init__", "build"),
    ("torch.optim.optimizer", "Optimizer", "zero_grad", "clear"),
    ("torch.nn.modules.module", "Module", "zero_grad", "clear"),
    ("torch.nn.modules.module", "Module", "load_state_dict", "restore"),
    ("torch.nn.utils", "", "clip_grad_norm_", "clip"),
    ("torch.nn.utils.clip_grad", "", "clip_grad_norm_", "clip"),
    ("torch.nn.utils", "", "clip_grads_with_norm_", "clip"),
    ("torch.amp.grad_scaler", "GradScaler", "scale", "scale"),
    ("torch.amp.grad_scaler", "GradScaler", "unscale_", "unscale"),
    ("torch.amp.grad_scaler", "GradScaler", "step", "step_scaler"),
    ("torch.amp.grad_scaler", "GradScaler", "update", "update_scaler"),
    ("torch.optim.lr_scheduler", "LRScheduler", "_initial_step", "initialise_schedule"),
    ("torch.optim.lr_scheduler", "LRScheduler", "step", "step_schedule"),
    ("torch.optim.lr_scheduler", "SequentialLR", "step", "step_schedule"),
    ("torch.optim.lr_scheduler", "ChainedScheduler", "step", "step_schedule"),
    ("torch.optim.lr_scheduler", "ReduceLROnPlateau", "step", "step_schedule"),
    ("torch.optim.lr_scheduler", "CosineAnnealingWarmRestarts", "step", "step_schedule"),
    ("torch.optim.swa_utils", "AveragedModel", "update_parameters", "average"),
    ("torch.utils.data.distributed", "DistributedSampler", "set_epoch", "set_epoch"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "__init__", "wrap"),
    ("torch.distributed.algorithms.join", "Join", "__enter__", "join"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "__call__", "call_compiled"),
    ("torch", "", "save", "save"),
    ("torch", "", "load", "load"),
)
_REASON = "torch has no hook for it"
TABLE = (
    *(
        Patch(module=module, owner=owner, name=name, wrap=partial(_watched, method), reason=_REASON)
        for module, owner, name, method in _WATCHED
    ),
    *(
        Patch(module=module, name=name, wrap=partial(_exchange, name), reason=_REASON)
        for module in ("torch.distributed", "torch.distributed.distributed_c10d")
        for name in COLLECTIVES
    ),
    *(
        Patch(
            module="torch.distributed._functional_collectives",
            name=name,
            wrap=partial(_exchange, operation),
            reason=_REASON,
            optional=True,
        )
        for name, operation in FUNCTIONAL.items()
    ),
)
