"""The functions of torch that are replaced while a script is observed, each with a reason.

The tables have a function only if torch has no hook for it. Its replacement calls the original with
the same arguments and returns the result; it only reports to a listener. With the line `observe`,
the functions in LINE_TABLE are replaced when the script first reaches the line. Without the line,
all functions in TABLE are replaced when their modules are imported, and `auto/follower.py` listens.
`tests/check/observing/test_torch_calls.py` tests each of them with the installed torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from entrenar_py.check.observing import checkpoints, mirrored_batches
from entrenar_py.check.observing.call_sites import Backward, here
from entrenar_py.check.observing.iterations import LoaderHooks
from entrenar_py.check.observing.loss_terms import Losses
from entrenar_py.shared import hook_calls

if TYPE_CHECKING:
    from entrenar_py.check.observing.auto.follower import Follower
    from entrenar_py.check.observing.micro_batches import MicroBatches

Function = Callable[..., Any]


class Listener(Protocol):
    """Receives a script's calls of torch."""

    def backward_begins(self, tensors: Any, *, is_plain: bool) -> None:
        """Called when a backward pass begins at `tensors`, perhaps inside another pass.

        `is_plain` is true if the script passes no gradient for these tensors.
        """

    def backward_ended(self) -> None:
        """Called when the pass that began last has ended, perhaps with an exception."""

    def scaled(self, scale: float, losses: Any) -> None:
        """Called when a `GradScaler` multiplies `losses` by `scale`."""

    def skipped(self) -> None:
        """Called when a `GradScaler` skipped a step on all ranks."""

    def saved(self) -> None:
        """Called when the script saves a file."""

    def clipped(self, parameters: Any, max_norm: float | None, norm_type: float) -> None:
        """Called when the gradients of `parameters` are about to be clipped by their norm.

        `max_norm` is None if they are clipped by another norm, or by an unknown one.
        """


@dataclass(frozen=True, kw_only=True)
class Patch:
    """The replacement of the function `name` of `owner` by the result of `wrap`.

    `owner` is a class in `module`, or "" for the module itself. An `optional` module may never be
    imported in a process, or lack the function.
    """

    module: str
    owner: str = ""
    name: str
    reason: str
    wrap: Callable[[Function, Any], Function]
    optional: bool = False


def apply(patches: Iterable[Patch], listener: Any) -> None:
    """Replace the functions of `patches`; import their modules if necessary.

    An optional patch is skipped if its module isn't imported yet, or lacks the function.
    """
    for patch in patches:
        if patch.optional and patch.module not in sys.modules:
            continue
        owner: Any = importlib.import_module(patch.module)
        owner = getattr(owner, patch.owner) if patch.owner else owner
        if patch.optional and patch.name not in vars(owner):
            continue  # a method that another class of the table may have
        original = getattr(owner, patch.name)
        setattr(owner, patch.name, _uncompiled(original, patch.wrap(original, listener)))


# --- a script with a line ---------------------------------------------------------------------


class Ear:
    """Listens for one observer, between `listen` and `stop`."""

    def __init__(
        self,
        passes: MicroBatches,
        *,
        skipped: Callable[[], object],
        saved: Callable[[], None],
        clipped: Callable[[Any, float, float], None],
    ) -> None:
        self._passes, self.skipped, self.saved, self.clipped = passes, skipped, saved, clipped
        self._losses = Losses()
        self._depth = 0  # backward passes in progress: one may run inside another

    def listen(self) -> None:
        """Start to listen."""
        apply(heard(), EARS)
        EARS.all.append(self)

    def stop(self) -> None:
        """Stop listening."""
        if self in EARS.all:
            EARS.all.remove(self)

    def backward_begins(self, tensors: Any, *, is_plain: bool) -> None:
        """Report the loss of a backward pass, unless it runs inside another pass."""
        self._depth += 1
        if self._depth == 1:
            self._passes.backward_begins(self._losses.begun(tensors, is_plain=is_plain))

    def backward_ended(self) -> None:
        """Report that the outermost backward pass has ended."""
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._passes.backward_ended()

    def scaled(self, scale: float, losses: Any) -> None:
        """Called when a scaler multiplies `losses` by `scale`."""
        self._losses.scaled(scale, losses)


class _Ears:
    """Passes each call on to all listeners of this process."""

    def __init__(self) -> None:
        self.all: list[Ear] = []
        self.was_applied = False

    def __getattr__(self, name: str) -> Function:
        def tell(*given: Any, **named: Any) -> None:
            if not hook_calls.is_traced():
                for ear in [*self.all]:
                    getattr(ear, name)(*given, **named)

        return tell


EARS = _Ears()


def heard() -> tuple[Patch, ...]:
    """Return LINE_TABLE in the first call, () in later calls, since functions are replaced once."""
    rows = () if EARS.was_applied else LINE_TABLE
    EARS.was_applied = True
    return rows


# --- the replacements -------------------------------------------------------------------------


_set_eval_frame: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame


def _backward(original: Function, listener: Listener) -> Function:
    @wraps(original)
    def backward(tensors: Any, *given: Any, **named: Any) -> Any:
        gradients = given[0] if given else named.get("grad_tensors")
        if Backward.site is None:
            # A compiled step would trace the lookup, and compile other graphs than unobserved.
            before = _set_eval_frame(None)
            try:
                Backward.site = here()
            finally:
                _set_eval_frame(before)
        listener.backward_begins(tensors, is_plain=gradients is None)
        try:
            return original(tensors, *given, **named)
        finally:
            listener.backward_ended()

    return backward


def _scaled(original: Function, listener: Listener) -> Function:
    @wraps(original)
    def scale(self: Any, outputs: Any, *given: Any, **named: Any) -> Any:
        if self.is_enabled():
            listener.scaled(self.get_scale(), outputs)
        return original(self, outputs, *given, **named)

    return scale


def _rescaled(original: Function, listener: Listener) -> Function:
    @wraps(original)
    def update(self: Any, *given: Any, **named: Any) -> Any:
        before = self.get_scale() if self.is_enabled() else 0.0
        result = original(self, *given, **named)
        if self.is_enabled() and self.get_scale() < before:
            listener.skipped()
        return result

    return update


def _saved(original: Function, listener: Listener) -> Function:
    @wraps(original)
    def save(*given: Any, **named: Any) -> Any:
        listener.saved()
        result = original(*given, **named)
        told = (*given, *named.values())
        file = next((one for one in told if isinstance(one, str | os.PathLike)), None)
        checkpoints.written((given, named), file)
        return result

    return save


def _loaded(original: Function, _: Listener) -> Function:
    @wraps(original)
    def load(f: Any, *given: Any, **named: Any) -> Any:
        result = original(f, *given, **named)
        checkpoints.loaded(f)
        return result

    return load


def _clipped(original: Function, listener: Listener) -> Function:
    @wraps(original)
    def clip(
        parameters: Any, max_norm: float, norm_type: float = 2.0, *given: Any, **named: Any
    ) -> Any:
        if isinstance(parameters, Iterator):  # an iterator can be consumed only once
            kept = [*parameters]
            listener.clipped(kept, max_norm, norm_type)
            parameters = (parameter for parameter in kept)
        else:
            listener.clipped(parameters, max_norm, norm_type)
        return original(parameters, max_norm, norm_type, *given, **named)

    return clip


def _clipped_with_norm(original: Function, listener: Listener) -> Function:
    @wraps(original)
    def clip(parameters: Any, max_norm: float, *given: Any, **named: Any) -> Any:
        kept = [*parameters] if isinstance(parameters, Iterator) else parameters
        listener.clipped(kept, None, 2.0)  # the norm may be any, of any gradients
        return original(kept, max_norm, *given, **named)

    return clip


def _clipped_in_pieces(original: Function, listener: Listener) -> Function:
    @wraps(original)
    def clip(self: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        # Otherwise FSDP calls the function that is patched above.
        if any(handle.uses_sharded_strategy for handle in self._all_handles):
            listener.clipped([*self.parameters()], max_norm, norm_type)
        return original(self, max_norm, norm_type)

    return clip


_SCALER = "torch.amp.grad_scaler"
LINE_TABLE = (
    Patch(
        module="torch.autograd",
        name="backward",
        reason="no hook tells on which tensor (the loss) a backward pass is called",
        wrap=_backward,
    ),
    Patch(
        module=_SCALER,
        owner="GradScaler",
        name="scale",
        reason="only the scaler knows by which number it multiplies a loss",
        wrap=_scaled,
    ),
    Patch(
        module=_SCALER,
        owner="GradScaler",
        name="update",
        reason="only the scaler hears that another rank's piece of the gradient is not finite",
        wrap=_rescaled,
    ),
    *(
        Patch(
            module="torch.distributed.fsdp.sharded_grad_scaler",
            owner="ShardedGradScaler",
            name=name,
            optional=True,
            reason="the scaler of sharded models replaces both methods of GradScaler",
            wrap=wrap,
        )
        for name, wrap in (("scale", _scaled), ("update", _rescaled))
    ),
    Patch(
        module="torch",
        name="save",
        reason="a checkpoint that lacks something is fixed where it is saved",
        wrap=_saved,
    ),
    Patch(
        module="torch",
        name="load",
        reason="a script that reads its checkpoint and trains from the beginning restores nothing",
        wrap=_loaded,
    ),
    *(
        Patch(
            module=module,
            name="clip_grad_norm_",
            reason="a gradient doesn't show the norm that it was clipped to",
            wrap=_clipped,
        )
        for module in ("torch.nn.utils", "torch.nn.utils.clip_grad")
    ),
    Patch(
        module="torch.nn.utils",
        name="clip_grads_with_norm_",
        reason="a clipped gradient doesn't show what it was before",
        wrap=_clipped_with_norm,
        optional=True,  # since torch 2.6
    ),
    Patch(
        module="torch.distributed.fsdp.fully_sharded_data_parallel",
        owner="FullyShardedDataParallel",
        name="clip_grad_norm_",
        optional=True,
        reason="it adds up the pieces of all ranks by itself",
        wrap=_clipped_in_pieces,
    ),
    *(
        Patch(
            module=module,
            name=name,
            reason=(
                "a script may save its weights without torch.save, and then has a checkpoint, too"
            ),
            wrap=_saved,
            optional=True,
        )
        for module, names in (
            ("numpy", ("save", "savez", "savez_compressed")),
            ("pickle", ("dump",)),
            ("safetensors.torch", ("serialize_file",)),  # save_file and save_model call it
            ("torch.distributed.checkpoint", ("save", "async_save")),
            ("torch.distributed.checkpoint.state_dict_saver", ("save", "async_save")),
        )
        for name in names
    ),
)


def _uncompiled(original: Function, wrapped: Function) -> Function:
    """Return a function that calls `wrapped`, or `original` in compiled code.

    Dynamo doesn't compile this function or `wrapped` on their own.
    """

    @wraps(original)
    def either(*given: Any, **named: Any) -> Any:
        compiles = torch.compiler.is_compiling()
        return (original if compiles else wrapped)(*given, **named)

    for function in (either, wrapped):
        hook_calls.leave(function.__code__, with_calls=False)
    return either


# --- a script without a line ----------------------------------------------------------------------


def _built(original: Function, follower: Follower) -> Function:
    @wraps(original)
    def init(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        follower.built(self)

    return init


def _loading(original: Function, _: object) -> Function:
    @wraps(original)
    def init(self: Any, *given: Any, **named: Any) -> None:
        mirrored_batches.begin_if_planned()
        original(self, *given, **named)

    return init


def _compiled(original: Function, follower: Follower) -> Function:
    @wraps(original)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        follower.forward(self, given)
        looks = follower.look_at_calls(False)
        try:
            return original(self, *given, **named)
        finally:
            follower.look_at_calls(looks)

    return call


TABLE = (
    Patch(
        module="torch.optim.optimizer",
        owner="Optimizer",
        name="__init__",
        reason="the hooks of a step come too late: the first backward pass is over by then",
        wrap=_built,
    ),
    *LINE_TABLE,
    Patch(
        module="torch.utils.data.dataloader",
        owner="DataLoader",
        name="__init__",
        reason="a script may ask a loader for its length, and plan epochs by it, before a pass",
        wrap=_loading,
    ),
    Patch(
        module="torch._dynamo.eval_frame",
        owner="OptimizedModule",
        name="__call__",
        reason="a compiled module warns of hooks on all modules, and compiles them, too",
        wrap=_compiled,
    ),
)


def install_for_line(awaited: dict[str, Callable[[], None]]) -> None:
    """Set the patches for a line's observer, before the script imports the patched functions.

    `awaited` gets functions to call when a module is imported.
    """
    await_modules(heard(), EARS, awaited)
    await_modules((patch for patch in TABLE if patch.wrap is _loading), None, awaited)


def install(follower: Follower, awaited: dict[str, Callable[[], None]]) -> None:
    """Set torch's global hooks, those of loaders, and the patches of TABLE.

    A module that isn't imported yet is patched when it is imported: `awaited` gets functions to
    call then.
    """
    hook_calls.leave_steps()
    register_optimizer_step_pre_hook(follower.before_step)
    register_optimizer_step_post_hook(follower.step_ended)
    if follower.settings.every is not None:
        return  # the watch only needs steps
    follower.look_at_calls(True)
    LoaderHooks(follower.iterated)
    await_modules(TABLE, follower, awaited)


def await_modules(
    table: Iterable[Patch], listener: Any, awaited: dict[str, Callable[[], None]]
) -> None:
    """Replace the functions of `table`, each as soon as its module is imported."""
    by_module: dict[str, list[Patch]] = {}
    for patch in table:
        by_module.setdefault(patch.module, []).append(patch)
    for module, patches in by_module.items():
        replace = partial(apply, patches, listener)
        if module in sys.modules:
            replace()
        else:
            awaited[module] = _both(awaited.get(module), replace)


def _both(first: Callable[[], None] | None, second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        if first is not None:
            first()
        second()

    return call
