"""Replay on one worker the batches that several workers had.

If a script draws its samples without torch's loaders, the harness can't make one worker draw the
samples of all ranks. So each rank keeps some tensors in a file: the inputs of its model in
training, the targets of its losses, and other tensors with the same number of rows that are
variables of the function that calls the model. In a run on one worker these replace what the script
has drawn: the rows of all ranks, one rank after the other. Tensors without rows must be equal on
all ranks.

The tensors are changed in place, since a script may use them again (to count hits, say). If
anything else depends on the rows that the script itself has drawn, the script fails or trains
differently: then nothing is decided (`check.causes.copies.not_given`).

A loss may use rows that were never an input of the model: advantages and old probabilities of a
rollout, targets that another network has computed, or noise from which a sample is made. The script
may keep such tensors anywhere. But each of them meets the parameters in a torch operation with one
operand that has a gradient, and another that has none. A torch function mode intercepts these
operations. On several workers it keeps the operands without a gradient, and on one worker it
replaces them with those of all ranks.

Values that affect no gradient are not replaced, such as a divergence that the script uses to set
its learning rate. If such a tensor has the rows of one rank, and an operation combines it with the
rows of all ranks, its rows are repeated, so that the script can continue. What can't be joined is
not changed. Then the two runs differ, or the script fails, and nothing is decided.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from entrenar_py.check.observing import BATCHES, BATCHES_KEPT, FOLDER, call_sites, torch_calls
from entrenar_py.check.observing.call_sites import Samples
from entrenar_py.check.observing.torch_calls import Function, Patch
from entrenar_py.shared import hook_calls
from entrenar_py.shared.untrusted import json_text

ROWS = "rows"  # the key for the number of rows of the operand with a gradient, 0 if that is unknown
_LINEAR = ("mul", "__mul__", "__rmul__", "add", "__add__", "__radd__", "sub", "__sub__", "rsub")
# Normalisations: all operands but the input belong to the model.
_OF_INPUT = ("batch_norm", "instance_norm")
_NO_OPERATIONS = ("__get__", "__set__", "__setitem__", "backward")

Named = Mapping[str, Tensor]
Changing = Callable[[dict[str, Tensor]], Named]
_BEGUN: list[TorchFunctionMode] = []


def begin_operands(change: Changing, num_ranks: int = 1) -> None:
    """Replace operands by the result of `change`, from the next operation on.

    Nothing is replaced if a loader draws the samples: then the samples are identified, and are
    chosen through the loader instead.
    """
    if not _BEGUN and Samples.site is None:
        _BEGUN.append(OperandsMode(change, num_ranks))
        _BEGUN[0].__enter__()  # type: ignore[no-untyped-call]


class OperandsMode(TorchFunctionMode):
    """Replaces the operands of each operation by the result of `change`.

    An operation may fail because some tensors have the rows of `num_ranks` ranks and others those
    of one rank. Then it is repeated, with the rows of the latter repeated for all ranks.
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
        is_again = torch._C._current_graph_task_id() != -1  # a recomputation in a backward pass
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

    Return None unless some tensors have the rows of one rank, and others those of all ranks.
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
    if type(leaf) is not Tensor or leaf.requires_grad:
        return False
    is_odd = leaf.is_meta or leaf.is_quantized or leaf.is_complex()
    return leaf.layout == torch.strided and not is_odd


def _rows(graded: Sequence[Tensor]) -> int:
    computed = (t for t in graded if not isinstance(t, nn.Parameter) and t.dim())
    return next((len(tensor) for tensor in computed), 0)


def joined_operands(own: Named, ranks: Sequence[Named]) -> Named | None:
    """Return the operands of an operation: those of all `ranks`, joined, instead of its `own`.

    Return None if the ranks had a different operation.
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
    """Return the joined rows of all ranks; for scalars in a linear operation, their mean.

    Return `own` if neither is possible.
    """
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


# --- batches --------------------------------------------------------------------------------------


_BYTES_MAX = 2**24  # bytes per rank for operands, and as many for everything else
_DEPTH_MAX = 4
_PASS, _BESIDE, _TARGET, _OPERANDS = _KINDS = "pass", "at hand", "target", "operands"
_LOSSES = (
    *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss"),
)


# Kind of call (one of _KINDS) -> the tensors of each call.
Entries = dict[str, list[dict[str, Tensor]]]


class Keeping:
    """Writes the inputs of this rank's model and losses to a file, up to a maximum size."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / _file(rank)
        # Bytes left for operands (True), and for everything else (False).
        self._left = {True: _BYTES_MAX, False: _BYTES_MAX}
        self._lacks_inputs = False

    def passes(self, inputs: Any) -> None:
        """Keep the inputs of a training pass that begins, unless it began before the record."""
        begin_operands(self.operands)
        self._lacks_inputs = not any(inputs)
        if not self._lacks_inputs:
            self._keep_all(inputs)

    def passed(self, inputs: Any) -> None:
        """Keep the inputs of a completed training pass, unless they were kept when it began."""
        if self._lacks_inputs:
            self._lacks_inputs = False
            self._keep_all(inputs)

    def _keep_all(self, inputs: Any) -> None:
        tensors = _numbered(inputs)
        self.keep(_PASS, tensors)
        self.keep(_BESIDE, _beside(tensors))

    def operands(self, own: Named) -> Named:
        """Keep the operands of an operation, and return them."""
        self.keep(_OPERANDS, own)
        return own

    def keep(self, what: str, tensors: Named) -> None:
        """Add the tensors of one call.

        Keep nothing more after the file has reached its maximum size.

        The script continues if the file can't be written. Then the file has too few calls, and is
        not replayed.
        """
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        is_operand = what == _OPERANDS
        self._left[is_operand] -= size + 1
        if self._left[is_operand] < 0:
            return
        shown = [
            [name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]]
            for name, tensor in tensors.items()
        ]
        with suppress(OSError), self._path.open("ab") as file:
            file.write(json.dumps([what, shown]).encode() + b"\n")
            for tensor in tensors.values():
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().tobytes())


class Giving:
    """Replaces this worker's batches by those of several ranks.

    The ranks' batches are joined, or replayed `in_turn` if one worker has as many micro-batches as
    all ranks together.
    """

    def __init__(self, folder: Path, num_ranks: int, *, in_turn: bool) -> None:
        self._in_turn = in_turn
        self._ranks = [_read(folder / _file(rank)) for rank in range(num_ranks)]
        self._places = dict.fromkeys(_KINDS, 0)
        self.called: Any = ()  # the inputs of the outermost module that is being called
        self.depth = 0  # how many calls of modules are nested now

    def operands(self, own: Named) -> Named:
        """Return all ranks' operands of the next operation, while all have the same operations."""
        place = self._places[_OPERANDS]
        calls = [rank[_OPERANDS][place] for rank in self._ranks if place < len(rank[_OPERANDS])]
        self._places[_OPERANDS] += 1
        theirs = joined_operands(own, calls) if len(calls) == len(self._ranks) else None
        if theirs is None:
            self._ranks = [{**rank, _OPERANDS: []} for rank in self._ranks]
        return own if theirs is None else theirs

    def passed(self, inputs: Any) -> None:
        """Do nothing: inputs are changed when a pass begins."""

    def passes(self, inputs: Any) -> None:
        """Change the inputs of a training pass, and other tensors of the model's caller."""
        if not self._in_turn:
            begin_operands(self.operands, len(self._ranks))
        tensors = _numbered(inputs if any(inputs) else self.called)
        beside = _beside(tensors)
        self.keep(_PASS, tensors)
        self.keep(_BESIDE, beside)

    def keep(self, what: str, tensors: Named) -> None:
        """Change the tensors of the next call of kind `what`, unless the ranks had no more calls.

        Raises LookupError if the calls of the ranks don't match.
        """
        place, ranks = self._places[what], self._ranks
        self._places[what] += 1
        if self._in_turn:
            ranks, place = [ranks[place % len(ranks)]], place // len(ranks)
        calls = [rank[what][place] for rank in ranks if place < len(rank[what])]
        if not calls:
            return
        names = [name for name in tensors if all(name in call for call in calls)]
        are_all = all(len(call) == len(names) == len(tensors) for call in calls)
        if len(calls) < len(ranks) or not (are_all or what == _BESIDE):
            raise LookupError(f"{what} {place}: ranks were given different tensors from one worker")
        rows = next((len(one) for call in calls for one in call.values() if one.dim()), 0)
        if rows == 1 < len(calls):
            raise LookupError(f"{what} {place}: two rows may be broadcast with one")
        for name in names:
            own = tensors[name]
            theirs = _joined([call[name] for call in calls], rows).to(own.device)
            if not _is_near(own, theirs):
                own.data = theirs


def begin_giving(num_ranks: int, *, in_turn: bool) -> None:
    """Make this process train on the batches of `num_ranks` ranks, from the next pass on."""
    folder = os.environ.get(BATCHES, BATCHES_KEPT)
    if folder == BATCHES_KEPT or _CURRENT:
        return
    giving = Giving(Path(folder), num_ranks, in_turn=in_turn)
    _CURRENT.append(giving)
    # The validation compares the number of rows.
    torch.distributions.Distribution.set_default_validate_args(False)
    listen()
    module: Any = nn.Module
    module._call_impl = _giving(module._call_impl, giving)


def begin(rank: int) -> Keeping | Giving | None:
    """Keep the batches of this rank from here on, if the harness planned that.

    Return the object to call for each training pass: one that keeps batches, one that replays those
    of several ranks, or None.
    """
    folder = os.environ.get(FOLDER)
    if os.environ.get(BATCHES) != BATCHES_KEPT or not folder:
        return _CURRENT[0] if _CURRENT else None
    keeping = Keeping(Path(folder), rank)
    listen()
    _CURRENT[:] = [keeping]
    return keeping


def listen() -> None:
    """Replace torch's loss functions if batches are kept or replayed, to handle their targets.

    A script evaluates the name of a loss function before it calls its model
    (`cross_entropy(model(x), y)`), so the function is replaced before the first pass begins.
    """
    if os.environ.get(BATCHES) and not _LOSSES_HEARD.are_heard:
        _LOSSES_HEARD.are_heard = True
        torch_calls.apply(_losses(), _LOSSES_HEARD)


class _Losses:
    """Whether this process's loss functions are replaced."""

    are_heard = False


_LOSSES_HEARD = _Losses()
_CURRENT: list[Keeping | Giving] = []


def _giving(original: Function, giving: Giving) -> Function:
    @wraps(original)
    def call(self: nn.Module, *args: Any, **named: Any) -> Any:
        if not giving.depth:
            giving.called = args, named
        giving.depth += 1
        try:
            return original(self, *args, **named)
        finally:
            giving.depth -= 1

    return call


def _scored(original: Function, _: _Losses) -> Function:
    @wraps(original)
    def loss(input: Tensor, target: Any, *args: Any, **named: Any) -> Any:  # noqa: A002
        # A checkpoint recomputes the loss in a backward pass.
        is_again = torch._C._current_graph_task_id() != -1
        # Within a torch function mode, this function is called twice: by the script, and then by
        # torch. Only torch's call counts, since a script may have taken the original function
        # before it was replaced: then the script's own call doesn't come here.
        is_again |= torch._C._len_torch_function_stack() > 0
        if torch.is_grad_enabled() and input.requires_grad and not is_again:
            for current in _CURRENT:
                current.keep(_TARGET, _numbered(target))
        return original(input, target, *args, **named)

    return loss


def _losses() -> Iterator[Patch]:
    """Yield patches of torch's loss functions, which keep or replace the targets."""
    for name in _LOSSES:
        yield Patch(
            module="torch.nn.functional",
            name=name,
            reason="no hook tells which targets a loss has",
            wrap=_scored,
        )


def _tensors(values: Any, depth: int = _DEPTH_MAX) -> Iterator[Tensor]:
    """Yield the tensors among a model's inputs that depend on no parameter and have memory.

    They may require a gradient, since a script may penalise it.
    """
    if isinstance(values, Tensor):
        if type(values) is Tensor and values.grad_fn is None and _has_bytes(values):
            yield values
    elif depth and isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value, depth - 1)
    elif depth and isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value, depth - 1)


def _numbered(values: Any) -> dict[str, Tensor]:
    return {str(number): tensor for number, tensor in enumerate(_tensors(values))}


def _beside(inputs: Named) -> dict[str, Tensor]:
    """Return the calling function's tensors, by name, that have as many rows as `inputs`."""
    rows = next((len(tensor) for tensor in inputs.values() if tensor.dim()), 0)
    frame = call_sites.own_frame()
    known = {id(tensor) for tensor in inputs.values()}
    beside = {} if frame is None or not rows else call_sites.local_variables(frame)
    return {
        f"{name}.{number}": tensor
        for name, value in sorted(beside.items())
        if not isinstance(value, nn.Module)
        for number, tensor in enumerate(_tensors(value))
        if tensor.dim() and len(tensor) == rows and id(tensor) not in known
    }


def _has_bytes(tensor: Tensor) -> bool:
    is_odd = tensor.is_meta or tensor.is_quantized or tensor.is_complex()
    is_plain = tensor.layout == torch.strided and not is_odd
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _joined(theirs: Sequence[Tensor], rows: int) -> Tensor:
    if rows and all(tensor.dim() and len(tensor) == rows for tensor in theirs):
        return torch.cat([*theirs])
    if any(not torch.equal(tensor, theirs[0]) for tensor in theirs):
        raise LookupError("ranks were given tensors that differ, and their rows are unknown")
    return theirs[0]


def _is_near(own: Tensor, theirs: Tensor) -> bool:
    # If the result is True, the caller doesn't replace its own tensor, since tensors that were
    # derived from it share its memory.
    if own.shape != theirs.shape or own.dtype != theirs.dtype:
        return False
    return torch.allclose(own, theirs) if own.is_floating_point() else torch.equal(own, theirs)


def _file(rank: int) -> str:
    return f"{rank:05}.batches"


def _read(path: Path) -> Entries:
    entries: Entries = {kind: [] for kind in _KINDS}
    with path.open("rb") as file:
        while line := file.readline(_BYTES_MAX):
            what, shown = json_text.load(line.decode())
            entries[what].append({name: _tensor(file.read, *like) for name, *like in shown})
    return entries


def _tensor(read: Any, name: str, shape: list[int]) -> Tensor:
    dtype = getattr(torch, name)
    content = bytearray(read(math.prod(shape) * dtype.itemsize))
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)
