"""A transformers model and its samples, as the workload of the reference trainer.

A loss is the *sum* over a batch's targets, and a batch's weight is their number (or the sum of the
classes' weights, or the number of pairs). Shards are added along a tree and divided once, so a mean
over a shard would be wrong.

The shape of a batch follows from its samples' ids alone: the length of its rows, how samples are
packed, the number of places. So a shard has the same bits on any worker.

The trainer passes the trainable tensors in with each call (torch.func.functional_call), and keeps
them itself. Frozen weights belong to the module, and are moved to a device once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.func import functional_call

from entrenar_py.compute import draws, on_torch
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic.engine import Dropout
from entrenar_py.train.arithmetic.reduction import Aside
from entrenar_py.train.arithmetic.tensors import (
    Array,
    Batch,
    DropFunction,
    LinearFunction,
    Tensors,
    TensorSpec,
    Workload,
)
from entrenar_py.train.model import blocks, objectives, precision
from entrenar_py.train.model.masks import Masks
from entrenar_py.train.model.objectives import (
    IGNORED,
    PLACES,
    ClassObjective,
    Objective,
    TokenObjective,
)
from entrenar_py.train.model.samples import Samples


def is_captured(batch: Batch) -> bool:
    """Return whether a graph is being captured: its tensors have a class of their own."""
    return type(batch[0]) is not Tensor


def named(tensors: Tensors, batch: Batch) -> dict[str, Tensor]:
    """Return tensors by their names in an objective, as float32 while a graph is captured."""
    if not is_captured(batch):
        return {f"module.{name}": tensor for name, tensor in tensors.items()}
    return {f"module.{name}": _decoded(tensor) for name, tensor in tensors.items()}


def _decoded(tensor: Tensor) -> Tensor:
    is_short = tensor.is_floating_point() and tensor.dtype != torch.float32
    return tensor.float() if is_short else tensor


COMPILED: tuple[str, ...] = (
    "cuda",
)  # kinds of devices with kernels that torch compiles for a model
_KINDS_MAX = 64  # compiled variants of one block, for different shapes and masks


def compile_blocks(module: nn.Module) -> None:
    """Make torch compile each block of `module` at its first call, once for all lengths.

    Blocks are the members of a list of layers that isn't inside another list. Kernels are chosen by
    rules, never by timing, so that every process has the same kernels.

    If the embedding is frozen, the first block's input needs no gradient. Then that block would be
    compiled separately, and compiling would take twice as long. So the embedding's output is made
    to need a gradient, which costs one block's share of the backward pass.
    """
    from torch._inductor import config
    from torch.fx.experimental import _config as shapes

    cast("Any", config).deterministic = True
    # Otherwise a length that happens to equal the hidden size would be treated as a constant.
    cast("Any", shapes).use_duck_shape = False
    dynamo = cast("Any", torch._dynamo.config)
    # A module's float, such as the scale of an adapter, would at first be a symbol, and a constant
    # once everything is traced: then torch would trace everything again.
    dynamo.specialize_float = True
    dynamo.recompile_limit = max(dynamo.recompile_limit, _KINDS_MAX)
    stacks = [name for name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    cast("Any", module).get_input_embeddings().register_forward_hook(_needing_a_gradient)
    for name in stacks:
        if any(name.startswith(f"{other}.") for other in stacks):
            continue
        for block in cast("nn.ModuleList", module.get_submodule(name)):
            block.compile(dynamic=True)


def _needing_a_gradient(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


LENGTHS = 8  # rows are padded to a multiple of this


class Rows:
    """Samples as rows of tokens, padded to the longest row and to a multiple of `multiple`.

    With a `capacity`, a row has as many samples as fit into this number of tokens.
    """

    multiple = 1

    def __init__(self, samples: Samples, pad_token: int, capacity: int | None = None) -> None:
        self._samples, self._pad_token, self._capacity = samples, pad_token, capacity
        self._longest = samples.longest

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, attention mask, and tokens to predict (else IGNORED), int64 [n, t] each.

        Packed rows have positions instead of a mask. n and t depend only on the samples.
        """
        samples = self._samples
        lengths = [samples.length(i) for i in ids]
        rows = [[number] for number in range(len(ids))]
        if self._capacity is not None:
            rows = objectives.rows_of(lengths, self._capacity)
        longest = max(sum(lengths[number] for number in row) for row in rows)
        # Not longer than the longest sample of all: a model may have no positions for padding.
        most = max(self._capacity or 0, self._longest)
        length = min(-(-longest // LENGTHS) * LENGTHS, most)
        shape = (len(rows), -(-length // self.multiple) * self.multiple)
        tokens = np.full(shape, self._pad_token, np.int64)
        mask, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        for row, numbers in enumerate(rows):
            start = 0
            for number in numbers:
                part, stop = samples.part(ids[number]), start + lengths[number]
                tokens_of_row = samples.tokens[part]
                tokens[row, start:stop] = tokens_of_row
                mask[row, start:stop] = (
                    1 if self._capacity is None else np.arange(len(tokens_of_row))
                )
                targets[row, start:stop] = np.where(samples.is_target[part], tokens_of_row, IGNORED)
                start = stop
            if self._capacity is not None:  # padding is a sample of its own
                mask[row, start:] = np.arange(shape[1] - start)
        return torch.from_numpy(tokens), torch.from_numpy(mask), torch.from_numpy(targets)


class Tuned(Workload):
    """The base class of workloads that train a transformers model, on samples of tokens.

    The trainable tensors of `module` are trained. The weight of a sample is its number of tokens to
    predict, or the weight of its class. Each pair has the weight 1.
    """

    name = "finetune"
    draws = True  # the trainer can't know which layers of a model have dropout

    def __init__(
        self,
        module: nn.Module,
        samples: Samples,
        *,
        pad_token: int,
        class_weights: Sequence[float] = (),
        packed_tokens: int | None = None,
    ) -> None:
        """With `class_weights` the classes are learned, without them the next tokens.

        With `packed_tokens`, samples are packed into rows of this many tokens.
        """
        self.module = module
        self.specs = tuple(
            TensorSpec(name, tuple(tensor.shape), "trainable", decayed=tensor.dim() > 1)
            for name, tensor in module.named_parameters()
            if tensor.requires_grad
        )
        self.pad_token, self.packed_tokens = pad_token, packed_tokens
        self._class_weights = np.array(class_weights, np.float32)
        self._take(samples)

    def _take(self, samples: Samples) -> None:
        self.num_samples = len(samples)
        self.data_digest = samples.digest
        self._samples = samples
        self._rows = Rows(samples.rows, self.pad_token, self.packed_tokens)
        self._labels = samples.labels
        if self.has_classes:
            self._weights = self._class_weights[samples.labels].astype(np.float64)
        elif samples.are_pairs:
            self._weights = np.ones(len(samples))
        else:
            self._weights = samples.num_targets.astype(np.float64)
        self.weight_max = max(1, int(np.ceil(self._weights.max())))
        self._longest = samples.longest

    def with_samples(self, samples: Samples) -> Self:
        """Return the same workload on other samples, without running the model."""
        other = copy.copy(self)
        other._take(samples)
        return other

    def initial(self, rng: np.random.Generator) -> dict[str, Array]:
        """Return the module's own values, which `model.load` drew from the run's seed."""
        held = dict(self.module.named_parameters())
        return {spec.name: held[spec.name].detach().cpu().numpy().copy() for spec in self.specs}

    def weight(self, ids: Sequence[int]) -> float:
        return float(sum(self._weights[i] for i in ids))

    def num_tokens(self, ids: Sequence[int]) -> int:
        return sum(map(self._samples.length, ids))

    @property
    def decisive(self) -> dict[str, Any]:
        """Further facts that decide what is learned, by key. They stay the same on resuming."""
        return {}

    def require(self, ids: Sequence[int]) -> None:
        """Wait until everything that `batch` needs for these samples exists."""

    @property
    def has_classes(self) -> bool:
        """True if classes are learned, False if next tokens are."""
        return bool(len(self._class_weights))

    @property
    def is_packed(self) -> bool:
        """True if a row may have several samples."""
        return self.packed_tokens is not None

    def rows(self, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, mask (for packed rows: positions) and tokens to predict, int64 [n, t]."""
        return self._rows.batch(ids)

    def classes(self, ids: Sequence[int]) -> Tensor:
        """Return the class of each sample, int64 [n]."""
        return torch.from_numpy(self._labels[list(ids)].astype(np.int64))

    @property
    def row_multiple(self) -> int:
        """Rows are padded to a multiple of this many tokens."""
        return self._rows.multiple

    def fill_up(self, multiple: int) -> None:
        """Pad all rows to a multiple of `multiple` tokens from now on."""
        self._rows.multiple = multiple

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the tensors that the loss is a function of, all int64.

        For classes: tokens and attention mask [n, t], and classes [n]. Otherwise: tokens [n, t];
        places with a target [m], as indices into n * t; and these targets [m], padded with IGNORED.
        If samples are packed, their positions [n, t] follow.
        """
        tokens, mask, targets = self.rows(ids)
        if self.has_classes:
            return tokens, mask, self.classes(ids)
        after = following(targets).flatten()
        places = (after != IGNORED).nonzero().flatten()
        room = -len(places) % PLACES
        wanted = F.pad(after[places], (0, room), value=IGNORED)
        positions = (mask,) if self.is_packed else ()
        # The last place never has a target, so padding points there.
        return tokens, F.pad(places, (0, room), value=tokens.numel() - 1), wanted, *positions


def following(targets: Tensor) -> Tensor:
    """Return `targets` shifted by one: at each place, the target that its logits predict."""
    return F.pad(targets[:, 1:], (0, 1), value=IGNORED)


class Finetuning(Tuned):
    """A workload in which the trainable tensors of `module` learn next tokens, or classes."""

    def __init__(
        self,
        module: nn.Module,
        samples: Samples,
        *,
        pad_token: int,
        class_weights: Sequence[float] = (),
        products: torch.dtype = torch.float32,
        packed_tokens: int | None = None,
        compiles: bool = False,
        by_cudnn: bool = False,
    ) -> None:
        """Take the arguments of `Tuned`, and three more.

        `products` is the dtype of the model's matrix products. With `compiles`, the model is
        compiled when it is moved to a device in COMPILED, unless it has dropout. With `by_cudnn`,
        the module is one that `attention.use` was called for. The module `objective` returns the
        summed loss of a result of `batch`.
        """
        super().__init__(
            *(module, samples),
            pad_token=pad_token,
            class_weights=class_weights,
            packed_tokens=packed_tokens,
        )
        self._device = torch.device("cpu")
        self.products, self._compiles, self.is_compiled = products, compiles, False
        self._shown: set[tuple[bool, ...]] = set()  # kinds of batches that are compiled
        self._dropout_key: Tensor | None = None
        self._by_cudnn = by_cudnn
        self._warns = False  # after the next shard, if cuDNN should compute attention but doesn't
        with precision.applied(products, next(module.parameters()).device):
            self.objective = self.new_objective(class_weights)
        self.objective.train()
        self.drops = self._has_drawn()

    def of_part(self, part: nn.Module) -> Self:
        """Return the same workload on a part of the module.

        The results of probing the whole module hold for the part, which is not probed again.
        """
        ends = ((self.module, part), (_head(self.module), _head(part)))
        known = {id(whole): own for whole, own in ends if whole is not None}
        other = copy.copy(self)
        other.module, other.objective = part, copy.deepcopy(self.objective, known)
        return other

    def new_objective(self, class_weights: Sequence[float]) -> Objective:
        """Return the module that computes the summed loss of a result of `batch`."""
        if class_weights:
            return ClassObjective(self.module, class_weights)
        return TokenObjective(self.module)

    @property
    def is_static(self) -> bool:
        """See `Workload`. A recorded step would repeat the same dropout and the same packing."""
        return self.objective.is_static and not self.drops and not self.is_packed

    def _has_drawn(self) -> bool:
        """Return whether the model draws random numbers in its forward pass on an example."""
        device = next(self.module.parameters()).device
        batch = self.objective.example((False, False), LENGTHS)
        batch = tuple(one.to(device) for one in batch)
        head = self.objective.head

        def has_drawn() -> bool:
            before = torch.get_rng_state()
            masks = Masks(torch.zeros(2, dtype=torch.int32).to(device))
            with torch.no_grad(), self.formats(device), masks:
                if head is None:
                    self.objective(*batch)
                else:  # a large vocabulary takes longer than the blocks
                    with objectives.replaced_by_identity(head):
                        self.module(input_ids=batch[0], use_cache=False)
            return masks.num_drawn > 0 or not torch.equal(before, torch.get_rng_state())

        return blocks.probed(self.module, has_drawn)

    @property
    def constants(self) -> Tensors:
        """The frozen weights of the module, and the tables with which codes are decoded.

        They have the dtype in which they are stored.
        """
        frozen = [pair for pair in self.module.named_parameters() if not pair[1].requires_grad]
        buffers = self.module.named_buffers()
        tables = [pair for pair in buffers if pair[0].endswith(precision.TABLES)]
        # Codes have a tensor class of their own, which a graph can't hold.
        return {name: held.detach().as_subclass(Tensor) for name, held in (*frozen, *tables)}

    def loss_of(
        self, tensors: Tensors, batch: Batch, *, linear: LinearFunction, drop: DropFunction
    ) -> Tensor:
        device = next(iter(tensors.values())).device
        if device != self._device:
            self.move(device)
        if self.is_compiled and (kind := self.objective.kind(batch)) not in self._shown:
            self._show(kind, tensors)
        self.seed(drop)
        return self._loss(tensors, batch)

    def _loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        objective = partial(functional_call, self.objective, named(tensors, batch))
        return self.loss(objective, batch, self._device)

    def seed(self, drop: DropFunction) -> None:
        """Make all random numbers of the model follow from `drop`, until it is seeded again.

        These are dropout, drawn by a key, and whatever torch's own generator draws. If `drop` has
        no key, nothing is dropped.
        """
        self._dropout_key = draws.key_of(drop)
        if isinstance(drop, Dropout):
            torch.manual_seed(drop.seed())

    def loss(
        self, objective: Callable[[tuple[Tensor, ...]], Tensor], batch: Batch, device: torch.device
    ) -> Tensor:
        """Return the summed loss of `batch`, 0-d, by calling `objective` with it on `device`."""
        given = tuple(one.to(device) for one in batch)
        with self.formats_of(batch, device), self.masks(device):
            loss = objective(given)
        self.warn_once()
        return loss

    def masks(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which dropout on `device` draws as it was seeded."""
        key = self._dropout_key
        if not self.drops:
            return nullcontext()
        return Masks(None if key is None else key.to(device))

    def formats(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which matrix products on `device` have the run's dtype."""
        return precision.applied(self.products, device)

    def formats_of(self, batch: Batch, device: torch.device) -> AbstractContextManager[Any]:
        """Return `formats`; while a graph of a step is captured, a context without effect."""
        return nullcontext() if is_captured(batch) else self.formats(device)

    def move(self, device: torch.device) -> None:
        """Move the module `objective` to `device`, and choose the kernels of its blocks and loss.

        Raises UsageError if the run needs compilation on CUDA, or attention by cuDNN, and this
        process can't do that.
        """
        self.require_attention(device)
        is_new = self._compiles and not (self.is_compiled or self.drops)
        is_new = is_new and device.type in COMPILED
        if is_new and device.type == "cuda" and (problem := on_torch.compiler_problem()):
            raise UsageError(
                f"compile: this run compiles its blocks on CUDA, and here {problem}; install it, "
                "or use compile: false in all processes of the run"
            )
        self.objective.to(device)
        if is_new:
            self.is_compiled = True
            compile_blocks(self.module)
            if device.type == "cuda" and isinstance(self.objective, objectives.NextTokens):
                self.objective.is_fused = True
        self._device = device

    def require_attention(self, device: torch.device) -> None:
        """Raise UsageError if cuDNN should compute attention on a CUDA `device`, and can't there.

        `warn_once` says later whether it does.
        """
        if self._by_cudnn and device.type == "cuda":
            from entrenar_py.train.model import attention  # imports transformers

            attention.require(self.module, device)
            self._warns = True

    def warn_once(self) -> None:
        """Say on standard error, after the first pass, if cuDNN should have computed attention."""
        if self._warns:
            from entrenar_py.train.model import attention  # imports transformers

            self._warns = False
            attention.warn_if_unused()

    def warm_up(self, device: torch.device, num_samples: int) -> None:
        """Move to the CUDA `device`, and compile for batches of `num_samples`, before a step does.

        Raises as `move` does.
        """
        loaded = Aside().start(partial(self._load_kernels, device))
        self.move(device)
        loaded()
        if not self.is_compiled:
            return
        trained = {name: one for name, one in self.module.named_parameters() if one.requires_grad}
        step = on_torch.DeviceStep(device, self, trained, scale=1.0)
        step.weights.zero_()
        self._show(self.objective.kind(self.batch(range(num_samples))), step.tensors)

    def _load_kernels(self, device: torch.device) -> None:
        """Load kernels that torch doesn't compile, with the first call of each."""
        self.require_attention(device)
        head = self.objective.head
        is_compiled = self._compiles and not self.drops and not on_torch.compiler_problem()
        if is_compiled and head is not None:
            objectives.load_kernel(len(head.weight), self.products, device)

    def as_it_is(self) -> AbstractContextManager[Any]:
        """Return a context in which blocks run without compilation, as for scores."""
        stance = cast("Any", torch.compiler).set_stance
        return stance("force_eager") if self.is_compiled else nullcontext()

    def _show(self, kind: tuple[bool, ...], tensors: Tensors) -> None:
        """Make the model compile for batches of `kind`, on an example.

        Which kernels are compiled may depend on the shapes that come first. So every process starts
        with the same shapes, whichever samples it gets.
        """
        loss = self._loss(tensors, self.objective.example(kind, self._longest))
        torch.autograd.grad(loss, [tensors[spec.name] for spec in self.specs])
        self._shown.add(kind)


def _head(module: Any) -> Any:
    return module.get_output_embeddings()
