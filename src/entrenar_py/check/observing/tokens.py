"""The token ids in a model's arguments, and the cross-entropies that a script computes over them.

Arguments are recognised by their names in the model's `forward` and by their values: a padding mask
has zeros, positions start again at 0 where a document begins, and cumulated lengths start at 0 and
end at the number of tokens.

Since torch has no hooks for functions, two functions are replaced if a contract requires it. The
replacement returns what the original returns. The weight of a token's loss is the derivative, with
respect to it, of the value at which the backward pass began; a hook of the loss receives this
derivative.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor
from torch.utils import _pytree as pytree

from entrenar_py.check.observing import torch_calls
from entrenar_py.check.observing.torch_calls import Function, Patch
from entrenar_py.shared import hook_calls, trace

_DOCUMENT_NAMES = frozenset(
    f"{what}{number}"
    for what in ("document", "doc", "seq", "sequence", "segment")
    for number in ("_id", "_ids", "_idx")
)


_OF_DECODER, _OF_PARTS = ("decoder", "tgt", "trg", "target"), ("seg", "lang", "speaker")
_TOKEN_NAMES = ("input_ids", "ids", "idx", "tokens", "token_ids", "input", "inputs", "x")


class Arguments:
    """A copy of the arguments of a forward pass; its tensors can be exchanged.

    Only integer tensors are copied, unless the copy will be used for passes (`again`).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        again: bool = True,
    ) -> None:
        leaves, self._spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        names = {id(leaf): name for name, leaf in _named(model, args, kwargs)}
        self._leaves = [_copied(leaf, again=again) for leaf in leaves]
        self._names = [names.get(id(leaf), "") for leaf in leaves]
        # The state of a cache of keys and values continues from pass to pass.
        self.has_cache = any("Cache" in type(leaf).__name__ for leaf in leaves)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (argument name, tensor); the name is "" if it is unknown."""
        for name, leaf in self._named_leaves():
            if isinstance(leaf, Tensor):
                yield name, leaf

    def place_of(self, looked_up: Tensor) -> int | None:
        """Return the place of the argument with the token ids `looked_up` in an embedding.

        The model may have shifted the ids by one. Arguments with positions or types of tokens don't
        count. None if there is no such argument.
        """
        by_shift = {
            shift: place
            for place, (name, leaf) in reversed([*enumerate(self._named_leaves())])
            if isinstance(leaf, Tensor) and _is_whole(leaf) and leaf.shape == looked_up.shape
            if not any(word in name for word in ("pos", "type"))
            for shift in (1, 0)
            if _are_equal(leaf, looked_up, shift)
        }
        return by_shift.get(0, by_shift.get(1))

    def of_decoder(self, places: Sequence[int]) -> int | None:
        """Return the place of a decoder's tokens, otherwise the only place that may have tokens.

        None if several places may.
        """
        named = {at: self._names[at] for at in places}
        decoders = [at for at, name in named.items() if any(word in name for word in _OF_DECODER)]
        tokens = [at for at, name in named.items() if not any(word in name for word in _OF_PARTS)]
        if decoders:
            return decoders[0]
        return tokens[0] if len(tokens) == 1 else None

    def guessed(self) -> int | None:
        """Return the place of the token ids, by the names of arguments; None if unknown."""
        for place, (name, leaf) in enumerate(self._named_leaves()):
            if name in _TOKEN_NAMES and isinstance(leaf, Tensor) and self.at(place) is not None:
                return place
        return None

    def _named_leaves(self) -> Iterator[tuple[str, Any]]:
        return zip(self._names, self._leaves, strict=True)

    def at(self, place: int) -> Tensor | None:
        """Return the token ids at `place`; None if there are none."""
        leaf = self._leaves[place] if place < len(self._leaves) else None
        is_ids = isinstance(leaf, Tensor) and _is_whole(leaf) and leaf.dim() in (1, 2)
        return leaf if is_ids else None

    def again(
        self, place: int | None = None, ids: Tensor | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of the arguments; `ids`, if passed, replace the token ids at `place`."""
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        if place is not None and ids is not None:
            leaves[place] = ids.to(leaves[place].dtype).reshape(leaves[place].shape)
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs


def _named(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) for each leaf of the arguments.

    The name is that of the leaf's parameter or of its key.
    """
    try:
        bound = inspect.signature(_inner(model).forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = dict(kwargs)
    for path, leaf in pytree.tree_flatten_with_path(dict(bound))[0]:
        keys = [str(key.key) for key in path if isinstance(key, pytree.MappingKey)]
        yield (keys or [""])[-1], leaf


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    kinds = [one.kind for one in inspect.signature(model.forward).parameters.values()]
    inner = [*model.children()]
    is_wrapper = kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    return _inner(inner[0]) if is_wrapper and len(inner) == 1 else model


def _copied(leaf: Any, *, again: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone() if again or not leaf.is_floating_point() else None


def _are_equal(ids: Tensor, looked_up: Tensor, shift: int) -> bool:
    length = ids.shape[-1] - shift
    return length > 0 and bool((ids[..., :length] == looked_up[..., shift:]).all())


def _is_whole(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)


# --- padding and documents ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The token ids of a micro-batch, [rows, positions].

    `padding` is true at padding tokens, and `is_masked` says whether an argument is a mask of them.
    `documents` has the number of each token's document within its row; None if no argument shows
    that a row has several documents. `shown` is the name of the argument that shows the documents,
    or "".
    """

    ids: Tensor
    padding: Tensor
    is_masked: bool
    documents: Tensor | None
    shown: str

    def begins(self) -> Tensor:
        """Return whether each token is the first of its row or document, bool [rows, positions]."""
        begins = torch.zeros_like(self.padding)
        begins[:, 0] = True
        begins[:, 1:] = self.padding[:, :-1]
        if self.documents is not None:
            begins[:, 1:] |= self.documents[:, 1:] != self.documents[:, :-1]
        return begins & ~self.padding


def rows_of(arguments: Arguments, place: int, padding_id: int | None) -> Rows | None:
    """Return the rows of the token ids at `place`; None if there are none.

    `padding_id` is the padding token of the embedding.
    """
    ids = arguments.at(place)
    if ids is None or not ids.numel():
        return None
    ids = (ids[None] if ids.dim() == 1 else ids).long()
    others = [(name, argument) for name, argument in arguments.tensors() if argument.numel() > 1]
    masked = next(
        (m for name, argument in others if (m := _masked(name, argument, ids)) is not None), None
    )
    padding = masked
    if padding is None:  # -1 is no token, so then there is no padding
        padding = _outer(ids == (-1 if padding_id is None else padding_id))
    documents, shown = None, ""
    for name, argument in others:
        documents = _documents(name, argument, ids, padding)
        if documents is not None:
            shown = name
            break
    return Rows(
        ids=ids,
        padding=padding,
        is_masked=masked is not None,
        documents=documents,
        shown=shown,
    )


def _outer(same: Tensor) -> Tensor:
    first = same.long().cumprod(1)
    last = same.flip(1).long().cumprod(1).flip(1)
    return (first + last).bool()


def _masked(name: str, mask: Tensor, ids: Tensor) -> Tensor | None:
    """Return where an argument masks padding, bool like `ids`; None if it is no such mask.

    A mask may be true at the padding, or at all other tokens. The padding is recognised because it
    is always the same token.
    """
    name = name.lower()
    if mask.shape != ids.shape or not ("att" in name or "pad" in name) or "mask" not in name:
        return None
    masked = mask == 0
    if not bool(((mask == 0) | (mask == 1)).all()) or not bool(masked.any()) or bool(masked.all()):
        return None
    if "pad" in name and _is_one(ids[~masked]) and not _is_one(ids[masked]):
        return ~masked
    return masked


def _is_one(tokens: Tensor) -> bool:
    return bool((tokens == tokens[0]).all())


def _documents(name: str, given: Tensor, ids: Tensor, padding: Tensor) -> Tensor | None:
    """Return each token's document number in its row; None unless `given` shows several."""
    begins = _begins(name.lower(), given, ids)
    if begins is None:
        return None
    begins = begins & ~padding
    begins[:, 0] = True
    numbers = begins.long().cumsum(1) - 1
    lasting = begins[:, :-1] & ~begins[:, 1:]  # where a document of more than one token begins
    several = (lasting & (numbers[:, :-1] > 0)).any()
    return numbers if bool(several) else None


def _begins(name: str, argument: Tensor, ids: Tensor) -> Tensor | None:
    rows, positions = ids.shape
    if argument.dim() in (3, 4) and argument.shape[-2:] == (positions, positions):
        return _of_block_mask(argument, rows)
    if not _is_whole(argument):
        return None
    if argument.dim() == 1 and rows == 1 and argument.numel() != positions:
        return _of_lengths(argument.long(), positions)
    if (
        argument.dim() > 2
        or argument.shape[-1] != positions
        or argument.numel() not in (*(positions, rows * positions),)
    ):
        return None
    row = argument.reshape(-1, positions).long().expand(rows, positions)
    begins = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    is_numbered = name in _DOCUMENT_NAMES or ("att" in name and bool((row > 1).any()))
    if is_numbered:
        begins[:, 1:] = row[:, 1:] != row[:, :-1]
        return begins
    steps = row[:, 1:] - row[:, :-1]
    again = row[:, 1:] == 0
    are_positions = bool((row[:, 0] == 0).all()) and bool(((steps == 1) | again).all())
    if not are_positions or "pos" not in name:
        return None
    begins[:, 1:] = again
    return None if _are_periodic(again) else begins


def _are_periodic(again: Tensor) -> bool:
    """Return whether positions restart at equal distances, identically in all rows.

    Then they are positions within a period (a bar of music, a day), and not within documents, since
    the lengths of documents differ. False for a single row of two documents: these may have equal
    lengths by chance.
    """
    places = (again[0].nonzero().flatten() + 1).tolist()
    is_cut = bool(places) and again.shape[1] + 1 - places[-1] <= places[0]
    are_many = len(again) * len(places) > 1
    are_equal = places == [places[0] * (n + 1) for n in range(len(places))]
    return is_cut and are_many and are_equal and bool((again == again[0]).all())


def _of_lengths(ends: Tensor, num_tokens: int) -> Tensor | None:
    # Lengths are cumulated: 0, 5, 12 for documents of 5 and 7 tokens.
    is_cumulated = int(ends[0]) == 0 and int(ends[-1]) == num_tokens
    if not is_cumulated or not bool((ends[1:] >= ends[:-1]).all()):
        return None
    begins = torch.zeros(1, num_tokens, dtype=torch.bool, device=ends.device)
    begins[0, ends[(ends < num_tokens)]] = True
    return begins


def _of_block_mask(mask: Tensor, rows: int) -> Tensor | None:
    """Return where a token doesn't see the previous one, according to a mask of all pairs.

    None if the shape of the mask doesn't match the rows.
    """
    if mask.dim() == 4:
        mask = mask[:, 0]
    sees = mask > -1 if mask.is_floating_point() else mask.bool()
    own = sees.diagonal(dim1=-2, dim2=-1)
    if not bool(own.any()):  # the mask is true where a token doesn't see another one
        sees, own = ~sees, ~own
    if len(sees) not in (1, rows) or not bool(own.all()):
        return None
    begins = torch.zeros(rows, mask.shape[-1], dtype=torch.bool, device=mask.device)
    begins[:, 1:] = ~sees.diagonal(offset=-1, dim1=-2, dim2=-1)
    return begins


# --- losses over tokens ---------------------------------------------------------------------------


SHIFTS = 3  # a target is compared with the tokens at its own and at the next two positions


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A cross-entropy over `targets`; `counted` says which targets are not ignored.

    `slopes` are the gradients of the loss. `is_weighted` says that classes have weights, and
    `is_trained` that the loss may have gradients.
    """

    targets: Tensor
    counted: Tensor
    reduction: str
    is_weighted: bool
    is_trained: bool
    dtype: torch.dtype
    slopes: list[Tensor] = field(default_factory=list)

    def shares(self) -> tuple[float, float] | None:
        """Return the smallest and the largest weight of a counted token.

        None without a backward pass. Both are NaN if classes have weights.
        """
        count = int(self.counted.sum())
        if not self.slopes or not count:
            return None
        if self.is_weighted:
            return math.nan, math.nan
        slope = torch.stack([one.double() for one in self.slopes]).sum(0)
        if self.reduction == "none":
            known = slope.flatten()[self.counted.flatten()]
            return float(known.min()), float(known.max())
        share = float(slope) / (count if self.reduction == "mean" else 1)
        return share, share


Heard = Callable[[Loss], None]


class _Ears:
    """Reports each loss to all listeners of this process."""

    def __init__(self) -> None:
        self.all: list[Heard] = []
        self.was_applied = False

    def scored(self, loss: Any, arguments: dict[str, Any]) -> None:
        """Report a cross-entropy, unless it is recomputed, or computed only for display.

        An activation checkpoint recomputes the loss within the backward pass.
        """
        again = torch._C._current_graph_task_id() != -1
        is_shown = torch.is_grad_enabled() and not getattr(loss, "requires_grad", False)
        if hook_calls.is_traced() or again or is_shown:
            return
        if (heard := _loss(loss, arguments)) is not None:
            if heard.is_trained:
                loss.register_hook(heard.slopes.append)
            for ear in [*self.all]:
                ear(heard)


_EARS = _Ears()


def listen(heard: Heard) -> Callable[[], None]:
    """Call `heard` for each loss from now on; return the function that stops this."""
    if not _EARS.was_applied:
        _EARS.was_applied = True
        torch_calls.apply(TABLE, _EARS)
    _EARS.all.append(heard)
    return lambda: _EARS.all.remove(heard) if heard in _EARS.all else None


def _scored(original: Function, ears: _Ears) -> Function:
    signature = inspect.signature(original)

    @wraps(original)
    def scored(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        if ears.all:
            ears.scored(loss, signature.bind(*args, **kwargs).arguments)
        return loss

    return scored


TABLE = tuple(
    Patch(
        module="torch.nn.functional",
        name=name,
        reason="no hook tells which targets a loss counts, and what each of them counts",
        wrap=_scored,
    )
    for name in ("cross_entropy", "nll_loss")
)


def _loss(loss: Tensor, arguments: dict[str, Any]) -> Loss | None:
    """Return the loss of a call with these `arguments`; None if its targets aren't classes."""
    targets = arguments["target"]
    if targets.is_floating_point() or type(targets) is not Tensor:
        return None
    reduction = arguments.get("reduction", "mean")
    if arguments.get("reduce") is False:
        reduction = "none"
    elif arguments.get("size_average") is False:
        reduction = "sum"
    targets = targets.detach().clone()
    return Loss(
        targets=targets,
        counted=targets != arguments.get("ignore_index", -100),
        reduction=reduction,
        is_weighted=arguments.get("weight") is not None,
        is_trained=loss.requires_grad,
        dtype=loss.dtype,
    )


# --- meaning of the targets -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """The positions that a loss counts; `counted` is bool in the shape of the ids.

    `dimension` is the dimension of the ids along which positions run.
    """

    dimension: int
    counted: Tensor


def scored_event(loss: Loss, rows: Rows, **place: int) -> tuple[trace.Scored, Place] | None:
    """Return the record of a loss over the tokens of `rows`, and the positions that it counts.

    None for a loss without a backward pass, and for a loss over anything else than these tokens.
    """
    shares = loss.shares()
    grids = [*_grids(loss, rows.ids)]
    if shares is None or not grids:
        return None
    compared = [(*_matches(*grid), grid) for grid in grids]
    known, matches, grid = max(compared, key=lambda one: max(one[1], default=0))
    padded = crossing = tokens_crossing = 0
    if grid[3] == 1:
        padded = _padded(*grid[:2], rows)
        crossing, tokens_crossing = _crossing(*grid[:2], rows)
    scored = trace.Scored(
        **place,
        counted=int(loss.counted.sum()),
        least=shares[0],
        most=shares[1],
        dtype=str(loss.dtype).removeprefix("torch."),
        known=known,
        matches=matches,
        padded=padded,
        crossing=crossing,
        tokens_crossing=tokens_crossing,
    )
    _, counted, ids, dimension = grid
    missing = ids.shape[1] - counted.shape[1]
    counted = F.pad(counted, (0, missing))
    return scored, Place(dimension=dimension, counted=counted if dimension else counted.t())


_Grid = tuple[Tensor, Tensor, Tensor, int]


def _grids(loss: Loss, ids: Tensor) -> Iterator[_Grid]:
    """Yield (targets, counted, ids, dimension) for each way to arrange the targets like the ids.

    The three tensors are [rows, positions]. The targets may lack the last position, or the last
    two. `dimension` is the dimension of positions in the script's own arrangement.
    """
    for dimension in (1, 0):
        length, rows = ids.shape[dimension], ids.shape[1 - dimension]
        for width in range(length, length - SHIFTS, -1):
            if width < 1 or loss.targets.numel() != width * rows:
                continue
            shape = (rows, width) if dimension else (width, rows)
            parts = (loss.targets.reshape(shape), loss.counted.reshape(shape), ids)
            targets, counted, tokens = parts if dimension else (one.t() for one in parts)
            yield targets, counted, tokens, dimension


def _matches(
    targets: Tensor, counted: Tensor, ids: Tensor, dimension: int
) -> tuple[int, tuple[int, ...]]:
    """Return how many counted targets are comparable, and how many match at each shift."""
    width = min(targets.shape[1], ids.shape[1] - SHIFTS + 1)
    if width < 1:
        return 0, ()
    known = counted[:, :width]
    equal = (
        int((known & (targets[:, :width] == ids[:, shift : shift + width])).sum())
        for shift in range(SHIFTS)
    )
    return int(known.sum()), tuple(equal)


def _padded(targets: Tensor, counted: Tensor, rows: Rows) -> int:
    # Leave out the first padding token, which may be intended as the end of the text.
    width = min(targets.shape[1], rows.ids.shape[1] - 1)
    both = rows.padding[:, :width] & rows.padding[:, 1 : width + 1]
    return int((counted[:, :width] & both).sum())


def _crossing(targets: Tensor, counted: Tensor, rows: Rows) -> tuple[int, int]:
    """Return how many targets begin the next document, and how many distinct tokens these are."""
    if rows.documents is None:
        return 0, 0
    width = min(targets.shape[1], rows.ids.shape[1] - 1)
    after = slice(1, width + 1)
    other = rows.documents[:, :width] != rows.documents[:, after]
    here = targets[:, :width] == rows.ids[:, after]
    crossing = counted[:, :width] & other & here & ~rows.padding[:, after]
    return int(crossing.sum()), int(torch.unique(targets[:, :width][crossing]).numel())
