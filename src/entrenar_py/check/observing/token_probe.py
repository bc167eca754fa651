"""Passes a micro-batch through a model again, with some tokens replaced, to measure the change.

All ranks make the same number of passes, since a pass may communicate. A token is replaced by the
next token of the micro-batch, so the model gets only tokens that it also gets in training. The
compared outputs are the scores that the model returns, otherwise the last tensor of the pass with a
row of numbers for each token.

Such a pass has no lasting effect on the script (`undisturbed`). It preserves the states of all
generators, the buffers, and the attributes of modules: counters, caches, and losses that a forward
pass leaves for the script.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from entrenar_py.check.observing.generators import Generators
from entrenar_py.check.observing.tokens import Arguments, Rows
from entrenar_py.shared import trace

_CONTAINERS = (dict, OrderedDict, list, set, deque)
_OWN = "entrenar_py"


@contextmanager
def undisturbed(model: nn.Module, generators: Generators) -> Iterator[Callable[[], None]]:
    """Yield a function that restores the generators; at the end, restore all state.

    Modules that the script compiles run uncompiled.
    """
    states, modules, held = generators.kept(), [*map(_Module, model.modules())], _tensors(model)
    copies = [(tensor, tensor.detach().clone()) for tensor in held]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _eager():
                yield lambda: generators.restore(states)
    finally:
        generators.restore(states)
        for module in modules:
            module.restore()
        with torch.no_grad():
            for tensor, before in copies:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def _eager() -> AbstractContextManager[Any]:
    # Importing dynamo takes seconds, and as long as it isn't imported, nothing is compiled.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def own_hook(model: nn.Module) -> str:
    """Return the name of a module in `model` with a hook of the script; "" if there is none.

    Such a hook may count passes, or store its arguments. Hooks of `model` itself don't matter,
    since only its `forward` method is called.
    """
    for name, module in model.named_modules():
        if module is model:
            continue
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not _is_of_library(hook):
                return str(name)
    return ""


def _is_of_library(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)
    module = str(getattr(hook, "__module__", None) or type(hook).__module__)
    top = module.partition(".")[0]
    file = str(getattr(sys.modules.get(module), "__file__", None) or "")
    return top == _OWN or "site-packages" in file or "dist-packages" in file


def _tensors(model: nn.Module) -> list[Tensor]:
    attributes = (value for module in model.modules() for value in vars(module).values())
    found = [*model.buffers(), *(one for one in attributes if type(one) is Tensor)]
    kept = {id(tensor): tensor for tensor in found}
    return [one for one in kept.values() if not (one.is_meta or one.is_inference())]


class _Module:
    """The attributes of a module, and the contents of its containers, to be restored."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)
        self._before = dict(self._attributes)
        self._contents = [
            (value, value.copy()) for value in self._before.values() if type(value) in _CONTAINERS
        ]

    def restore(self) -> None:
        """Restore the attributes, and each container in place."""
        if not _are_same(self._attributes, self._before):
            self._attributes.clear()
            self._attributes.update(self._before)
        for container, before in self._contents:
            if not _are_same(container, before):
                container.clear()
                (container.extend if hasattr(container, "extend") else container.update)(before)


def _are_same(now: Any, before: Any) -> bool:
    if isinstance(now, set):
        return bool(now == before)
    parts = [
        [*one.items()] if isinstance(one, dict) else [*enumerate(one)] for one in (now, before)
    ]
    if len(parts[0]) != len(parts[1]):
        return False
    return all(a[0] == b[0] and a[1] is b[1] for a, b in zip(*parts, strict=True))


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TF32 = 2.0**-10


class Table(NamedTuple):
    """The first embedding of a model that looks up an argument of the model.

    `place` is the place of this argument. `padding_id` is the embedding's padding token, or None.
    """

    place: int
    padding_id: int | None


class _Output(NamedTuple):
    """A pass's numbers for each token, float [rows, positions, n], and its loss.

    Each may be None.
    """

    scores: Tensor | None
    loss: float | None


class _Calls(TorchFunctionMode):
    """Records what embeddings look up in a pass, or the pass's last tensor with a row per token."""

    def __init__(self, ids: Tensor | None = None) -> None:
        super().__init__()
        self.looked_up: list[tuple[Tensor, int | None]] = []
        self.last: Tensor | None = None
        self._ids = ids

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if self._ids is None and function is F.embedding:
            given = dict(zip(("input", "weight", "padding_idx"), args, strict=False)) | kwargs
            self.looked_up.append((given["input"], given.get("padding_idx")))
        elif self._ids is not None and type(result) is Tensor and _is_of(result, self._ids):
            self.last = result
        return result


def _is_of(output: Tensor, ids: Tensor) -> bool:
    is_shaped = output.dim() == ids.dim() + 1 and output.shape[:-1] == ids.shape
    return output.dtype in _FLOATS and is_shaped and output.shape[-1] > 1


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Passes `arguments` through `model`; `start` restores the generators before each pass.

    `autocast` returns the context of the script's own pass, with the dtype `autocast_dtype`. If
    several `ranks` train, the noise takes two passes: in the first one even ranks keep their tokens
    and odd ranks replace theirs, in the second one the other way round. `parity` is that of this
    rank. Tokens in `special` are never replaced.
    """

    model: nn.Module
    arguments: Arguments
    start: Callable[[], None]
    autocast: Callable[[], AbstractContextManager[Any]]
    autocast_dtype: torch.dtype | None
    ranks: int
    parity: int
    special: Collection[int]

    def table(self) -> Table | None:
        """Return the first embedding that looks up an argument; None if there is none.

        If a model embeds the tokens of an encoder before those of a decoder, only the arguments'
        names show which are the decoder's.
        """
        calls = _Calls()
        self._run(calls)
        tables: dict[int, Table] = {}
        for ids, padding_id in calls.looked_up:
            if (place := self.arguments.place_of(ids)) is not None:
                tables.setdefault(place, Table(place, padding_id))
        first = next(iter(tables), None)
        chosen = first if len(tables) < 2 else self.arguments.of_decoder([*tables])
        return None if chosen is None else tables[chosen]

    def events(
        self, rows: Rows, place: int, dimension: int, counted: Tensor, **where: int
    ) -> Iterator[trace.Reread]:
        """Yield what changes if later tokens, padding, and earlier documents are replaced.

        Positions are along `dimension` of the token ids. The outputs that must not change are those
        at positions that are `counted`, bool in the shape of the ids.
        """
        before = self._pass(rows.ids, place)
        noise = self._noise(rows.ids, place, before)
        noise = max(noise, self._of_other_rows(rows.ids, place, dimension, before))
        for trial in _trials(rows, dimension, counted):
            other = self._replaced(rows, trial.wanted)
            after = self._pass(other, place)
            if before.scores is None or after.scores is None or bool((other == rows.ids).all()):
                continue
            change = _change(before.scores, after.scores)
            known = None not in (before.loss, after.loss)
            yield trace.Reread(
                **where,
                replaced=trial.replaced,
                cut=trial.cut,
                noise=noise,
                scale=float(before.scores.nan_to_num().abs().max()),
                unit=self._unit(before.scores),
                loss=abs((before.loss or 0.0) - (after.loss or 0.0)) if known else None,
                own=None if trial.cut is None else _most(change.select(dimension, trial.cut)),
                moved=_most(change[trial.wanted]),
                **_stays(change, trial.stays, dimension),
            )

    def _noise(self, ids: Tensor, place: int, before: _Output) -> float:
        """Return how much outputs change if only the other ranks replace their tokens.

        In a single process the same pass is simply repeated.
        """
        noise = 0.0
        for parity in range(min(2, self.ranks)):
            keeps = self.ranks == 1 or parity == self.parity
            after = self._pass(ids if keeps else _next(ids, self.special), place)
            if keeps and before.scores is not None and after.scores is not None:
                noise = _most(_change(before.scores, after.scores))
        return noise

    def _of_other_rows(self, ids: Tensor, place: int, dimension: int, before: _Output) -> float:
        """Return how much the last row's outputs change if the tokens of all other rows change.

        They rightly change in a model with experts of limited capacity: an expert takes as many
        tokens of the last row as the other rows leave room for.
        """
        at = 1 - dimension
        last, others = ids.shape[at] - 1, _next(ids, self.special).clone()
        others.select(at, last).copy_(ids.select(at, last))
        after = self._pass(others, place)
        if before.scores is None or after.scores is None:
            return 0.0
        return _most(_change(before.scores, after.scores).select(at, last))

    def _replaced(self, rows: Rows, wanted: Tensor) -> Tensor:
        other = _next(rows.ids, self.special)
        if rows.padding.any():  # the replacement of a padding token must not be a padding token
            tokens = torch.unique(rows.ids[~rows.padding])
            turn = torch.arange(rows.ids.numel(), device=rows.ids.device) % len(tokens)
            other = torch.where(rows.padding, tokens[turn].view_as(other), other)
        return torch.where(wanted, other, rows.ids)

    def _pass(self, ids: Tensor, place: int) -> _Output:
        own = self.arguments.at(place)
        assert own is not None, "the rows come from there"
        calls = _Calls(own)
        leaves = [one for one in tree_leaves(self._run(calls, place, ids)) if _is_number(one)]
        scores = [leaf for leaf in leaves if _is_of(leaf, own)]
        last = max(scores, key=lambda one: one.shape[-1], default=calls.last)
        losses = [float(leaf) for leaf in leaves if leaf.dim() == 0]
        return _Output(
            scores=None if last is None else last.detach().reshape(*ids.shape, -1),
            loss=next(iter(losses), None),
        )

    def _run(self, calls: _Calls, place: int | None = None, ids: Tensor | None = None) -> Any:
        self.start()
        args, kwargs = self.arguments.again(place, ids)
        with self.autocast(), calls:
            return self.model.forward(*args, **kwargs)

    def _unit(self, scores: Tensor) -> float:
        held = {parameter.dtype for parameter in self.model.parameters()}
        formats = {scores.dtype, *held, *filter(None, [self.autocast_dtype])}
        unit = max(torch.finfo(one).eps for one in formats if one in _FLOATS)
        is_tf32 = scores.is_cuda and torch.backends.cuda.matmul.allow_tf32
        return max(unit, _TF32) if is_tf32 else unit


class _Trial(NamedTuple):
    """A replacement of the tokens in `wanted`, after which the outputs in `stays` must not change.

    Both are bool, in the shape of the ids.
    """

    replaced: str
    wanted: Tensor
    stays: Tensor
    cut: int | None = None


def _trials(rows: Rows, dimension: int, counted: Tensor) -> Iterator[_Trial]:
    """Yield the trials; their number is the same for any micro-batch."""
    ids, nothing = rows.ids, torch.zeros_like(rows.padding)
    numbers = torch.arange(ids.shape[dimension], device=ids.device)
    numbers = numbers.view(1, -1) if dimension else numbers.view(-1, 1)
    for cut in _cuts(ids.shape[dimension]):
        yield _Trial("later", (numbers >= cut) & ~nothing, (numbers < cut) & counted, cut)
    stays = counted & ~rows.padding
    yield _Trial("padding", rows.padding if rows.is_masked else nothing, stays)
    earlier = last = nothing
    if rows.documents is not None:
        most = rows.documents.amax(1, keepdim=True)
        last = (rows.documents == most) & (most > 0)
        earlier = rows.documents < most
    yield _Trial("earlier", earlier & ~rows.padding, stays & last)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in _FLOATS


def _cuts(length: int) -> tuple[int, int]:
    """Return two odd positions within a row, since block masks have their borders elsewhere."""
    return min(length - 1, length // 3 | 1), min(length - 1, 2 * length // 3 | 1)


def _next(ids: Tensor, special: Collection[int]) -> Tensor:
    """Return `ids` with each token replaced by the next larger one among them.

    The largest token is replaced by the smallest one. `special` tokens are kept.
    """
    tokens = torch.unique(ids)
    usual = tokens[~torch.isin(tokens, torch.tensor([*special] or [-1], device=ids.device))]
    if not len(usual):
        return ids
    place = torch.searchsorted(usual, ids.contiguous()).clamp(max=len(usual) - 1)
    return torch.where(usual[place] == ids, usual[(place + 1) % len(usual)], ids)


def _change(before: Tensor, after: Tensor) -> Tensor:
    """Return the largest change among the numbers of each token, [rows, positions]."""
    change = (after.float() - before.float()).abs()
    return torch.where(after == before, torch.zeros_like(change), change).amax(-1)


def _most(change: Tensor) -> float:
    return float(change.max()) if change.numel() else 0.0


def _stays(change: Tensor, stays: Tensor, dimension: int) -> dict[str, Any]:
    kept = torch.where(stays, change, torch.zeros_like(change))
    place = divmod(int(kept.argmax()), kept.shape[1])
    return {"still": float(kept.max()), "row": place[1 - dimension], "position": place[dimension]}
