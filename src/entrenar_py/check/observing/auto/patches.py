"""The functions of torch that are replaced in a script without a line, each with its reason.

A row is for what torch has no hook for. A replacement calls the original with what it was given,
and returns what that returns; only `follower` looks at it.
`tests/check/observing/auto/test_patches.py` tries each row against the installed torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from entrenar_py.check.observing import mirrored_batches, torch_calls
from entrenar_py.check.observing.torch_calls import Function, Patch
from entrenar_py.shared import hook_calls

if TYPE_CHECKING:
    from entrenar_py.check.observing.auto.follower import Follower


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


def _iterated(original: Function, follower: Follower) -> Function:
    @wraps(original)
    def begin(self: Any, *given: Any, **named: Any) -> None:
        follower.iterated(given[0] if given else named.get("loader"), self)
        original(self, *given, **named)

    return begin


def _drew(original: Function, follower: Follower) -> Function:
    @wraps(original)
    def next_index(self: Any) -> Any:
        index = original(self)
        follower.drew(self, index)
        return index

    return next_index


def _yielded(original: Function, follower: Follower) -> Function:
    @wraps(original)
    def next_batch(self: Any) -> Any:
        try:
            batch = original(self)
        except StopIteration:
            follower.exhausted(self)
            raise
        follower.yielded(self, batch)
        return batch

    return next_batch


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


_LOADER = "torch.utils.data.dataloader"
TABLE = (
    Patch(
        module="torch.optim.optimizer",
        owner="Optimizer",
        name="__init__",
        reason="the hooks of a step come too late: the first backward pass is over by then",
        wrap=_built,
    ),
    *torch_calls.TABLE,
    Patch(
        module=_LOADER,
        owner="DataLoader",
        name="__init__",
        reason="a script may ask a loader for its length, and plan epochs by it, before a pass",
        wrap=_loading,
    ),
    Patch(
        module=_LOADER,
        owner="_BaseDataLoaderIter",
        name="__init__",
        reason="DataLoader has no hooks, and its iterator doesn't know it",
        wrap=_iterated,
    ),
    Patch(
        module=_LOADER,
        owner="_BaseDataLoaderIter",
        name="_reset",
        reason="with workers, a pass begins here, and so does each later one of persistent workers",
        wrap=_iterated,
    ),
    Patch(
        module=_LOADER,
        owner="_BaseDataLoaderIter",
        name="_next_index",
        reason="the only place where every kind of sampler, and a plain list, shows its indices",
        wrap=_drew,
    ),
    Patch(
        module=_LOADER,
        owner="_BaseDataLoaderIter",
        name="__next__",
        reason="with workers, indices are drawn batches before the batch is yielded",
        wrap=_yielded,
    ),
    Patch(
        module="torch._dynamo.eval_frame",
        owner="OptimizedModule",
        name="__call__",
        reason="it warns of hooks of all modules, and compiles these with the modules inside",
        wrap=_compiled,
    ),
)


def install_for_line(awaited: dict[str, Callable[[], None]]) -> None:
    """Set the patches that a line's observer hears, before the script imports their functions."""
    _await(torch_calls.heard(), torch_calls.EARS, awaited)
    _await((patch for patch in TABLE if patch.wrap is _loading), None, awaited)


def install(follower: Follower, awaited: dict[str, Callable[[], None]]) -> None:
    """Set torch's global hooks and the patches of TABLE.

    A module that isn't imported yet is patched when it is: `awaited` takes functions to call then.
    """
    hook_calls.leave_steps()
    register_optimizer_step_pre_hook(follower.before_step)
    register_optimizer_step_post_hook(follower.step_ended)
    if follower.settings.every is not None:
        return  # the watch needs no more than a step
    follower.look_at_calls(True)
    _await(TABLE, follower, awaited)


def _await(table: Iterable[Patch], listener: Any, awaited: dict[str, Callable[[], None]]) -> None:
    """Replace the functions of `table`, each once its module is imported."""
    by_module: dict[str, list[Patch]] = {}
    for patch in table:
        by_module.setdefault(patch.module, []).append(patch)
    for module, patches in by_module.items():
        apply = partial(torch_calls.apply, patches, listener)
        if module in sys.modules:
            apply()
        else:
            awaited[module] = _both(awaited.get(module), apply)


def _both(first: Callable[[], None] | None, second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        if first is not None:
            first()
        second()

    return call
