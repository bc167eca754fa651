"""The record of what a script's steps do: hooks and patches in its processes, without a line.

`parameters` knows parameters by numbers, and what happens to their gradients. `recorder` writes the
events of `check/anatomy/record.py`. `patches` lists the functions that are replaced.
"""

from __future__ import annotations

from collections.abc import Callable


def begin(steps: int | None, awaited: dict[str, Callable[[], None]]) -> None:
    """Set torch's global hooks, and the patches of modules, each when it is imported."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    from entrenar_py.check.observing import torch_calls
    from entrenar_py.check.observing.auto.anatomy.patches import TABLE
    from entrenar_py.check.observing.auto.anatomy.recorder import Recorder
    from entrenar_py.check.observing.iterations import LoaderHooks
    from entrenar_py.shared import hook_calls

    recorder = Recorder(steps)
    hook_calls.leave_steps()
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    recorder.hook_calls(True)
    LoaderHooks(recorder.iterated)
    torch_calls.await_modules(TABLE, recorder, awaited)
