"""The losses of a model, as modules: of a classifier, and of a causal language model.

Logits are the largest tensors of a training step, with up to 128,000 elements for each token.
`cross_entropy` fuses the head's matrix product with the loss, for some hundred positions at a time,
and computes the gradient in the forward pass. So all logits are never in memory at once. A captured
graph has plain operations instead.

Packing puts several samples into one row of tokens, in their order. The rows depend only on the
samples' lengths, so a shard has the same rows wherever it is computed. Positions start over with
each sample. transformers derives masks from them, and `require_apart` checks that a model does so.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic.tensors import Batch
from entrenar_py.train.model import blocks, precision
from entrenar_py.train.model.precision import in_evaluation

LOGITS_MAX = 2**26  # computed at a time: 256 MiB in float32
_PROBED_TOKENS = (1, 2, 3, 4)  # tokens that every vocabulary has


def head_of(module: nn.Module) -> nn.Linear | None:
    """Return the layer that computes the logits of `module`; None if other operations change them.

    Logits that are capped or scaled afterwards are not a layer's output, and an adapter on the head
    adds to its product. Runs the model on four tokens.
    """
    head = cast("Any", module).get_output_embeddings()
    if not _is_plain(head):
        return None
    tokens = torch.tensor([_PROBED_TOKENS], device=head.weight.device)

    def is_last() -> bool:
        logits = module(input_ids=tokens, use_cache=False).logits
        with replaced_by_identity(head):
            hidden = module(input_ids=tokens, use_cache=False).logits
        return (
            hidden.shape[-1] == head.in_features
            and hidden.dtype == head.weight.dtype  # some models convert the head's input
            and torch.equal(head(hidden), logits)
        )

    with in_evaluation(module):
        return cast("nn.Linear", head) if blocks.probed(module, is_last) else None


def _is_plain(layer: Any) -> bool:
    return type(layer) is nn.Linear and layer.bias is None


@contextlib.contextmanager
def replaced_by_identity(head: nn.Linear) -> Iterator[None]:
    """Make `head` return its input: the model then returns the last hidden state as its logits."""
    head.forward = _identity  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward


def _identity(hidden: Tensor) -> Tensor:
    return hidden


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    fused: bool = False,
    weighted: bool = False,
) -> Tensor:
    """Return the summed cross entropy of `hidden @ weight.T`, 0-d float32.

    `hidden` is [m, d], `weight` is [vocabulary, d], and `targets` is int64 [m], negative for
    positions without a target. Matrix products have the dtype of torch.autocast where that is on.
    With `fused`, a kernel on the GPU computes what comes between the products. With `weighted`, the
    result gets a weight of its own, such as a pair's, which is not rounded to that dtype.
    """
    dtype = precision.current(hidden.device)
    if dtype != torch.float32:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with precision.as_given(hidden.device):
        result: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, weight, targets, fused, weighted
        )
    return result


def select(hidden: Tensor, places: Tensor) -> Tensor:
    """Return the rows of `hidden` [n, d] at `places`, int64 [m] in ascending order: [m, d].

    If places repeat, only the first one passes its gradient on. No pass waits for a device. The
    deterministic derivative of `Tensor.index_select` would wait, since it reads the places on the
    host.
    """
    result: Tensor = _Select.apply(hidden, places)  # type: ignore[no-untyped-call]
    return result


class _Select(torch.autograd.Function):
    """See `select`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_rows = len(hidden)
        return hidden.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        [places] = ctx.saved_tensors
        rows = torch.arange(ctx.num_rows, device=places.device)
        found = torch.searchsorted(places, rows).clamp_(max=len(places) - 1)
        is_there = places.index_select(0, found) == rows
        return gradient.index_select(0, found) * is_there[:, None], None


def load_kernel(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernel of a fused `cross_entropy` for the CUDA `device`, or load it."""
    from entrenar_py.train.model import loss_kernel  # needs triton

    logits = torch.zeros(1, vocabulary, dtype=dtype, device=device)
    loss_kernel.loss_of_logits(logits, torch.zeros(1, dtype=torch.int64, device=device))


class _CrossEntropy(torch.autograd.Function):
    """See `cross_entropy`. The gradients are computed in the forward pass, at scale 1."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, fused: bool, weighted: bool
    ) -> Tensor:
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        ctx.weighted = weighted
        loss = torch.zeros((), device=hidden.device)
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        of_logits = _loss_of_logits
        fused = fused and hidden.is_cuda
        if fused:
            from entrenar_py.train.model import loss_kernel  # needs triton

            of_logits = loss_kernel.loss_of_logits
        rows = max(1, LOGITS_MAX // len(weight))
        if fused and hidden.element_size() == 2:  # nothing is in float32; prefer whole tiles
            rows = max(1, 2 * rows // _TILE * _TILE or rows)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            lost, gradient = of_logits(hidden[part] @ weight.t(), targets[part])
            loss += lost
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[part])
            if of_weight is not None:
                of_weight += gradient.t() @ hidden[part]
        ctx.save_for_backward(of_hidden, None if of_weight is None else of_weight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        multiply = _weighted if ctx.weighted else _scaled
        of_hidden, of_weight = (
            None if one is None else multiply(one, scale) for one in ctx.saved_tensors
        )
        return of_hidden, of_weight, None, None, None


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    # Without weights, the scale is mostly a power of two, so nothing is rounded.
    return gradient * scale.to(gradient.dtype)


def _weighted(gradient: Tensor, weight: Tensor) -> Tensor:
    # As a vector, the weight keeps its dtype, and a GPU needs no copy of the gradient.
    return torch.mul(gradient, weight.reshape(1), out=torch.empty_like(gradient))


_TILE = 256  # rows of a matrix product on a GPU


def _loss_of_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of `logits` [m, vocabulary], 0-d float32, and its gradient.

    The gradient has the shape and dtype of `logits`, and is 0 where `targets` [m] are negative.
    """
    shares = logits.log_softmax(-1, dtype=torch.float32)
    wanted, counts = targets.clamp(min=0)[:, None], targets[:, None] >= 0
    loss = (shares.gather(1, wanted) * counts).sum().neg()
    # Not by scatter, since its deterministic kernel reads the targets on the host.
    is_wanted = torch.arange(logits.shape[1], device=logits.device) == wanted
    gradient = shares.exp_().add_(is_wanted, alpha=-1).mul_(counts)
    return loss, gradient.to(logits.dtype)


_SAMPLES = ((1, 2, 3, 4, 5), (6, 7, 8))  # tokens that every vocabulary has
_OTHER = (8, 3, 1, 7, 2)  # replaces the first sample
_SEEN = 1e-4  # the largest part of the logits' norm that rounding changes
_ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # the same if masks select other kernels


def rows_of(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the samples of each row, as indices into `lengths`, by first fit in their order.

    A row has at most `capacity` tokens, or one sample that is longer.
    """
    rows, room = list[list[int]](), list[int]()
    for index, length in enumerate(lengths):
        row = next((row for row, left in enumerate(room) if length <= left), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(index)
        room[row] -= length
    return rows


@contextlib.contextmanager
def one_sample_a_row() -> Iterator[None]:
    """Make transformers assume that each row is one sample, which needs no mask.

    Otherwise it would read positions on the host in every forward pass. While operations are
    recorded, it can't read anything, so it would create a mask, which selects different attention
    kernels. A release of transformers that checks with other functions is not affected.
    """
    from transformers import masking_utils

    looked = {name: getattr(masking_utils, name) for name in _LOOKS if hasattr(masking_utils, name)}
    for name in looked:
        setattr(masking_utils, name, _LOOKS[name])
    try:
        yield
    finally:
        for name, function in looked.items():
            setattr(masking_utils, name, function)


def _nowhere(*_: Tensor) -> None:
    """Return None for the ends of packed samples: there are none."""


def _never(*_: Tensor | None) -> bool:
    """Return False: the operations of a traced graph must not depend on a mask's values."""
    return False


_LOOKS = {"find_packed_sequence_indices": _nowhere, "is_tracing": _never}


def require_apart(module: nn.Module, products: torch.dtype, name: object) -> None:
    """Raise UsageError if packed samples see each other, or get other values than in separate rows.

    Runs the model on a few tokens. `products` is the dtype of its matrix products.
    """
    place = next(module.parameters()).device
    first, second = _SAMPLES
    with in_evaluation(module):
        packed = _packed_logits(module, [first, second], place)
        other = _packed_logits(module, [_OTHER, second], place)
        alone = torch.cat([_packed_logits(module, [sample], place) for sample in _SAMPLES])
    cut = len(first)
    seen = _distance(packed[cut:], other[cut:])
    if not seen <= _SEEN:
        raise UsageError(
            f"data.packing with model={name}: {type(module).__name__} lets the rows of a sequence "
            f"see each other (logits differ by {seen:.2g} of their norm); leave packing out"
        )
    changed = _distance(alone, packed)
    if not changed <= _ROUNDED[products]:
        raise UsageError(
            f"data.packing with model={name}: {type(module).__name__} computes different logits "
            f"for packed rows (logits differ by {changed:.2g} of their norm); leave packing out"
        )


def _packed_logits(
    module: nn.Module, samples: Sequence[Sequence[int]], place: torch.device
) -> Tensor:
    tokens = torch.tensor([[token for sample in samples for token in sample]], device=place)
    positions = torch.cat([torch.arange(len(sample), device=place) for sample in samples])
    model = cast("Any", module)
    found: Tensor = model(input_ids=tokens, position_ids=positions[None], use_cache=False).logits
    return found[0].float()


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm())


IGNORED = -100  # the target that cross entropy leaves out
PLACES = 64  # places with a target are padded to a multiple of this, to compile few shapes
_UNPACKED = 3  # tensors of a language model's batch; packed rows add their positions


class Objective(nn.Module, ABC):
    """A loss of the model `module`, computed from the tensors of a batch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def logits(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the model's logits, [n, t, vocabulary] or [n, classes], for int64 [n, t]."""
        found: Tensor = self.module(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        return found

    @property
    @abstractmethod
    def is_static(self) -> bool:
        """See `Workload`."""

    @property
    @abstractmethod
    def head(self) -> nn.Linear | None:
        """The layer that computes the logits; None if other operations change them."""

    @abstractmethod
    def kind(self, batch: Batch) -> tuple[bool, ...]:
        """Return what the operations depend on."""

    @abstractmethod
    def example(self, kind: tuple[bool, ...], length: int) -> tuple[Tensor, ...]:
        """Return a batch of `kind` with rows of `length` tokens."""


class ClassObjective(Objective):
    """The weighted cross entropy of a classifier."""

    def __init__(self, module: nn.Module, weights: Sequence[float]) -> None:
        super().__init__(module)
        self.register_buffer(
            "weights", torch.tensor(weights, dtype=torch.float32), persistent=False
        )

    is_static = False  # the mask is read on the host
    head = None

    def kind(self, batch: Batch) -> tuple[bool, ...]:
        """Return what the operations depend on: if there is one row, and if there is padding."""
        return len(batch[0]) == 1, not batch[1].all()

    def example(self, kind: tuple[bool, ...], length: int) -> tuple[Tensor, ...]:
        """Return a batch of `kind` with rows of `length` tokens."""
        is_alone, is_padded = kind
        tokens = torch.ones(1 if is_alone else 2, length, dtype=torch.int64)
        mask = tokens.clone()
        mask[:, -1] = 0 if is_padded else 1
        return tokens, mask, torch.zeros(len(tokens), dtype=torch.int64)

    def forward(self, tokens: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss, 0-d float32, of tokens and mask [n, t] and classes [n]."""
        logits = self.logits(tokens, mask).float()
        weights = cast("Tensor", self.weights)
        return F.cross_entropy(logits, targets, weight=weights, reduction="sum")


class NextTokens(Objective):
    """A loss of a causal language model's next tokens.

    No mask is passed: padding is at the end of a row, after all tokens with a target.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._head = [head_of(module)]  # in a list, since its weights belong to the module
        self.is_fused = False  # whether a kernel of its own computes the loss

    @property
    def head(self) -> nn.Linear | None:
        return self._head[0]

    def kind(self, batch: Batch) -> tuple[bool, ...]:
        """Return what the operations depend on: if there is one row, and if rows are packed."""
        return len(batch[0]) == 1, len(batch) > _UNPACKED

    def example(self, kind: tuple[bool, ...], length: int) -> tuple[Tensor, ...]:
        """Return a batch of `kind` with rows of `length` tokens."""
        is_alone, is_packed = kind
        tokens = torch.ones(1 if is_alone else 2, length, dtype=torch.int64)
        places = torch.arange(PLACES).clamp(max=tokens.numel() - 1)
        batch = tokens, places, torch.ones_like(places)
        positions = torch.arange(length).expand_as(tokens) // 2
        return (*batch, positions) if is_packed else batch

    @property
    def is_static(self) -> bool:
        """See `Workload`."""
        return self.head is not None

    def logits_of(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return the logits of all tokens: [n * t, vocabulary]."""
        named = {} if positions is None else {"position_ids": positions}
        logits: Tensor = self.module(input_ids=tokens, use_cache=False, **named).logits
        return logits.flatten(0, 1)

    def fused_head(self, tokens: Tensor) -> nn.Linear | None:
        """Return the head if its matrix product is fused with the loss of `tokens`, else None."""
        # A captured graph needs plain operations; its tensors have a different class.
        return self.head if type(tokens) is Tensor else None

    def hidden_of(
        self, tokens: Tensor, places: Tensor, positions: Tensor | None, head: nn.Linear
    ) -> Tensor:
        """Return the input of `head` at `places`: [m, d]. Packed rows have `positions`, [n, t]."""
        rows = one_sample_a_row() if positions is None else nullcontext()
        with rows, replaced_by_identity(head):
            hidden = self.logits_of(tokens, positions)
        return select(hidden, places)


class TokenObjective(NextTokens):
    """The cross entropy of a causal language model."""

    def forward(
        self, tokens: Tensor, places: Tensor, targets: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        """Return the summed loss, 0-d float32, of tokens [n, t], and places and their targets [m].

        Packed rows have `positions`, [n, t].
        """
        head = self.fused_head(tokens)
        if head is None:
            logits = self.logits_of(tokens, positions).index_select(0, places).float()
            return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        hidden = self.hidden_of(tokens, places, positions, head)
        return cross_entropy(hidden, head.weight, targets, fused=self.is_fused)
