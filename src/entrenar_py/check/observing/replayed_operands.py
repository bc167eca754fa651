"""The operands without a gradient that a script's gradients follow from, beside its parameters.

A loss may have rows that the model was never given: advantages and old probabilities of a rollout,
targets that another network has computed, noise that a sample is made with. A script takes them
from tensors of its own, at any place. But all of them meet the parameters in an operation of torch
that has one operand with a gradient, and one without. A mode of torch hears these operations. On
several workers it keeps the operands without a gradient, and on one worker it puts those of all
ranks in their place.

What no gradient follows from is the script's own: a divergence by which it sets its rate, say. If
such a tensor meets those of all ranks, and has the rows of one, it is repeated, so that the script
goes on. What can't be joined is left as it is. Then the two runs differ, or the script fails, and
nothing is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from entrenar_py.check.observing.call_sites import Samples
from entrenar_py.shared import hook_calls

ROWS = "rows"  # the name of how many rows the operand with a gradient has, 0 if that is unknown
_LINEAR = ("mul", "__mul__", "__rmul__", "add", "__add__", "__radd__", "sub", "__sub__", "rsub")
_OF_INPUT = ("batch_norm", "instance_norm")  # their other operands are the model's
_NO_OPERATIONS = ("__get__", "__set__", "__setitem__", "backward")

Named = Mapping[str, Tensor]
Changing = Callable[[dict[str, Tensor]], Named]
_BEGUN: list[TorchFunctionMode] = []


def begin(change: Changing, num_ranks: int = 1) -> None:
    """Have `change` return what takes the place of the operands, from the next operation on.

    Where a loader draws the samples, they can be told apart, and it can be told which to draw.
    """
    if not _BEGUN and Samples.site is None:
        _BEGUN.append(Operands(change, num_ranks))
        _BEGUN[0].__enter__()  # type: ignore[no-untyped-call]


class Operands(TorchFunctionMode):
    """Has `change` return what takes the place of the operands of each operation.

    An operation that fails on the rows of `num_ranks` ranks and those of one is done again on as
    many of these.
    """

    def __init__(self, change: Changing, num_ranks: int = 1) -> None:
        super().__init__()
        self._change, self._num_ranks = change, num_ranks

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if hook_calls.is_traced():
            return func(*args, **named)
        name = getattr(func, "__name__", "")
        is_again = torch._C._current_graph_task_id() != -1  # in a backward pass
        if is_again or _is_in_place(name) or "out" in named:
            return func(*args, **named)
        if not torch.is_grad_enabled():
            return self._done(func, args, named)
        leaves, form = tree_flatten((args, named))
        graded = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        places = [place for place, leaf in enumerate(leaves) if _is_operand(leaf)]
        places = places[:1] if name in _OF_INPUT else places
        if graded and places:
            own = {f"{name} {place}": leaves[place] for place in places}
            own[ROWS] = torch.tensor(_rows(graded))
            changed = self._change(own)
            for place in places:
                leaves[place] = changed[f"{name} {place}"]
            args, named = tree_unflatten(leaves, form)
        return self._done(func, args, named)

    def _done(self, func: Any, args: Any, named: Mapping[str, Any]) -> Any:
        try:
            return func(*args, **named)
        except (RuntimeError, ValueError):
            leaves, form = tree_flatten((args, named))
            repeated = _repeated(leaves, self._num_ranks)
            if repeated is None:
                raise
            args, named = tree_unflatten(repeated, form)
        return func(*args, **named)


def _repeated(leaves: Sequence[Any], num_ranks: int) -> list[Any] | None:
    """Return an operation's arguments with the rows of one rank repeated for all ranks.

    Return None if its tensors don't have the rows of one, and of all.
    """
    lengths = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()} - {1}
    if num_ranks == 1 or not lengths or lengths != {min(lengths), num_ranks * min(lengths)}:
        return None

    def repeated(leaf: Any) -> Any:
        is_one = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == min(lengths)
        return torch.cat([leaf] * num_ranks) if is_one else leaf

    return [repeated(leaf) for leaf in leaves]


def _is_in_place(name: str) -> bool:
    is_changed = name.endswith("_") and not name.endswith("__")
    return is_changed or name.startswith("__i") or name in _NO_OPERATIONS


def _is_operand(leaf: Any) -> bool:
    """Return whether a thing is a plain tensor without a gradient, which has bytes."""
    if type(leaf) is not Tensor or leaf.requires_grad:
        return False
    is_odd = leaf.is_meta or leaf.is_quantized or leaf.is_complex()
    return leaf.layout == torch.strided and not is_odd


def _rows(graded: Sequence[Tensor]) -> int:
    """Return the rows of the first operand with a gradient that is no parameter, 0 without one."""
    computed = (t for t in graded if not isinstance(t, nn.Parameter) and t.dim())
    return next((len(tensor) for tensor in computed), 0)


def joined(own: Named, ranks: Sequence[Named]) -> Named | None:
    """Return the operands of an operation with those of all `ranks` in the place of its `own`.

    Return None if the ranks had another operation.
    """
    if any(rank.keys() != own.keys() for rank in ranks):
        return None
    rows, due = int(own[ROWS]), int(ranks[0][ROWS])
    due = due if rows == due * len(ranks) else 0
    return {
        name: _operand(name, tensor, [rank[name] for rank in ranks], due).to(tensor.device)
        for name, tensor in own.items()
    }


def _operand(name: str, own: Tensor, theirs: Sequence[Tensor], rows: int) -> Tensor:
    """Return the rows of all ranks; or the mean of numbers, where a loss is linear in them."""
    first = theirs[0]
    if any((one.shape, one.dtype) != (first.shape, own.dtype) for one in theirs):
        return own
    are_alike = all(torch.equal(one, first) for one in theirs)
    if first.dim():
        return torch.cat([*theirs]) if _is_of_rows(first, rows, are_alike) else own
    is_linear = name.partition(" ")[0] in _LINEAR and first.is_floating_point()
    is_mean = is_linear and not are_alike and not own.dim()
    return torch.stack([*theirs]).mean(0) if is_mean else own


def _is_of_rows(tensor: Tensor, rows: int, are_alike: bool) -> bool:
    return len(tensor) == rows if rows else not are_alike
