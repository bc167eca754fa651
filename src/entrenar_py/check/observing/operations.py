"""Record each operation of a step, with the module and the line of code that called it.

Operations are seen below autograd (`TorchDispatchMode`), in forward and backward passes. An
operation of a backward pass belongs to the module and the line of its forward operation: both have
the same number in autograd's sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from entrenar_py.check.observing import call_sites

_TORCH = torch.__path__[0]
# What the script calls through this package: frames of these files are no part of ours.
_WRAPPERS = ("torch_calls.py", "hook_calls.py")
_TEXT_MAX = 160
_PRODUCTS = ("mm", "linear", "matmul", "bmm", "einsum", "attention", "conv")
# They compute nothing: the same elements in another order or shape, or memory with any values.
_VIEWS = (
    *("detach", "alias", "lift_fresh", "_unsafe_view", "view", "t", "empty", "expand", "set_"),
    *("unsqueeze", "squeeze", "empty_like", "_reshape_alias", "resize_", "new_empty"),
    *("empty_strided", "empty_permuted", "new_empty_strided"),
)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `write` with the outputs and the name of each operation of the `steps`, inclusive.

    `module` returns the path of the module that runs now.
    """

    def __init__(
        self,
        write: Callable[..., None],
        module: Callable[[], str],
        steps: tuple[int, int] | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._write_operation, self._path, self._steps = write, module, steps
        self._is_on = False
        # Number in the sequence -> the module, and the lines of code.
        self._forward: dict[int, tuple[str, dict[str, str]]] = {}

    def enter(self, step: int) -> None:
        """Begin to record if this is one of the steps."""
        if not self._is_on and self._steps is not None and self._steps[0] <= step <= self._steps[1]:
            self._is_on = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """End the record of a step."""
        if self._is_on:
            self._is_on = False
            self._forward.clear()
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._is_on:
            frame = _caller(sys._getframe(1))
            if frame is not None:
                sites = {"site": _site(frame), "caller": _caller_in_script(frame)}
                self._note(function, args, kwargs or {}, result, sites)
        return result

    def _note(
        self, function: Any, args: Any, named: Any, result: Any, sites: dict[str, str]
    ) -> None:
        where, phase = self._path(), "forward"
        node = torch._C._current_autograd_node()
        if torch._C._current_graph_task_id() >= 0:
            phase = "backward"
            number = -1 if node is None else node._sequence_nr()
            where, sites = self._forward.get(number, ("", {}))
        else:
            sequence: Any = torch._C._autograd
            # Operations that follow without a number of their own leave that of the last one.
            self._forward.setdefault(sequence._get_sequence_nr() - 1, (where, sites))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not outputs:  # in place, on a list
            changed = tree_leaves(args[0]) if args else []
            outputs = [leaf for leaf in changed if isinstance(leaf, Tensor)]
        name = function.__name__.partition(".")[0]
        if name in _VIEWS or not outputs:
            return
        fields = {"where": where, **sites, "text": _text(name, args, named)}
        if phase == "backward":
            fields["phase"] = phase
        sizes = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        self._write_operation(outputs, name, fan_in=_fan_in(name, sizes, outputs[0]), **fields)


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called torch; None if that is the harness."""
    while frame is not None:
        file = frame.f_code.co_filename
        if call_sites.is_ours(file):
            if not file.endswith(_WRAPPERS):
                return None
        elif not file.startswith((_TORCH, "<")):
            return frame
        frame = frame.f_back
    return None


def _site(frame: FrameType) -> str:
    return f"{_in_place(frame.f_code.co_filename)}:{frame.f_lineno}"


def _caller_in_script(frame: FrameType) -> str:
    """Return the script's innermost line if `frame` is a library's, "" if it is the script's."""
    if _is_own(frame.f_code.co_filename):
        return ""
    outer = frame.f_back
    while outer is not None and not _is_own(outer.f_code.co_filename):
        outer = outer.f_back
    return "" if outer is None else _site(outer)


_is_own = cache(call_sites.is_own)


@cache
def _in_place(file: str) -> str:
    return call_sites.in_place(Path(file).resolve())


def _text(name: str, args: Any, named: Any) -> str:
    """Return an operation with its arguments, except tensors."""
    given = [_shown(one) for one in args]
    given += [f"{key}={_shown(one)}" for key, one in named.items()]
    text = f"{name}({', '.join(given)})"
    return text if len(text) <= _TEXT_MAX else f"{text[: _TEXT_MAX - 4]}...)"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return "_"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value[:8]))}]"
    return repr(value) if isinstance(value, str) else str(value)


def _fan_in(name: str, sizes: list[Tensor], output: Tensor) -> int:
    """Return the number of terms of the sums of an operation."""
    most = max((tensor.numel() for tensor in sizes), default=1)
    if any(word in name for word in _PRODUCTS):
        return max((int(tensor.shape[-1]) for tensor in sizes if tensor.ndim), default=1)
    return max(1, most // max(1, output.numel()))
