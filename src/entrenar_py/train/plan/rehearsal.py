"""Rehearses a micro-batch on torch's meta device: the trainer's own code, on tensors without data.

Every storage that an operation makes is counted until it is freed, so activations and peak are
those of this model, batch and length, whatever its architecture.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.autograd import graph
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from entrenar_py.train.model import precision

_FUSED = ("cpu", "cuda")  # kinds of devices with kernels that hold no scores of all pairs
META = torch.device("meta")
# What autocast computes in the narrow format, and what in float32; meta tensors have no autocast.
_NARROW = frozenset(
    [
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "addbmm",
        "baddbmm",
        "__matmul__",
        "conv1d",
        "conv2d",
        "conv3d",
        "scaled_dot_product_attention",
    ]
)
_WIDE = frozenset(
    [
        "softmax",
        "log_softmax",
        "layer_norm",
        "cross_entropy",
        "nll_loss",
        "pow",
        "__pow__",
        "rsqrt",
        "exp",
        "logsumexp",
        "sum",
        "prod",
        "cumsum",
        "norm",
        "softplus",
        "group_norm",
    ]
)
# Operations that make a temporary tensor of their input's size, unseen from outside.
_HIDDEN = frozenset({torch.ops.aten.logsumexp})


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Bytes that a micro-batch takes beyond what was there before it.

    `kept` is held for the backward pass once the loss is known. `peak` is the most at any time,
    gradients included.
    """

    kept: int
    peak: int


def rehearse(
    loss: Callable[[], Tensor],
    leaves: Sequence[Tensor],
    *,
    module: nn.Module,
    kind: str,
    products: torch.dtype,
) -> Rehearsal:
    """Return what computing `loss` and its gradients of `leaves` takes.

    All tensors are on the meta device. `kind` is that of the device: cpu, cuda or wgpu. `products`
    is the format of products, also where blocks are computed again.
    """
    storages = _Storages()
    for tensor in (*module.parameters(), *module.buffers(), *leaves):
        storages.add(tensor)
    before = storages.peak = storages.now
    with answered(kind), precision.applied(products, META), storages:
        value = loss()
        kept = storages.now - before
        gradients = _gradients(value, leaves)
        del value, gradients
    return Rehearsal(kept=kept, peak=storages.peak - before)


@contextlib.contextmanager
def answered(kind: str) -> Iterator[None]:
    """Let code compute with tensors of the meta device, as it would on a device of a `kind`."""
    with META, _Answers(kind):
        yield


def _gradients(loss: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return what torch.autograd.grad does, with all modes on, also where blocks are recomputed.

    The public function turns modes of functions off before it begins.
    """
    made: Sequence[Tensor] = graph._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, tuple(leaves), allow_unreachable=True
    )
    return made


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operations make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        if function.overloadpacket in _HIDDEN:
            inside = args[0].numel() * args[0].element_size()
            self.peak = max(self.peak, self.now + inside)
        return made

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


class _Answers(TorchFunctionMode):
    """Answers what only values can, so that the larger case is rehearsed.

    Rows are filled up: not all elements of a mask [n, t] are set. No row has several texts, which
    transformers asks of a tensor [n]. Formats are those that autocast gives.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        self._products = WeakTensorKeyDictionary()  # outputs of linear layers
        self._holds = WeakTensorKeyDictionary()  # conditions that hold

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if function is torch.equal and args[0].is_meta:
            return self._equal(*args)
        if function is Tensor.__bool__ and args[0].is_meta:
            return args[0] in self._holds
        if name in _ANSWERS and isinstance(args[0], Tensor) and args[0].is_meta:
            return _ANSWERS[name](*args, **kwargs)
        products = precision.current(META)
        if products != torch.float32:
            dtype = products if name in _NARROW else torch.float32
            if name in _NARROW or name in _WIDE:
                args, kwargs = tree_map(lambda leaf: _cast(leaf, dtype), (args, kwargs))
        if name == "scaled_dot_product_attention" and self._kind in _FUSED:
            return _attention(self._kind, *args, **kwargs)
        made = function(*args, **kwargs)
        if name == "linear":
            self._products[made] = True
        if name == "all" and args[0].dim() == 1:
            self._holds[made] = True
        return made

    def _equal(self, one: Tensor, other: Tensor) -> bool:
        """Return whether both are outputs of a linear layer, and of one shape.

        So a head's output is taken for the logits, unless these were scaled or capped afterwards.
        """
        return one.shape == other.shape and one in self._products and other in self._products


def _nonzero(given: Tensor) -> Tensor:
    return torch.empty(given.numel(), given.dim(), dtype=torch.long, device=META)


def _grouped(rows: Tensor, weights: Tensor, **_: Any) -> Tensor:
    """Stand for the product of rows [m, k] with their experts' matrices [e, k, n]: [m, n]."""
    return rows @ weights[0]


_ANSWERS: dict[str, Callable[..., Any]] = {
    "__contains__": lambda *_: False,
    "nonzero": _nonzero,
    "grouped_mm": _grouped,
    "_grouped_mm": _grouped,
}


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    is_number = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if is_number else leaf


def _attention(
    kind: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Take the kernel that keeps queries, keys, values, output and each row's log-sum-exp.

    CPUs have none for dropout, and CUDA has none in float32 for heads that share keys.
    """
    has_kernel = query.dim() == value.dim() == 4 and query.shape[-1] == value.shape[-1]
    lacks = dropout_p if kind == "cpu" else enable_gqa and query.dtype == torch.float32
    if not has_kernel or lacks:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attended, _ = kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)
    return cast("Tensor", attended)
