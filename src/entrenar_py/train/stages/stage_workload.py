"""A stage's part of the model as a workload: one pass of a shard at a time, forward or backward."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic.tensors import Batch, DropFunction, Tensors
from entrenar_py.train.model import captured, layer_plan, model, precision
from entrenar_py.train.model.masks import Masks
from entrenar_py.train.model.prepared import Prepared
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.workload import LENGTHS, Finetuning
from entrenar_py.train.stages import stage_model
from entrenar_py.train.stages.cut import Cut
from entrenar_py.train.stages.stage_model import Reached, Stage


@dataclass(frozen=True)
class Received:
    """Hidden states [n, t, d] from the stage before; the next draw has the number `draws`."""

    hidden: Tensor
    draws: int


class StageWorkload(Finetuning):
    """One stage of a model. `output_of` computes hidden states, or in the last stage the loss."""

    def __init__(self, module: nn.Module, stage: Stage, samples: Samples, **options: Any) -> None:
        """Take the arguments of `Finetuning`; `stage` runs `module`."""
        self.stage = stage
        super().__init__(module, samples, **options)

    def _has_drawn(self) -> bool:
        """Return whether this stage or its like draw anything by key.

        Raises UsageError for a model that draws from torch's own generator: the state of that
        depends on all layers before.
        """
        batch = self.objective.example((False, False), LENGTHS)
        before, masks = torch.get_rng_state(), Masks(torch.zeros(2, dtype=torch.int32))
        formats = self.formats(torch.device("cpu"))
        with contextlib.suppress(Reached), torch.no_grad(), formats, masks:
            self.objective(*batch)
        if not torch.equal(before, torch.get_rng_state()):
            named = type(layer_plan.decoder_of(self.module)).__name__
            raise UsageError(
                f"strategy=layer_pipeline: {named} draws random numbers that "
                "don't follow from a shard and a layer alone, so stages can't draw them alike; use "
                "a model without them"
            )
        return masks.num_drawn > 0

    @property
    def width(self) -> int:
        """The size of the last dim of hidden states."""
        return width_of(self.module)

    def hidden_shape(self, ids: Sequence[int]) -> tuple[int, int, int]:
        """Return the shape of the hidden states of the samples `ids`."""
        if not ids:
            return 0, 0, self.width
        num_rows, length = self.rows(ids)[0].shape
        return num_rows, length, self.width

    def output_of(
        self,
        tensors: Tensors,
        batch: Batch,
        received: Received | None,
        *,
        drop: DropFunction,
        place: torch.device,
    ) -> tuple[Tensor, int]:
        """Return hidden states [n, t, d], or the summed loss in the last stage; and the next draw.

        `received` is None in the first stage, and on the device `place`, as `tensors` are. While a
        graph is captured all is float32.
        """
        assert (received is None) == self.stage.is_first, "all other stages receive something"
        self.seed(drop)
        if received is not None:
            self.stage.receive(received.hidden, received.draws)
        objective = partial(functional_call, self.objective, captured.named(tensors, batch))
        masks = self.masks(place)
        try:
            with self.formats_of(batch, place), masks:
                output: Tensor = objective(tuple(one.to(place) for one in batch))
        except Reached as reached:
            output = reached.hidden
        finally:
            self.stage.receive(None)
        first = 0 if received is None else received.draws
        return output, masks.num_drawn if isinstance(masks, Masks) else first


def width_of(module: nn.Module) -> int:
    """Return the size of the last dim of a model's hidden states."""
    return int(cast("Any", module).config.get_text_config().hidden_size)


def hidden_bytes_max(width: int, samples: Samples, scenario: Scenario) -> int:
    """Return the most bytes that hidden states of one shard have."""
    longest = int(np.diff(samples.starts).max())
    num_rows = -(-scenario.batch_size // scenario.num_shards)
    return 4 * num_rows * -(-longest // LENGTHS) * LENGTHS * width


def load(prepared: Prepared, cut: Cut, number: int) -> StageWorkload:
    """Return the stage with this `number` as a workload; loads its part of the checkpoint.

    Raises UsageError for a checkpoint that can't be used, and a model that can't be cut.
    """
    own, settings = cut.stages[number], prepared.settings
    module = model.part(
        settings,
        prepared.pad_token,
        partial(stage_model.shorten, own=own),
        {spec.name for spec in cut.specs[number]},
        unties=number < len(cut.stages) - 1,
    )
    products = precision.of_products(settings)
    stage = Stage(module, own, products)
    if settings.task != "classify":  # a model that looks ahead does so in some stage
        model.require_blind(settings, stage_model.unlike_at_the_end(module, products))
    return StageWorkload(
        module,
        stage,
        prepared.train,
        pad_token=prepared.pad_token,
        class_weights=prepared.class_weights,
        products=products,
    )
