"""Hooks of a model that stay behind when the script copies or saves the model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


class OwnHook:
    """Calls `call` with a hook's arguments after the module, if the module is `model` itself.

    A copy of the model (an average of its weights), or a model that is loaded again, has a function
    of Python's own in its place that does nothing.
    """

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        self._model, self._call = model, call
        if "torch._dynamo" in sys.modules:  # a compiled model is not to trace what is recorded
            self._call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]

    def __call__(self, module: Any, *called: Any) -> Any:
        return self._call(*called) if module is self._model else None

    def __reduce_ex__(self, _: Any) -> Any:
        return getattr, (nullcontext(), "__exit__")
