"""Notes numbers that are drawn when the backward pass computes a module again.

A checkpoint sets the generators back before it does so, or else the module draws other numbers than
in the forward pass, and the gradient is not that of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Recomputed:
    """Looks at the modules that are called between `begin` and `end` of a backward pass.

    `are_not_set_back` tells whether all generators have the states in which they were seen last.
    `drawn` is called after each outermost module that began with these states. `compiles` tells
    whether what is trained in this process may have been compiled.
    """

    def __init__(
        self,
        are_not_set_back: Callable[[], bool],
        drawn: Callable[[], object],
        compiles: Callable[[], bool],
    ) -> None:
        self._are_not_set_back, self._drawn, self._compiles = are_not_set_back, drawn, compiles
        self._handles: list[Any] = []
        self._depth, self._goes_on, self._were_called = 0, False, False

    def begin(self) -> None:
        """Look at modules from here on, unless the script compiles.

        Compiled code has in it whether there are hooks of all modules: it would be compiled again.
        """
        if self._handles or self._compiles():
            return
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            # Also called if the recomputation stops early, which it does by an exception.
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def end(self) -> None:
        """Look no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._depth = 0

    def were_called(self) -> bool:
        """Return whether any module was called since the last call of this."""
        were_called, self._were_called = self._were_called, False
        return were_called

    def _enter(self, _module: Any, _inputs: Any) -> None:
        self._depth += 1
        self._were_called = True
        if self._depth == 1:
            self._goes_on = self._are_not_set_back()

    def _leave(self, _module: Any, _inputs: Any, _output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._goes_on:
            self._drawn()
