"""A model of transformers and its samples, as the workload of the reference trainer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.func import functional_call

from entrenar_py.training.dropout import Dropout
from entrenar_py.training.tensors import (
    Array,
    Batch,
    DropFunction,
    LinearFunction,
    Tensors,
    TensorSpec,
    Workload,
)
from entrenar_py.tuning.samples import Samples

IGNORED = -100  # the target that cross entropy leaves out
_LENGTHS = 8  # rows are filled up to a multiple of this


class Rows:
    """Samples as rows of tokens, filled up to the longest row."""

    def __init__(self, samples: Samples, pad_token: int) -> None:
        self._samples, self._pad_token = samples, pad_token
        self._longest = int(np.diff(samples.starts).max(initial=0))

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, attention mask and tokens to predict (else IGNORED), int64 [n, t] each.

        t depends on the samples alone.
        """
        samples = self._samples
        longest = max(samples.length(i) for i in ids)
        # Not beyond the longest sample of all: a model may have no position for what fills up.
        shape = (len(ids), min(-(-longest // _LENGTHS) * _LENGTHS, self._longest))
        tokens = np.full(shape, self._pad_token, np.int64)
        mask, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        for row, index in enumerate(ids):
            part, length = samples.part(index), samples.length(index)
            held = samples.tokens[part]
            tokens[row, :length], mask[row, :length] = held, 1
            targets[row, :length] = np.where(samples.is_target[part], held, IGNORED)
        return torch.from_numpy(tokens), torch.from_numpy(mask), torch.from_numpy(targets)


class Finetuning(Workload):
    """Next tokens, or classes, learned by the trainable tensors of `module`.

    The weight of a sample is its number of tokens to predict, or its class's weight.
    """

    name = "finetune"
    draws = True  # which layers of a model drop something is not to be known from outside

    def __init__(
        self,
        module: nn.Module,
        samples: Samples,
        *,
        pad_token: int,
        class_weights: Sequence[float] = (),
    ) -> None:
        """With `class_weights` the classes are learned, without them the next tokens."""
        self.module = module
        self.specs = tuple(
            TensorSpec(name, tuple(tensor.shape), "trainable", decayed=tensor.dim() > 1)
            for name, tensor in module.named_parameters()
            if tensor.requires_grad
        )
        self.num_samples = len(samples)
        self.data_digest = samples.digest
        self._rows, self._labels = Rows(samples, pad_token), samples.labels
        self._class_weights = np.array(class_weights, np.float32)
        if class_weights:
            self._weights = self._class_weights[samples.labels].astype(np.float64)
        else:
            self._weights = samples.num_targets.astype(np.float64)
        self.weight_max = max(1, int(np.ceil(self._weights.max())))
        self._device = torch.device("cpu")

    @property
    def constants(self) -> Tensors:
        """The weights of the module that are not trained."""
        held = self.module.named_parameters()
        return {name: tensor.detach() for name, tensor in held if not tensor.requires_grad}

    def initial(self, rng: np.random.Generator) -> dict[str, Array]:
        """Return the module's own values, which `model.load` drew from the run's seed."""
        held = dict(self.module.named_parameters())
        return {spec.name: held[spec.name].detach().cpu().numpy().copy() for spec in self.specs}

    def weight(self, ids: Sequence[int]) -> float:
        return float(sum(self._weights[i] for i in ids))

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, ...]:
        """Return tokens and attention mask, int64 [n, t], then targets.

        Targets are classes, int64 [n], or tokens, int64 [n, t], IGNORED where none is predicted.
        """
        tokens, mask, targets = self._rows.batch(ids)
        if len(self._class_weights):
            targets = torch.from_numpy(self._labels[list(ids)].astype(np.int64))
        return tokens, mask, targets

    def loss_of(
        self, tensors: Tensors, batch: Batch, *, linear: LinearFunction, drop: DropFunction
    ) -> Tensor:
        device = next(iter(tensors.values())).device
        if device != self._device:
            self.module.to(device)
            self._device = device
        tokens, mask, targets = (one.to(device) for one in batch)
        if isinstance(drop, Dropout):  # all that the model draws follows from seed, step and shard
            torch.manual_seed(drop.seed())
        given = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
        logits = functional_call(self.module, dict(tensors), (), given).logits
        if len(self._class_weights):  # [n, classes]
            weights = torch.from_numpy(self._class_weights).to(logits)
            return F.cross_entropy(logits, targets, weight=weights, reduction="sum")
        # The logits at a position are of the token after it.
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(),
            targets[:, 1:].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
