"""The model of a run without its weights: its sizes, and the memory that a micro-batch takes.

A micro-batch is rehearsed on torch's meta device: the trainer's own code runs on tensors without
data. The storage of every tensor is counted until it is freed. So activations and peak are right
for this model, batch and length, whatever the architecture.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.autograd import graph
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from entrenar_py.compute import draws, nf4
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model import blocks, masks, model, precision, preparation
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.settings import Settings
from entrenar_py.train.model.workload import Finetuning

_FUSED = ("cpu", "cuda")  # kinds of devices with attention kernels that don't store all scores
META = torch.device("meta")
# Functions that autocast computes in the narrow dtype, and those that it computes in float32. Meta
# tensors have no autocast, so it is imitated here.
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
# Operations that allocate a temporary tensor of their input's size, which no hook shows.
_HIDDEN = frozenset({torch.ops.aten.logsumexp})


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Bytes that a micro-batch takes in addition to what was allocated before it.

    `kept` is held for the backward pass once the loss is known. `peak` is the most at any time,
    including gradients.
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
    """Return the memory that computing `loss` and its gradients with respect to `leaves` takes.

    All tensors are on the meta device. `kind` is the kind of the imitated device: cpu, cuda or
    wgpu. `products` is the dtype of matrix products, also where blocks are recomputed.
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
    """Let code compute with meta tensors as it would on a device of the given `kind`."""
    autocast = torch.autocast

    def imitated(device_type: str, dtype: Any = None, enabled: bool = True, **rest: Any) -> Any:
        if device_type == META.type and not enabled:
            return precision.as_given(META)
        return autocast(device_type, dtype, enabled, **rest)

    # torch has no autocast for meta tensors, and peft turns it off around products for experts.
    torch.autocast = imitated  # type: ignore[assignment, misc]
    try:
        with META, _Answers(kind):
            yield
    finally:
        torch.autocast = autocast  # type: ignore[misc]


def _gradients(loss: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the result of torch.autograd.grad, with all modes on even where blocks are recomputed.

    The public function turns function modes off before it begins.
    """
    gradients: Sequence[Tensor] = graph._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, tuple(leaves), allow_unreachable=True
    )
    return gradients


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operations allocate, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        if function.overloadpacket in _HIDDEN:
            inside = args[0].numel() * args[0].element_size()
            self.peak = max(self.peak, self.now + inside)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is already counted."""
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
    """Answers what code asks about values of meta tensors; the case with more memory is assumed.

    Rows are assumed to be padded, so not all elements of a mask [n, t] are set. No row is assumed
    to hold several texts; transformers asks a tensor [n] about that. Dtypes are the ones that
    autocast selects.
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
        result = function(*args, **kwargs)
        if name == "linear":
            self._products[result] = True
        if name == "all" and args[0].dim() == 1:
            self._holds[result] = True
        return result

    def _equal(self, output: Tensor, logits: Tensor) -> bool:
        """Return whether both tensors are outputs of linear layers and have the same shape.

        So the output of a head counts as the logits, unless the logits were scaled or capped
        afterwards.
        """
        return (
            output.shape == logits.shape and output in self._products and logits in self._products
        )


def _nonzero(given: Tensor) -> Tensor:
    return torch.empty(given.numel(), given.dim(), dtype=torch.long, device=META)


def _grouped(rows: Tensor, weights: Tensor, **_: Any) -> Tensor:
    """Return a stand-in, [m, n], for rows [m, k] times their experts' matrices [e, k, n]."""
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
    """Return attention from a kernel that keeps queries, keys, values, output and log-sum-exp.

    Falls back to torch's function where no such kernel exists: on CPUs with dropout, and on CUDA in
    float32 with heads that share keys.
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


FLOAT_BYTES = 4
# What foreign model code raises on tensors without values; torch itself raises RuntimeError.
_UNFORESEEN = (RuntimeError, NotImplementedError, ValueError, TypeError, LookupError)
_SCALES = 256  # scales of NF4 that share a second-level scale
_NF4 = "_is_planned_in_nf4"  # marks a layer with weights that are to be in NF4


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The part of a model that one rank holds.

    With `tensor` > 1, each layer that can be split is split over this many ranks. If `blocks` is
    given, the rank holds only this many of the model's blocks. Without `has_table`, another rank
    has the token embedding; without `has_head`, another rank has everything after the last block.
    An embedding that is tied to the head is held with either.
    """

    tensor: int = 1
    blocks: int | None = None
    has_table: bool = True
    has_head: bool = True


WHOLE = Cut()


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Sizes of a rank's part of the model.

    `frozen_bytes` is the size of frozen weights in the run's dtype. `trained` is the number of
    trained elements, which are float32. `largest_block_bytes` is the size of the largest block's
    weights, `outside_bytes` the size of all weights outside of blocks.
    """

    frozen_bytes: int
    trained: int
    largest_block_bytes: int
    outside_bytes: int

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights, including trained ones."""
        return self.frozen_bytes + FLOAT_BYTES * self.trained


@dataclass(frozen=True)
class Shape:
    """The model of a run on torch's meta device."""

    settings: Settings
    _parts: dict[tuple[Cut, bool], nn.Module] = field(default_factory=dict)
    _works: dict[str, Finetuning] = field(default_factory=dict)
    _rehearsed: dict[tuple[Any, ...], Rehearsal] = field(default_factory=dict)
    _counts: dict[Cut, Counts] = field(default_factory=dict)

    @cached_property
    def whole(self) -> nn.Module:
        """The whole model with its adapters."""
        whole = model.shape(self.settings)
        if self.settings.method == "qlora":
            for name in precision.packed(whole):
                setattr(whole.get_submodule(name), _NF4, "lora_" not in name)
        return whole

    @property
    def num_parameters(self) -> int:
        """The number of the model's parameters, including adapters."""
        return _num_elements(self.whole)

    @property
    def config(self) -> Any:
        """The configuration of the part of the model that reads text."""
        return cast("Any", self.whole).config.get_text_config()

    @property
    def num_blocks(self) -> int:
        """The number of the model's blocks."""
        return len(_stack(self.whole))

    @property
    def blocks(self) -> Iterator[nn.Module]:
        """The model's blocks, in order."""
        yield from _stack(self.whole)

    def block_counts(self) -> list[Counts]:
        """Return the sizes of each block."""
        counts = []
        for block in self.blocks:
            trained = sum(p.numel() for p in block.parameters() if p.requires_grad)
            size = self._bytes(block)
            frozen = size - FLOAT_BYTES * trained
            counts.append(
                Counts(
                    frozen_bytes=frozen, trained=trained, largest_block_bytes=size, outside_bytes=0
                )
            )
        return counts

    def counts(self, cut: Cut = WHOLE) -> Counts:
        """Return the sizes of a part of the model."""
        if cut not in self._counts:
            self._counts[cut] = self._count(cut)
        return self._counts[cut]

    def _count(self, cut: Cut) -> Counts:
        part = self._part(cut)
        blocks = [self._bytes(block) for block in _stack(part)]
        elsewhere = _elsewhere(part, cut)
        others = {*elsewhere, *self._of_other_ends(part, cut)}
        trained = sum(p.numel() for p in part.parameters() if p.requires_grad and p not in others)
        everything = self._bytes(part) - sum(p.numel() * p.element_size() for p in elsewhere)
        return Counts(
            frozen_bytes=everything - FLOAT_BYTES * trained,
            trained=trained,
            largest_block_bytes=max(blocks, default=0),
            outside_bytes=everything - sum(blocks),
        )

    def _of_other_ends(self, part: nn.Module, cut: Cut) -> Iterator[nn.Parameter]:
        """Yield the parameters before or after the blocks of `part` that another rank trains.

        Embeddings and heads are left out.
        """
        model = cast("Any", part)
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        known = {parameter for end in ends if end is not None for parameter in end.parameters()}
        is_here, module = cut.has_table, part
        for name in self._path:
            for other, child in module.named_children():
                if other == name:
                    is_here = cut.has_head
                elif not is_here:
                    yield from (
                        parameter for parameter in child.parameters() if parameter not in known
                    )
            is_here, module = cut.has_table, module.get_submodule(name)

    @cached_property
    def _path(self) -> list[str]:
        stack = _stack(self.whole)
        names = (name for name, module in self.whole.named_modules() if module is stack)
        return next(names, "").split(".")

    def cuts_into(self, size: int) -> str:
        """Return why `size` ranks can't share the model's layers; "" if they can."""
        return blocks.problem_of_sharing(self.whole, size)

    def rehearsed(
        self, *, rows: int, length: int, kind: str, recompute: bool, cut: Cut = WHOLE
    ) -> Rehearsal:
        """Return the memory of a micro-batch of `rows` x `length` tokens on a device of `kind`.

        Raises UsageError if the model can't be rehearsed.
        """
        key = rows, length, kind, recompute, cut
        if key not in self._rehearsed:
            part = self._part(cut, recompute=recompute)
            self._rehearsed[key] = self._rehearse(rows, length, kind, part, cut.has_head)
        return self._rehearsed[key]

    def _rehearse(
        self, rows: int, length: int, kind: str, part: nn.Module, has_head: bool
    ) -> Rehearsal:
        samples = _samples(rows, length, are_pairs=self.settings.task == "preference")
        for tensor in (self.whole, part):
            cast("Any", tensor).config.pad_token_id = 0
        tensors = {name: tensor for name, tensor in part.named_parameters() if tensor.requires_grad}
        try:
            work = self._work(part, kind)
            batch = [tensor.to(META) for tensor in work.with_samples(samples).batch(range(rows))]
            drop = draws.Keyed(torch.zeros(2, dtype=torch.int32, device=META))

            def loss() -> Tensor:
                return work.loss_of(tensors, batch, linear=F.linear, drop=drop)

            def hidden() -> Tensor:
                found = blocks.decoder_of(part)(input_ids=batch[0], use_cache=False)
                return cast("Tensor", found.last_hidden_state)

            step = rehearse(
                loss if has_head else hidden,
                [*tensors.values()],
                module=part,
                kind=kind,
                products=precision.of_products(self.settings),
            )
        except _UNFORESEEN as error:
            problem = " ".join(str(error).split())
            raise UsageError(
                f"model={self.settings.model}: its memory can't be estimated without weights "
                f"({type(error).__name__}: {problem})"
            ) from error
        return replace(step, peak=step.peak + self._decoded_bytes(part))

    def _work(self, part: nn.Module, kind: str) -> Finetuning:
        """Return a workload on `part`. Only the whole model is probed: that takes some passes."""
        if kind not in self._works:
            labels = self.settings.classes.labels if self.settings.task == "classify" else ()
            with answered(kind):
                self._works[kind] = preparation.kind_of(self.settings)(
                    self.whole,
                    _samples(1, 1, are_pairs=self.settings.task == "preference"),
                    pad_token=0,
                    class_weights=(1.0,) * len(labels),
                    products=precision.of_products(self.settings),
                    **preparation.options_of(self.settings),
                )
        return self._works[kind].of_part(part)

    def _part(self, cut: Cut, *, recompute: bool = False) -> nn.Module:
        if cut == WHOLE and not recompute:
            return self.whole
        key = cut, recompute
        if key not in self._parts:
            self._parts[key] = _cut(self.whole, cut)
            if recompute:
                with contextlib.suppress(UsageError):  # raised for a model without blocks
                    masks.recompute(self._parts[key])
        return self._parts[key]

    def _bytes(self, module: nn.Module) -> int:
        """Return the bytes of a module's weights. Some may be in NF4."""
        whole = sum(one.numel() * one.element_size() for one in module.parameters())
        spared = sum(one.numel() * one.element_size() for one in self._packed(module))
        return whole - spared + sum(_nf4_bytes(one.numel()) for one in self._packed(module))

    def _decoded_bytes(self, part: nn.Module) -> int:
        """Return the bytes of the largest NF4 weight after it is decoded for its matrix product."""
        width = precision.of_products(self.settings).itemsize
        return width * max((one.numel() for one in self._packed(part)), default=0)

    def _packed(self, module: nn.Module) -> Iterator[Tensor]:
        for layer in module.modules():
            if getattr(layer, _NF4, False):
                yield cast("Tensor", layer.weight)


def _samples(rows: int, length: int, *, are_pairs: bool) -> Samples:
    """Return `rows` samples with rows of `length` tokens each; a pair has two."""
    each = 2 * length if are_pairs else length
    return Samples(
        tokens=np.ones(rows * each, np.int32),
        is_target=np.ones(rows * each, np.bool_),
        starts=np.arange(rows + 1, dtype=np.int64) * each,
        labels=np.zeros(rows, np.int32),
        cuts=np.full(rows if are_pairs else 0, length, np.int32),
    )


def _elsewhere(part: nn.Module, cut: Cut) -> list[nn.Parameter]:
    """Return the parameters of the embedding or head of `part` that another rank has.

    If they are tied, a rank with either has both.
    """
    model = cast("Any", part)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [set() if end is None else set(end.parameters()) for end in (table, head)]
    if ends[0] & ends[1]:
        return [] if cut.has_table or cut.has_head else [*ends[0]]
    away = [
        end for end, is_here in zip(ends, (cut.has_table, cut.has_head), strict=True) if not is_here
    ]
    return [parameter for end in away for parameter in end]


def _stack(module: nn.Module) -> nn.ModuleList:
    """Return the model's blocks: the list with modules of one type that has the most weights."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part)]
    alike = [one for one in lists if len({type(block) for block in one}) == 1]
    return max(alike, key=_num_elements, default=nn.ModuleList())


def _num_elements(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def _nf4_bytes(number: int) -> int:
    """Return the bytes of `number` weights in NF4: 4 bits each, and scales, also quantised."""
    scales = -(-number // nf4.BLOCK)
    return -(-number // 2) + scales + FLOAT_BYTES * -(-scales // _SCALES)


def _cut(whole: nn.Module, cut: Cut) -> nn.Module:
    """Return a copy of the model with only a rank's part."""
    # Some layers keep tensors from their last pass, which can't be copied with their history.
    held = [one for module in whole.modules() for one in vars(module).values()]
    kept = {id(one): one.detach() for one in held if isinstance(one, torch.Tensor)}
    part = copy.deepcopy(whole, kept)
    if cut.blocks is not None:
        blocks = _stack(part)
        del blocks[cut.blocks :]
        cast("Any", part).config.get_text_config().num_hidden_layers = cut.blocks
    for layer, how in _cuttable(part):
        _narrow(layer, how, cut.tensor)
    return part


def _cuttable(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    plan = blocks.plan_of(module)
    for name, how in plan.styles.items():
        yield plan.decoder.get_submodule(name), how


def _narrow(layer: nn.Module, how: str, size: int) -> None:
    """Cut a linear layer and its adapter. One of the adapter's factors stays whole."""
    axis = 0 if how == blocks.COLUMNS else 1
    for name, tensor in layer.named_parameters():
        whole = "lora_A" if how == blocks.COLUMNS else "lora_B"
        if whole in name or (tensor.dim() == 1 and how == blocks.ROWS):
            continue
        parts = list(tensor.shape)
        parts[axis] = -(-parts[axis] // size)
        tensor.data = torch.empty(parts, dtype=tensor.dtype, device=META)
