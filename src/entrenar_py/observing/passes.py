"""Tells of each backward pass when the gradients of all its parameters are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

Tell = Callable[[Sequence[Tensor | None]], None]


class Passes:
    """Has `begin` called before a backward pass gives any of `tensors` a gradient, and `tell` with
    those that it gives, None where it gives none.

    As `torch.autograd.graph.register_multi_grad_hook`, which raises in a pass that computes some
    gradients alone (`torch.autograd.grad`), as pipelines without bubbles do: there it is told at
    the pass's end.
    """

    def __init__(self, tensors: Sequence[Tensor], begin: Callable[[], None], tell: Tell) -> None:
        self._nodes = [torch.autograd.graph.get_gradient_edge(one).node for one in tensors]
        self._begins, self._tell = begin, tell
        self._expected: dict[int, int] = {}  # by pass
        self._found: dict[int, dict[int, Tensor]] = {}
        self._handles: list[Any] = [
            one.register_hook(partial(self._hear, index))  # type: ignore[no-untyped-call]
            for index, one in enumerate(tensors)
        ]

    def remove(self) -> None:
        """Nothing is told any more."""
        for handle in self._handles:
            handle.remove()

    def _hear(self, index: int, gradient: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._found:
            self._begin(task)
        self._found[task][index] = gradient
        if len(self._found[task]) == self._expected[task]:
            self._end(task)

    def _begin(self, task: int) -> None:
        self._found[task] = {}
        self._begins()
        try:
            count = sum(map(torch._C._will_engine_execute_node, self._nodes))
        except RuntimeError:  # not to be known of this kind of pass
            count = len(self._nodes) + 1
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))
        self._expected[task] = count

    def _end(self, task: int) -> None:
        found = self._found.pop(task)
        del self._expected[task]
        self._tell([found.get(index) for index in range(len(self._nodes))])
