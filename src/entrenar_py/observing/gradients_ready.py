"""Callbacks in a backward pass: when all parameters have their gradients, and at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from entrenar_py import hook_calls

Tell = Callable[[Sequence[Tensor | None]], None]


class GradientHooks:
    """Calls `begin` before the first of `tensors` gets a gradient in a pass, `tell` after the last.

    `tell` is given the gradients in the order of `tensors`, None for a tensor without one. `add` is
    given the gradients of a further pass, nested in one that was reported (reentrant checkpoints).

    `torch.autograd.graph.register_multi_grad_hook` is similar, but raises in a pass that computes
    only some gradients (`torch.autograd.grad`), as zero-bubble pipelines do. Here such a pass is
    reported at its end.
    """

    def __init__(
        self, tensors: Sequence[Tensor], begin: Callable[[], None], tell: Tell, add: Tell
    ) -> None:
        self._nodes = [torch.autograd.graph.get_gradient_edge(tensor).node for tensor in tensors]
        self._begins, self._tell, self._add = begin, tell, add
        # The outer pass begins at the model's output. Passes are numbered by autograd.
        self._outer: int | None = None
        self._begun = self._told = False  # whether the outer pass has begun, and was reported
        self._expected: dict[int, int] = {}  # pass -> how many gradients it gives
        self._found: dict[int, dict[int, Tensor]] = {}  # pass -> index of a tensor -> gradient
        self._handles: list[Any] = [
            tensor.register_hook(partial(self._hear, index))  # type: ignore[no-untyped-call]
            for index, tensor in enumerate(tensors)
        ]

    def expect(self, output: Any) -> None:
        """Note that a forward pass returned `output`, where a backward pass will begin.

        Passes nested in that backward pass are part of it.
        """
        if torch._C._current_graph_task_id() < 0:
            self._outer = None  # an exception may have ended the last one
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._open)  # type: ignore[no-untyped-call]

    @hook_calls.ours
    def _open(self, _: Tensor) -> None:
        if self._outer is None:
            self._outer = torch._C._current_graph_task_id()
            self._begun = self._told = False
            torch.autograd.Variable._execution_engine.queue_callback(self._close)

    @hook_calls.ours
    def _close(self) -> None:
        self._outer = None

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @hook_calls.ours
    def _hear(self, index: int, gradient: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._found:
            self._begin(task)
        # A sparse gradient that nobody else holds is kept without a copy, and so it may share its
        # memory with other gradients, which a wrapper then changes with it.
        self._found[task][index] = gradient.clone() if gradient.is_sparse else gradient
        if len(self._found[task]) == self._expected[task]:
            self._end(task)

    def _begin(self, task: int) -> None:
        self._found[task] = {}
        if self._outer is None or not self._begun:
            self._begins()
        self._begun = True
        try:
            count = sum(map(torch._C._will_engine_execute_node, self._nodes))
        except RuntimeError:  # torch can't say in torch.autograd.grad
            count = len(self._nodes) + 1
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))
        self._expected[task] = count

    @hook_calls.ours
    def _end(self, task: int) -> None:
        found = self._found.pop(task)
        del self._expected[task]
        adds = self._outer is not None and self._told
        self._told = True
        (self._add if adds else self._tell)([found.get(n) for n in range(len(self._nodes))])


def call_last(call: Callable[[], None]) -> None:
    """Call `call` when this backward pass is over, after all callbacks that were queued by then.

    More may be queued until the pass ends, so only a callback at its end queues `call`.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(hook_calls.ours(lambda: queue(hook_calls.ours(lambda: call()))))
