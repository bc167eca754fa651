"""Callbacks in a backward pass: when all parameters have their gradients, and at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from entrenar_py.check.observing import dtensors
from entrenar_py.shared import hook_calls

Taken = TypeVar("Taken")
# One over the share of all gradients that may be held at once. A GPU is waited for as often.
_PARTS = 4
_BYTES_MIN = 2**26  # that may be held of small models


@dataclass
class _Pass(Generic[Taken]):
    """A backward pass: how many gradients it gives, and by tensor those held and those taken."""

    num_expected: int
    held: dict[int, Tensor] = field(default_factory=dict)
    taken: dict[int, Taken] = field(default_factory=dict)
    held_bytes: int = 0


class GradientHooks(Generic[Taken]):
    """Calls `begin` before the first of `tensors` gets a gradient in a pass, `tell` after the last.

    Gradients are given to `take` by the place of their tensor, some at a time, and are not held any
    longer. It returns what is to be told of each. `tell` is given that in the order of `tensors`,
    None for a tensor without a gradient. `add` is given what was taken of a further pass, nested in
    one that was reported (reentrant checkpoints).

    `torch.autograd.graph.register_multi_grad_hook` is similar, but raises in a pass that computes
    only some gradients (`torch.autograd.grad`), as zero-bubble pipelines do. Here such a pass is
    reported at its end.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        begin: Callable[[], None],
        take: Callable[[Mapping[int, Tensor]], Mapping[int, Taken]],
        tell: Callable[[Sequence[Taken | None]], None],
        add: Callable[[Sequence[Taken | None]], None],
    ) -> None:
        self._nodes = [torch.autograd.graph.get_gradient_edge(tensor).node for tensor in tensors]
        self._begins, self._take, self._tell, self._add = begin, take, tell, add
        self._bytes_max = max(_BYTES_MIN, sum(map(_num_bytes, tensors)) // _PARTS)
        # The outer pass begins at the model's output. Passes are numbered by autograd.
        self._outer: int | None = None
        self._begun = self._told = False  # whether the outer pass has begun, and was reported
        self._passes: dict[int, _Pass[Taken]] = {}
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
        if task not in self._passes:
            self._begin(task)
        current = self._passes[task]
        current.held[index] = _own_copy(gradient)
        current.held_bytes += _num_bytes(gradient)
        if len(current.held) + len(current.taken) == current.num_expected:
            self._end(task)
        elif current.held_bytes > self._bytes_max:
            self._take_held(current)

    def _begin(self, task: int) -> None:
        if self._outer is None or not self._begun:
            self._begins()
        self._begun = True
        try:
            count = sum(map(torch._C._will_engine_execute_node, self._nodes))
        except RuntimeError:  # torch can't say in torch.autograd.grad
            count = len(self._nodes) + 1
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))
        self._passes[task] = _Pass(count)

    def _take_held(self, current: _Pass[Taken]) -> None:
        current.taken.update(self._take(current.held))
        current.held, current.held_bytes = {}, 0

    @hook_calls.ours
    def _end(self, task: int) -> None:
        ended = self._passes.pop(task)
        self._take_held(ended)
        adds = self._outer is not None and self._told
        self._told = True
        (self._add if adds else self._tell)([ended.taken.get(n) for n in range(len(self._nodes))])


def _own_copy(gradient: Tensor) -> Tensor:
    """Return a gradient to hold until it is recorded, without a change of what `.grad` will be.

    Autograd moves a dense gradient into `.grad`, but copies one that is held. For a DTensor that
    copy may be placed otherwise: torch 2.11 reduces the terms of a sum, and gathers pieces of
    different sizes. So a DTensor is copied here. A sparse gradient is copied because autograd
    doesn't, and a wrapper may change its memory.
    """
    if isinstance(gradient, DTensor):
        return dtensors.copied(gradient)
    return gradient.clone() if gradient.is_sparse else gradient


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def call_last(call: Callable[[], None]) -> None:
    """Call `call` when this backward pass is over, after all callbacks that were queued by then.

    More may be queued until the pass ends, so only a callback at its end queues `call`.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(hook_calls.ours(lambda: queue(hook_calls.ours(lambda: call()))))
